//! The model: dimensions, precision, output head.

use super::{KeyGroup, features};
use crate::{
    families,
    groups::{DecoderBlock, MatmulPrecision, MlpActivation, RopeType},
    key::{Key, Literal},
};

const DTYPES: &[&str] = &["bfloat16", "float32", "float16"];

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "ModelArchitecture",
        title: "Model",
        prefix: None,
        keys: &[
            Key::of::<DecoderBlock>("decoder_block", "llama2", "The model family that defines the decoder's layers.")
                .acts_on("model"),
            Key::integer(
                "global_parameter_scale",
                1,
                "Factor on the model's size, a power of two that is distributed over its dimensions.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_emb_dim",
                2048,
                "Width of the residual stream, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_query_heads",
                16,
                "Number of query heads, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_kv_heads",
                16,
                "Number of key and value heads, before `global_parameter_scale`; must divide the number of \
                 query heads.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_mlp_dim",
                7168,
                "Width of the feed-forward layers, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_decoder_layers",
                16,
                "Number of decoder layers, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .at_most(100_000.0)
            .acts_on("model"),
            Key::integer("head_dim", 128, "Width of one attention head.").at_least(1.0).acts_on("attention"),
            Key::list_of::<MlpActivation>(
                "mlp_activations",
                &["silu", "linear"],
                "Activations whose product gates the feed-forward layer.",
            )
            .acts_on("feed-forward layers"),
            Key::float("dense_init_scale", 1.0, "Variance scale of the initial weights of dense layers.")
                .at_least(0.0)
                .acts_on("initialization"),
            Key::float(
                "normalization_layer_epsilon",
                1e-5,
                "Epsilon that normalization adds to the mean square or the variance.",
            )
            .at_least(0.0)
            .acts_on("normalization"),
            Key::boolean(
                "fused_qkv",
                false,
                "Store the projections of queries, keys and values of GPT-3's layers as one array in checkpoints. The computation is the same.",
            )
            .only_with("decoder_block", &["gpt3"])
            .acts_on("attention"),
            Key::boolean(
                "fused_mlp",
                false,
                "Store the gate and input projections of feed-forward layers as one array in checkpoints. The \
                 computation is the same.",
            )
            .acts_on("feed-forward layers"),
            Key::boolean("attention_bias", false, "Add biases to the attention projections.")
                .acts_on("attention"),
            Key::integer(
                "attention_output_dim",
                -1,
                "Width of the output of attention, which the experts read instead of the residual stream.",
            )
            .at_least(-1.0)
            .neutral(&[Literal::Integer(0)])
            .only_with("decoder_block", &["qwen3_custom_moe"])
            .acts_on("attention"),
            Key::integer(
                "global_head_dim",
                0,
                "Width of a head in layers of global attention; 0 for `head_dim`.",
            )
            .at_least(0.0)
            .only_with("decoder_block", families::GEMMA4.names)
            .acts_on("attention"),
            Key::float(
                "mlp_activations_limit",
                -1.0,
                "Magnitude at which the gate and the input of feed-forward layers are clipped; -1 for no \
                 limit.",
            )
            .at_least(-1.0)
            .only_with("decoder_block", families::CLIPPED.names)
            .acts_on("feed-forward layers"),
            Key::boolean(
                "qk_norm_with_scale",
                true,
                "Multiply normalized queries and keys by a learned scale.",
            )
            .only_with("use_qk_norm", &[])
            .only_with("decoder_block", families::NORMALIZED.names)
            .acts_on("normalization"),
            Key::boolean("v_norm_with_scale", true, "Multiply normalized values by a learned scale.")
                .no_effect_here(
                    "families that normalize values do so without a scale, as published",
                )
                .only_with("decoder_block", families::GEMMA4.names)
                .done_by(&[])
                .acts_on("normalization"),
        ],
    },
    KeyGroup {
        name: "DataTypes",
        title: "Precision",
        prefix: None,
        keys: &[
            Key::choice("dtype", "bfloat16", DTYPES, "Element type of activations.")
                .refuse_choices(&[("float16", "float16 computation")])
                .acts_on("model"),
            Key::choice(
                "weight_dtype",
                "float32",
                DTYPES,
                "Element type of weights; training supports `float32` only, below adapters also `bfloat16`.",
            )
            .acts_on("model"),
            Key::choice("grad_dtype", "float32", DTYPES, "Element type of the gradients.")
                .refuse_choices(&[("float16", "float16 gradients"), ("bfloat16", "bfloat16 gradients")])
                .acts_on("optimizer"),
            Key::of::<MatmulPrecision>(
                "matmul_precision",
                "default",
                "Precision of float32 matrix products: the compiler's (`default` or `bfloat16`), three \
                 bfloat16 products (`high`), or full float32 (`highest` or `float32`). CPUs multiply in \
                 float32, except with `high` on processors with AMX.",
            )
            .acts_on("model"),
            Key::boolean("activations_in_float32", false, "Apply activation functions in float32.")
                    .only_with("dtype", &["bfloat16"])
                .acts_on("feed-forward layers"),
            Key::text("dtype_mm", "float32", "Element type of activations in the encoders of images and other media.")
                .refused(features::MULTIMODAL_MODELS)
                .only_with("use_multimodal", &[])
                .acts_on("vision"),
        ],
    },
    KeyGroup {
        name: "Logits",
        title: "Output head",
        prefix: None,
        keys: &[
            Key::boolean("logits_via_embedding", false, "Tie the output head to the embedding table.")
                .acts_on("output head"),
            Key::boolean(
                "normalize_embedding_logits",
                true,
                "With tied embeddings, divide logits by the square root of the embedding width.",
            )
            .only_with("logits_via_embedding", &["true"])
            .acts_on("output head"),
            Key::boolean(
                "logits_dot_in_fp32",
                false,
                "Compute the output head's matrix product in float32.",
            )
            .acts_on("output head"),
            Key::boolean(
                "cast_logits_to_fp32",
                true,
                "Convert logits to float32 before the loss; otherwise the loss is computed in the logits' \
                 own type.",
            )
            .acts_on("loss"),
            Key::optional_float("final_logits_soft_cap", "Soft cap of the final logits: bounds their magnitude smoothly.")
                .at_least(0.0)
                .neutral(&[Literal::Float(0.0)])
                .acts_on("output head"),
            Key::float("z_loss_multiplier", 0.0, "Weight of the z-loss, the squared log-partition function.")
                .at_least(0.0)
                .acts_on("loss"),
            Key::boolean(
                "vocab_tiling_ag_once",
                false,
                "All-gather the output matrix once for all tiles of the logits instead of once per tile.",
            )
            .only_with("num_vocab_tiling", &[])
            .acts_on("output head")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "Rope",
        title: "Positions",
        prefix: None,
        keys: &[
            Key::of::<RopeType>(
                "rope_type",
                "default",
                "How rotary frequencies are scaled to longer contexts.",
            )
            .acts_on("rotary embedding"),
            Key::boolean("rope_use_scale", true, "Scale frequencies when `rope_type=llama3.1`.")
                .only_with("rope_type", &["llama3.1"])
                .acts_on("rotary embedding"),
            Key::float("rope_min_timescale", 1.0, "Shortest rotary wavelength, over 2π.")
                .at_least(1.0)
                .acts_on("rotary embedding"),
            Key::float("rope_max_timescale", 10_000.0, "Longest rotary wavelength, over 2π (theta).")
                .at_least(1.0)
                .acts_on("rotary embedding"),
            Key::float("rope_linear_scaling_factor", 1.0, "Divides positions before they are embedded.")
                .at_least(1.0)
                .only_with("rope_type", &["default"])
                .acts_on("rotary embedding"),
            Key::boolean(
                "use_iota_embed",
                false,
                "Look up embeddings by a product with one-hot vectors. CPUs always gather.",
            )
            .acts_on("embedding")
            .may_change(),
            Key::float(
                "local_rope_max_timescale",
                -1.0,
                "Longest rotary wavelength, over 2π, of layers with local attention; -1 for \
                 `rope_max_timescale`.",
            )
            .at_least(-1.0)
            .neutral(&[Literal::Float(0.0)])
            .only_with("decoder_block", families::LOCAL_POSITIONS.names)
            .acts_on("rotary embedding"),
            Key::float(
                "global_rope_max_timescale",
                -1.0,
                "Longest rotary wavelength, over 2π, of layers with global attention; -1 for \
                 `rope_max_timescale`.",
            )
            .at_least(-1.0)
            .only_with("decoder_block", families::GEMMA4.names)
            .acts_on("rotary embedding"),
            Key::float(
                "global_rope_proportion",
                0.25,
                "Share of a head that is rotated in layers with global attention.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .only_with("decoder_block", families::GEMMA4.names)
            .acts_on("rotary embedding"),
            Key::float(
                "local_rope_proportion",
                1.0,
                "Share of a head that is rotated in layers with local attention.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .only_with("decoder_block", families::GEMMA4.names)
            .acts_on("rotary embedding"),
        ],
    },
    KeyGroup {
        name: "MTP",
        title: "Multi-token prediction",
        prefix: None,
        keys: &[
            Key::integer(
                "mtp_num_layers",
                0,
                "Number of extra layers that each predict one token further ahead; 0 turns it \
                 off.",
            )
            .at_least(0.0)
            .acts_on("model"),
            Key::boolean(
                "mtp_own_norm",
                false,
                "Give each extra layer a norm of its own before the shared head and the next extra layer, and the \
                 first one the model's normalized output, as in DeepSeek's published weights, instead of sharing the \
                 model's last norm.",
            )
            .only_with("mtp_num_layers", &[])
            .acts_on("model")
            .own(),
            Key::float(
                "mtp_loss_scaling_factor",
                0.1,
                "Loss weight of the tokens predicted further ahead.",
            )
            .at_least(0.0)
            .only_with("mtp_num_layers", &[])
            .acts_on("loss"),
            Key::integer(
                "mtp_eval_target_module",
                0,
                "Number of the extra layer whose predictions are scored in evaluation; 0 for \
                 none.",
            )
            .at_least(0.0)
            .only_with("mtp_num_layers", &[])
            .acts_on("evaluation")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "ManifoldConstrainedHyperConnections",
        title: "Hyper-connections",
        prefix: None,
        keys: &[
            Key::integer(
                "mhc_expansion_rate",
                1,
                "Number of residual streams that run side by side through the layers; 1 turns \
                 hyper-connections off.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "sinkhorn_iterations",
                20,
                "Number of times the rows and columns of the matrix that mixes residual \
                 streams are normalized.",
            )
            .at_least(1.0)
            .only_with("mhc_expansion_rate", &[])
            .acts_on("model"),
            Key::boolean(
                "enable_mhc_lite",
                false,
                "Mix residual streams by a weighted sum of permutations instead of by a \
                 normalized matrix.",
            )
            .only_with("mhc_expansion_rate", &[])
            .acts_on("model"),
            Key::boolean(
                "use_mhc_pallas_kernel",
                false,
                "Mix the residual streams of hyper-connections in a kernel written by hand.",
            )
            .no_effect_here("it chooses a Pallas kernel; XLA compiles the mixing of streams itself")
            .acts_on("model")
            .may_change(),
            Key::integer(
                "mhc_pallas_kernel_fwd_block_size",
                256,
                "Tokens in one block of the forward kernel of hyper-connections.",
            )
            .no_effect_here("it sizes a Pallas kernel; XLA compiles the mixing of streams itself")
            .acts_on("model")
            .may_change(),
            Key::integer(
                "mhc_pallas_kernel_bwd_block_size",
                128,
                "Tokens in one block of the backward kernel of hyper-connections.",
            )
            .no_effect_here("it sizes a Pallas kernel; XLA compiles the mixing of streams itself")
            .acts_on("model")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "Engram",
        title: "Engram layers",
        prefix: None,
        keys: &[
            Key::integers(
                "engram_layers",
                &[],
                "Layers, from 0, that look up a memory of n-grams before attention.",
            )
            .acts_on("model"),
            Key::integer("engram_num_heads", 8, "Number of hashed tables for each length of n-gram.")
                .at_least(1.0)
                .only_with("engram_layers", &[])
                .acts_on("model"),
            Key::integer(
                "engram_head_dim",
                1280,
                "Width of the entries in each hashed table of the n-gram memory.",
            )
            .at_least(1.0)
            .only_with("engram_layers", &[])
            .acts_on("model"),
            Key::integers(
                "engram_vocab_bases",
                &[],
                "Least number of entries in a table of the n-gram memory, for each length from \
                 2.",
            )
            .only_with("engram_layers", &[])
            .acts_on("model"),
            Key::integer(
                "engram_max_ngram_size",
                3,
                "Tokens in the longest n-grams that engram layers look up.",
            )
            .at_least(2.0)
            .only_with("engram_layers", &[])
            .acts_on("model"),
            Key::integer(
                "engram_kernel_size",
                4,
                "Positions that the convolution after the n-gram memory spans.",
            )
            .at_least(1.0)
            .only_with("engram_layers", &[])
            .acts_on("model"),
            Key::integer("engram_seed", 0, "Seed of the multipliers that hash n-grams.")
                .at_least(0.0)
                .only_with("engram_layers", &[])
                .acts_on("initialization"),
        ],
    },
];
