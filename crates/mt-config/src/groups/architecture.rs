//! Properties of a family's layers other than dimensions: attention types, norms, positions.

use super::{
    FromValue,
    choices::{AttentionKind, AttentionType, DecoderBlock, LayerAttention, RopeType},
    group,
    model::uneven_heads,
};
use crate::{
    config::{Config, not_built},
    error::Problem,
    families,
};

group! {
    /// Latent attention.
    pub struct LatentGroup {
        q_lora_rank: usize,
        kv_lora_rank: usize,
        qk_nope_head_dim: usize,
        qk_rope_head_dim: usize,
        v_head_dim: usize,
        mscale: f64,
        rope_interleave: bool,
        mla_naive_kvcache: bool,
    }
}

impl LatentGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        let is_family = config.entry("decoder_block").value == DecoderBlock::DeepSeek.name();
        let is_latent = config.entry("attention_type").value == AttentionType::Latent.name();
        if is_family != is_latent {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", config.stated("decoder_block"), config.stated("attention_type")),
                "use `attention_type=mla` with `decoder_block=deepseek`, and neither without the other",
            ));
        }
        let is_compressed = config.entry("attention_type").value == AttentionType::Compressed.name();
        if is_compressed && self.q_lora_rank == 0 {
            problems.push(Problem::inconsistent(
                format!("{}, but compressed attention needs a width", config.stated("q_lora_rank")),
                "use a positive number, such as `q_lora_rank=64`",
            ));
        }
        if !is_latent && !is_compressed {
            return;
        }
        for (key, width) in [
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            if width == 0 && is_latent {
                problems.push(Problem::inconsistent(
                    format!("{}, but latent attention needs a width", config.stated(key)),
                    format!("use a positive number, such as `{key}=64`"),
                ));
            }
        }
        if !self.qk_rope_head_dim.is_multiple_of(2) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but rotary embeddings rotate pairs of dimensions",
                    config.stated("qk_rope_head_dim")
                ),
                format!("use an even number such as `qk_rope_head_dim={}`", self.qk_rope_head_dim + 1),
            ));
        }
    }
}

group! {
    /// The indexer of sparse attention.
    pub struct IndexerGroup {
        use_indexer: bool,
        indexer_head_dim: usize,
        indexer_n_heads: usize,
        indexer_topk: usize,
        indexer_sparse_training: bool,
        indexer_loss_scaling_factor: f64,
        indexer_mask_exact_topk: bool,
        indexer_use_approx_top_k: bool,
        indexer_approx_top_k_recall: f64,
    }
}

impl IndexerGroup {
    /// Whether only the indexer learns, from the attention of all layers to all earlier positions.
    pub fn warms_up(&self) -> bool {
        self.use_indexer && self.indexer_loss_scaling_factor > 0.0 && !self.indexer_sparse_training
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.use_indexer {
            return;
        }
        if config.entry("attention_type").value != AttentionType::Latent.name() {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", config.stated("use_indexer"), config.stated("attention_type")),
                "use `attention_type=mla`, or leave out `use_indexer`",
            ));
            return;
        }
        if config.entry("q_lora_rank").value == 0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, and the indexer reads the latent vector of queries",
                    config.stated("use_indexer"),
                    config.stated("q_lora_rank")
                ),
                "use a positive number, such as `q_lora_rank=64`",
            ));
        }
        for (key, size) in [("indexer_n_heads", self.indexer_n_heads), ("indexer_topk", self.indexer_topk)] {
            if size == 0 {
                problems.push(Problem::inconsistent(
                    format!("{}, but the indexer needs at least one", config.stated(key)),
                    format!("use a positive number, such as `{key}=64`"),
                ));
            }
        }
        let rotated = config.entry("qk_rope_head_dim").value.as_u64().unwrap_or(0) as usize;
        if self.indexer_head_dim < rotated {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which the indexer rotates, too",
                    config.stated("indexer_head_dim"),
                    config.stated("qk_rope_head_dim")
                ),
                format!("use at least `indexer_head_dim={rotated}`"),
            ));
        }
        if self.indexer_use_approx_top_k && self.indexer_approx_top_k_recall <= 0.0 {
            problems.push(Problem::inconsistent(
                format!("{}, so that nothing has to be found", config.stated("indexer_approx_top_k_recall")),
                "use a share above 0 and up to 1, such as 0.95",
            ));
        }
        if self.indexer_loss_scaling_factor < 0.0 {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, which would teach the indexer the opposite",
                    config.stated("indexer_loss_scaling_factor")
                ),
                "use a positive number, or 0 to leave the indexer as it is",
            ));
        }
    }
}

group! {
    /// Compressed attention.
    pub struct CompressedGroup {
        o_lora_rank: usize,
        o_groups: usize,
        compress_ratios: Vec<usize>,
        compressed_rope_max_timescale: usize,
        indexer_head_dim: usize,
        indexer_n_heads: usize,
        indexer_topk: usize,
    }
}

/// The number of tokens in each of the overlapping blocks among which an indexer chooses. Larger blocks are all seen.
const INDEXED_RATIO: usize = 4;

impl CompressedGroup {
    /// Whether layers with this ratio have an indexer.
    pub fn is_indexed(ratio: usize) -> bool {
        ratio == INDEXED_RATIO
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        let is_family = config.entry("decoder_block").value == DecoderBlock::DeepSeek4.name();
        let is_compressed = config.entry("attention_type").value == AttentionType::Compressed.name();
        if is_family != is_compressed {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", config.stated("decoder_block"), config.stated("attention_type")),
                "use `attention_type=compressed` with `decoder_block=deepseek4`, and neither without the other",
            ));
        }
        if !(is_family && is_compressed) {
            return;
        }
        for (key, is_set, neutral) in [
            ("attention", config.entry("attention").value == AttentionKind::Flash.name(), "autoselected"),
            ("attn_logits_soft_cap", config.entry("attn_logits_soft_cap").value.as_f64() > Some(0.0), "none"),
        ] {
            if is_set {
                problems.push(Problem::inconsistent(
                    format!(
                        "{}, but {}, which has none",
                        config.stated(key),
                        config.stated("attention_type")
                    ),
                    format!("use `{key}={neutral}`"),
                ));
            }
        }
        if self.compress_ratios.iter().any(|ratio| (1..INDEXED_RATIO).contains(ratio)) {
            problems.push(Problem::inconsistent(
                format!(
                    "{} has blocks of fewer than {INDEXED_RATIO} tokens",
                    config.stated("compress_ratios")
                ),
                format!(
                    "use 0 for layers without blocks, {INDEXED_RATIO} for layers with an indexer, or more"
                ),
            ));
        }
        let is_used = self.compress_ratios.contains(&INDEXED_RATIO);
        let needed = [
            ("o_groups", self.o_groups, true),
            ("o_lora_rank", self.o_lora_rank, true),
            ("indexer_head_dim", self.indexer_head_dim, is_used),
            ("indexer_n_heads", self.indexer_n_heads, is_used),
            ("indexer_topk", self.indexer_topk, is_used),
        ];
        for (key, _, _) in needed.iter().filter(|(_, number, is_needed)| *is_needed && *number == 0) {
            problems.push(Problem::inconsistent(
                format!("{}, but compressed attention needs some", config.stated(key)),
                format!("use a positive number, such as `{key}=8`"),
            ));
        }
    }
}

group! {
    /// Hyper-connections: several residual streams that the parts of layers mix.
    pub struct HyperConnectionGroup {
        mhc_expansion_rate: usize,
        sinkhorn_iterations: usize,
        enable_mhc_lite: bool,
    }
}

/// The most streams whose permutations a program can hold.
const MOST_PERMUTED: usize = 7;

impl HyperConnectionGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        // Families that are not built are reported by themselves.
        let Some(block) = DecoderBlock::from_value(&config.entry("decoder_block").value) else { return };
        if self.mhc_expansion_rate < 2 {
            return;
        }
        if !families::STREAMS.include(block) {
            problems.push(not_built(
                config.entry("mhc_expansion_rate"),
                "hyper-connections in this model family",
            ));
        }
        if self.enable_mhc_lite && self.mhc_expansion_rate > MOST_PERMUTED {
            problems.push(Problem::inconsistent(
                format!(
                    "{} takes a weight for each of the {}! permutations of {}",
                    config.stated("enable_mhc_lite"),
                    self.mhc_expansion_rate,
                    config.stated("mhc_expansion_rate")
                ),
                format!("use at most `mhc_expansion_rate={MOST_PERMUTED}`, usually 4, or leave out `enable_mhc_lite`"),
            ));
        }
    }
}

group! {
    /// Layers of Gated DeltaNet among those with attention.
    pub struct GatedDeltaGroup {
        inhomogeneous_layer_cycle_interval: usize,
        gdn_conv_kernel_dim: usize,
        gdn_key_head_dim: usize,
        gdn_value_head_dim: usize,
        gdn_num_key_heads: usize,
        gdn_num_value_heads: usize,
        gdn_chunk_size: usize,
        use_qk_norm_in_gdn: bool,
    }
}

impl GatedDeltaGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !families::GATED_DELTA.include_that_of(config) {
            return;
        }
        let values = ("gdn_num_value_heads", self.gdn_num_value_heads);
        let keys = ("gdn_num_key_heads", self.gdn_num_key_heads);
        problems.extend(uneven_heads(config, values, keys, "value heads"));
    }
}

group! {
    /// Attention and the norms around it.
    pub struct AttentionGroup {
        attention_type: AttentionType,
        causal_block_size: usize,
        attention_pattern: Vec<LayerAttention>,
        sliding_window_size: usize,
        chunk_attn_window_size: usize,
        query_pre_attn_scalar: Option<f64>,
        attn_logits_soft_cap: Option<f64>,
        attention_bias: bool,
        attention_sink: bool,
        fused_qkv: bool,
        mlp_bias: bool,
        fused_mlp: bool,
        mlp_activations_limit: f64,
        moba: bool,
        moba_chunk_size: usize,
        moba_topk: usize,
        attention_output_dim: i64,
        use_qk_norm: bool,
        qk_norm_with_scale: bool,
        use_post_ffw_norm: bool,
        temperature_tuning: bool,
        temperature_tuning_scale: f64,
        temperature_tuning_floor_scale: usize,
        share_kv_projections: bool,
        global_head_dim: usize,
        global_num_kv_heads: usize,
        num_kv_shared_layers: usize,
        use_double_wide_mlp: bool,
        hidden_size_per_layer_input: usize,
        final_logits_soft_cap: Option<f64>,
    }
}

impl AttentionGroup {
    fn check_chosen_chunks(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.moba {
            return;
        }
        if config.entry("attention").value == AttentionKind::Flash.name() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which cannot choose chunks",
                    config.stated("moba"),
                    config.stated("attention")
                ),
                "use `attention=dot_product`, or leave `attention` out",
            ));
        }
        if config.entry("use_indexer").value == true {
            problems.push(Problem::inconsistent(
                format!("{}, but {} chooses keys, too", config.stated("moba"), config.stated("use_indexer")),
                "leave one of them out",
            ));
        }
        let without_chunks = [AttentionType::Full, AttentionType::BlockDiffusion, AttentionType::Compressed];
        if without_chunks.contains(&self.attention_type) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, which chooses earlier chunks, but {}",
                    config.stated("moba"),
                    config.stated("attention_type")
                ),
                "leave one of them out",
            ));
        }
    }

    fn check_width_of_experts(&self, config: &Config, problems: &mut Vec<Problem>) {
        if config.entry("decoder_block").value != DecoderBlock::Qwen3CustomMoe.name() {
            return;
        }
        let experts = config.entry("moe_expert_input_dim").value.as_i64();
        if self.attention_output_dim <= 0 || experts != Some(self.attention_output_dim) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, whose experts read the output of attention, but {} and {}",
                    config.stated("decoder_block"),
                    config.stated("attention_output_dim"),
                    config.stated("moe_expert_input_dim")
                ),
                "set both to the same width, such as `attention_output_dim=768 moe_expert_input_dim=768`",
            ));
        }
        for (key, usual) in [("first_num_dense_layers", 0), ("interleave_moe_layer_step", 1)] {
            if config.entry(key).value != usual {
                problems.push(Problem::inconsistent(
                    format!(
                        "{}, but all layers of {} have experts",
                        config.stated(key),
                        config.stated("decoder_block")
                    ),
                    format!("leave out `{key}`"),
                ));
            }
        }
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        for (kind, key, size) in [
            (AttentionType::LocalSliding, "sliding_window_size", self.sliding_window_size),
            (AttentionType::Chunk, "chunk_attn_window_size", self.chunk_attn_window_size),
            (AttentionType::Compressed, "sliding_window_size", self.sliding_window_size),
        ] {
            if self.attention_type == kind && size == 0 {
                problems.push(Problem::inconsistent(
                    format!("{}, but {}", config.stated("attention_type"), config.stated(key)),
                    format!("set the number of visible positions, such as `{key}=1024`, or use `attention_type=global`"),
                ));
            }
        }
        let alternates = families::LOCAL.include_that_of(config);
        if self.attention_type == AttentionType::Full {
            let decided_by = match alternates || families::MIXED.include_that_of(config) {
                true => Some("decoder_block"),
                false => (!self.attention_pattern.is_empty()).then_some("attention_pattern"),
            };
            if let Some(key) = decided_by {
                problems.push(Problem::inconsistent(
                    format!(
                        "{}, but {}, which chooses the attention of each layer",
                        config.stated("attention_type"),
                        config.stated(key)
                    ),
                    "use a family whose layers are all alike, such as `decoder_block=llama2`, without \
                     `attention_pattern`",
                ));
            }
        }
        self.check_chosen_chunks(config, problems);
        self.check_width_of_experts(config, problems);
        if !families::HYBRID.include_that_of(config)
            && self.attention_pattern.contains(&LayerAttention::Linear)
        {
            problems.push(Problem::inconsistent(
                format!(
                    "{} has layers with a state of fixed size, but {}, which has none",
                    config.stated("attention_pattern"),
                    config.stated("decoder_block")
                ),
                format!("use `local` and `global`, or {}", families::HYBRID.arguments()),
            ));
        }
        let of_local = match self.attention_pattern.as_slice() {
            [] if alternates => Some("decoder_block"),
            given if given.contains(&LayerAttention::Local) => Some("attention_pattern"),
            _ => None,
        };
        if let Some(key) = of_local.filter(|_| self.sliding_window_size == 0) {
            problems.push(Problem::inconsistent(
                format!("{} has local layers, but {}", config.stated(key), config.stated("sliding_window_size")),
                format!("set the number of positions that local layers see, such as `sliding_window_size=1024`, or choose a `{key}` without local layers"),
            ));
        }
    }
}

group! {
    /// Position encodings.
    pub struct PositionGroup {
        rope_type: RopeType,
        rope_use_scale: bool,
        rope_min_timescale: f64,
        rope_max_timescale: f64,
        local_rope_max_timescale: Option<f64>,
        global_rope_max_timescale: Option<f64>,
        rope_linear_scaling_factor: f64,
        global_rope_proportion: f64,
        local_rope_proportion: f64,
        partial_rotary_factor: f64,
        rope_factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        rope_truncate: bool,
        rope_attention_scaling: bool,
        rope_attention_factor: Option<f64>,
        rope_low_frequency_factor: f64,
        rope_high_frequency_factor: f64,
        llama3_rope_factor: f64,
        llama3_rope_original_length: usize,
        max_position_embeddings: usize,
        original_max_position_embeddings: usize,
        nope_layer_interval: Option<usize>,
        trainable_position_size: Option<usize>,
        use_untrainable_positional_embedding: bool,
    }
}

impl PositionGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.rope_min_timescale >= self.rope_max_timescale {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which is not above it",
                    config.stated("rope_min_timescale"),
                    config.stated("rope_max_timescale")
                ),
                "lower `rope_min_timescale`, usually 1, or raise `rope_max_timescale`, usually 10000 or more",
            ));
        }
        if self.rope_low_frequency_factor > self.rope_high_frequency_factor {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, which is below it",
                    config.stated("rope_low_frequency_factor"),
                    config.stated("rope_high_frequency_factor")
                ),
                "lower the first, usually 1, or raise the second, usually 4",
            ));
        }
    }
}
