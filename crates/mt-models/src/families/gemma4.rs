//! The text part of Gemma 4: dense models, and small ones with vectors of each token for each layer.

use mt_config::{DecoderBlock, ModelGroup};
use mt_nn::{RotaryExtent, RotaryScaling, axes};
use mt_shape::axis;
use serde_json::json;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, gemma, names};
use crate::{
    ModelError,
    decoder::{DecoderConfig, PER_LAYER, QueryKeyNorm, Values},
    hugging_face::{self, HuggingFaceConfig, Settings},
};

const PARTS: &[(&str, &str)] = &[
    ("pre_attention_norm", "pre_self_attention_norm"),
    ("post_attention_norm", "post_self_attention_norm"),
    ("pre_mlp_norm", "pre_ffw_norm"),
    ("post_mlp_norm", "post_ffw_norm"),
    ("attention", "self_attention"),
    ("scalar", "layer_scalar"),
];

fn describe(group: &ModelGroup) -> Result<DecoderConfig, ModelError> {
    let mut config = gemma::decoder(group, 0.0)?;
    gemma::norms_around(&mut config);
    let kinds = describe::pattern(group, &mut config, gemma::SIX);
    if group.layers.attention_pattern.is_empty()
        && let Some(last) = config.layers.last_mut().and_then(|layer| layer.attention_mut())
    {
        // The last layer sees everything wherever the cycle ends.
        last.options.mask.window = None;
    }
    let layers = &group.layers;
    let (positions, num_layers) = (&group.positions, config.layers.len());
    let num_shared = layers.num_kv_shared_layers.min(num_layers.saturating_sub(1));
    let is_local: Vec<bool> =
        config.attentions().map(|attention| attention.options.mask.window.is_some()).collect();
    debug_assert_eq!(kinds.len(), num_layers);
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.scaled = true;
        let Some(attention) = layer.attention_mut() else { continue };
        attention.query_key_norm = QueryKeyNorm::PerHead;
        attention.options.normalize_values = true;
        attention.options.scale = 1.0;
        if is_local[index] {
            let timescale = positions.local_rope_max_timescale.unwrap_or(positions.rope_max_timescale);
            let rotary = describe::rotary(group, group.head_dim, timescale, RotaryScaling::None);
            let extent = extent(positions.local_rope_proportion);
            attention.rotary = Some(mt_nn::RotaryOptions { extent, ..rotary });
        } else {
            let head_dim = if layers.global_head_dim > 0 { layers.global_head_dim } else { group.head_dim };
            attention.set_width(head_dim);
            if layers.global_num_kv_heads > 0 {
                attention.kv_heads = axis(axes::KV_HEADS, layers.global_num_kv_heads);
            }
            if layers.share_kv_projections {
                attention.values = Values::OfKeys;
            }
            let timescale = positions.global_rope_max_timescale.unwrap_or(positions.rope_max_timescale);
            let rotary = describe::rotary(group, head_dim, timescale, RotaryScaling::None);
            let extent = extent(positions.global_rope_proportion);
            attention.rotary = Some(mt_nn::RotaryOptions { extent, ..rotary });
        }
        let first_shared = num_layers - num_shared;
        if index >= first_shared {
            let source = (0..first_shared).rev().find(|earlier| is_local[*earlier] == is_local[index]);
            attention.values = Values::OfLayer(source.ok_or(ModelError::NothingToShare { layer: index })?);
            if let Some(mlp) = layer.mlp_mut().filter(|_| layers.use_double_wide_mlp) {
                mlp.width = axis(axes::MLP, 2 * group.mlp_dim());
            }
        }
    }
    let width = layers.hidden_size_per_layer_input;
    config.embedding.per_layer = (width > 0).then(|| axis(PER_LAYER, width));
    Ok(config)
}

fn extent(share: f64) -> RotaryExtent {
    if share == 1.0 { RotaryExtent::Full } else { RotaryExtent::Frequencies(share) }
}

const TENSORS: &[&[super::TensorName]] =
    &[names::MODEL, names::LAYER, names::NORMS_AROUND, names::GEMMA4, names::GEMMA4_MODEL];

pub(super) static GEMMA4: Family = Family {
    blocks: &[DecoderBlock::Gemma4],
    describe,
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["gemma4_text", "gemma4"],
        usual: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("vocab_size", 262144.0),
            ("max_position_embeddings", 131072.0),
            ("hidden_size_per_layer_input", 256.0),
        ],
        tensors: TENSORS,
        settings,
        config,
    }),
};

pub(super) static GEMMA4_SMALL: Family = Family {
    blocks: &[DecoderBlock::Gemma4Small],
    describe,
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    // The same directories, read by the larger models' family.
    hugging_face: Some(HuggingFaceFamily {
        model_types: &[],
        usual: &[],
        tensors: TENSORS,
        settings,
        config,
    }),
};

fn settings(config: &HuggingFaceConfig) -> Result<Settings, ModelError> {
    if config.boolean("enable_moe_block")?.unwrap_or(false) {
        return Err(config.unsupported("enable_moe_block", "mixtures of experts"));
    }
    let per_layer = config.integer("hidden_size_per_layer_input")?.unwrap_or(0);
    let shared = config.integer("num_kv_shared_layers")?.unwrap_or(0);
    let is_small = per_layer > 0 || shared > 0;
    let mut settings = hugging_face::gemma(config, if is_small { "gemma4_small" } else { "gemma4" })?;
    settings.set("use_qk_norm", true);
    settings.set_optional("final_logits_soft_cap", config.number("final_logit_softcapping")?);
    settings.set("sliding_window_size", config.integer("sliding_window")?.unwrap_or(512));
    let num_layers = config.integer("num_hidden_layers")?.unwrap_or(0).max(0) as usize;
    hugging_face::layer_types(config, &mut settings, |layer| {
        (layer + 1) % 6 != 0 && layer + 1 != num_layers
    })?;
    let (local, global) = (config.rope("sliding_attention")?, config.rope("full_attention")?);
    config.check_local_rope(None)?;
    if !matches!(global.kind.as_deref(), None | Some("default" | "proportional")) {
        return Err(config.unsupported("rope_parameters", "scaling the rotary embeddings of this model type"));
    }
    settings.set("local_rope_max_timescale", local.theta.unwrap_or(10_000.0));
    settings.set("local_rope_proportion", local.partial.unwrap_or(1.0));
    settings.set("global_rope_max_timescale", global.theta.unwrap_or(1_000_000.0));
    settings.set("rope_max_timescale", global.theta.unwrap_or(1_000_000.0));
    let usual = if config.has("rope_parameters") { 1.0 } else { 0.25 };
    settings.set("global_rope_proportion", global.partial.unwrap_or(usual));
    settings.set("rope_type", "default");
    settings.set("partial_rotary_factor", 1.0);
    let own = config.of_global_layer("head_dim")?.is_some() || config.integer("global_head_dim")?.is_some();
    // Older files leave out what is usual.
    let usual = if config.has("per_layer_config") || own { 0 } else { 512 };
    let head_dim = config.of_global_layer("head_dim")?.or(config.integer("global_head_dim")?);
    settings.set("global_head_dim", head_dim.unwrap_or(usual));
    let share = config.boolean("attention_k_eq_v")?.unwrap_or(false);
    settings.set("share_kv_projections", share);
    let heads = match config.of_global_layer("num_key_value_heads")? {
        Some(heads) => Some(heads),
        None if share => config.integer("num_global_key_value_heads")?,
        None => None,
    };
    settings.set("global_num_kv_heads", heads.unwrap_or(0));
    if is_small {
        settings.set("hidden_size_per_layer_input", per_layer);
        settings.set("num_kv_shared_layers", shared);
        settings.set("use_double_wide_mlp", config.boolean("use_double_wide_mlp")?.unwrap_or(false));
        // Layers that take keys from others cannot be scanned.
        settings.set("scan_layers", false);
    }
    Ok(settings)
}

fn config(group: &ModelGroup, config: &DecoderConfig) -> serde_json::Map<String, serde_json::Value> {
    let mut made = hugging_face::common_config(group, config, "gemma4_text", "Gemma4ForCausalLM");
    hugging_face::windows_and_caps(group, config, &mut made);
    for unknown in ["query_pre_attn_scalar", "attn_logit_softcapping"] {
        made.remove(unknown);
    }
    let (layers, positions) = (&group.layers, &group.positions);
    let theta = |own: Option<f64>| own.unwrap_or(positions.rope_max_timescale);
    made.insert(
        "rope_parameters".into(),
        json!({
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta(positions.global_rope_max_timescale),
                "partial_rotary_factor": positions.global_rope_proportion,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": theta(positions.local_rope_max_timescale)},
        }),
    );
    if layers.global_head_dim > 0 {
        made.insert("global_head_dim".into(), layers.global_head_dim.into());
    }
    if layers.global_num_kv_heads > 0 {
        made.insert("num_global_key_value_heads".into(), layers.global_num_kv_heads.into());
    }
    made.insert("attention_k_eq_v".into(), layers.share_kv_projections.into());
    made.insert("enable_moe_block".into(), false.into());
    made.insert("hidden_size_per_layer_input".into(), layers.hidden_size_per_layer_input.into());
    made.insert("vocab_size_per_layer_input".into(), group.vocab_size.into());
    made.insert("num_kv_shared_layers".into(), layers.num_kv_shared_layers.into());
    made.insert("use_double_wide_mlp".into(), layers.use_double_wide_mlp.into());
    made
}
