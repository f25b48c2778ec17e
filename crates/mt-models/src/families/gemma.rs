//! Gemma, Gemma 2 and the text part of Gemma 3.

use mt_config::{DecoderBlock, LayerAttention, ModelGroup};
use mt_nn::RotaryScaling;
use serde_json::json;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, names};
use crate::{
    ModelError,
    decoder::{DecoderConfig, LayerNorms, NormKind, QueryKeyNorm},
    hugging_face,
};

const LOCAL: LayerAttention = LayerAttention::Local;
const GLOBAL: LayerAttention = LayerAttention::Global;

const PARTS: &[(&str, &str)] = &[
    ("pre_attention_norm", "pre_self_attention_norm"),
    ("post_attention_norm", "post_self_attention_norm"),
    ("pre_mlp_norm", "pre_ffw_norm"),
    ("post_mlp_norm", "post_ffw_norm"),
    ("attention", "self_attention"),
];

/// Embeddings times the root of the width, norms of `1 + w`.
pub(super) fn decoder(group: &ModelGroup, norm_offset: f64) -> Result<DecoderConfig, ModelError> {
    let mut config = describe::decoder(group)?;
    describe::set_norm_offset(&mut config, norm_offset);
    let root = (config.embed.size as f64).sqrt();
    config.embedding.scale = Some(root);
    // MaxText divides by the root what it multiplied the shared table with.
    config.head.scale = if !config.head.tied || group.normalize_embedding_logits { 1.0 } else { root };
    Ok(config)
}

pub(super) fn norms_around(config: &mut DecoderConfig) {
    for layer in &mut config.layers {
        layer.norms = LayerNorms::around(NormKind::RootMeanSquare);
    }
}

pub(super) static GEMMA: Family = Family {
    blocks: &[DecoderBlock::Gemma],
    describe: |group| decoder(group, 1.0),
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: true,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["gemma"],
        usual: &[
            ("num_attention_heads", 16.0),
            ("num_key_value_heads", 16.0),
            ("head_dim", 256.0),
            ("vocab_size", 256000.0),
            ("max_position_embeddings", 8192.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| hugging_face::gemma(config, "gemma"),
        config: |group, config| hugging_face::common_config(group, config, "gemma", "GemmaForCausalLM"),
    }),
};

pub(super) static GEMMA2: Family = Family {
    blocks: &[DecoderBlock::Gemma2],
    describe: |group| {
        let mut config = decoder(group, 1.0)?;
        norms_around(&mut config);
        // MaxText counts pairs of layers. A pattern that names one layer less leaves the last pair incomplete.
        let (pairs, named) = (config.layers.len(), group.layers.attention_pattern.len());
        let num_layers = if named + 1 == 2 * pairs { named } else { 2 * pairs };
        let layer = config.layers[0].clone();
        config.layers = vec![layer; num_layers];
        describe::pattern(group, &mut config, &[LOCAL, GLOBAL]);
        Ok(config)
    },
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Pairs,
    folds_query_scale: true,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["gemma2"],
        usual: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("vocab_size", 256000.0),
            ("max_position_embeddings", 8192.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_AROUND],
        settings: |config| {
            let mut settings = hugging_face::gemma(config, "gemma2")?;
            let num_layers = config.required("num_hidden_layers")?;
            settings.set("base_num_decoder_layers", (num_layers + 1) / 2);
            settings.set_optional("attn_logits_soft_cap", config.number_or("attn_logit_softcapping", 50.0)?);
            settings
                .set_optional("final_logits_soft_cap", config.number_or("final_logit_softcapping", 30.0)?);
            settings.set("query_pre_attn_scalar", config.number("query_pre_attn_scalar")?.unwrap_or(256.0));
            settings.set("sliding_window_size", config.integer("sliding_window")?.unwrap_or(4096));
            hugging_face::layer_types(config, &mut settings, |layer| layer % 2 == 0)?;
            Ok(settings)
        },
        config: |group, config| {
            let mut made = hugging_face::common_config(group, config, "gemma2", "Gemma2ForCausalLM");
            hugging_face::windows_and_caps(group, config, &mut made);
            made
        },
    }),
};

/// Layers per cycle of Gemma 3 and 4.
pub(super) const SIX: &[LayerAttention] = &[LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL];

pub(super) static GEMMA3: Family = Family {
    blocks: &[DecoderBlock::Gemma3],
    describe: |group| {
        let mut config = decoder(group, 1.0)?;
        norms_around(&mut config);
        let kinds = describe::pattern(group, &mut config, SIX);
        for (layer, kind) in config.layers.iter_mut().zip(kinds) {
            let Some(attention) = layer.attention_mut() else { continue };
            attention.query_key_norm = QueryKeyNorm::PerHead;
            if kind == LOCAL {
                // Only global layers see far enough for positions to be scaled.
                let timescale =
                    group.positions.local_rope_max_timescale.unwrap_or(group.positions.rope_max_timescale);
                attention.rotary =
                    Some(describe::rotary(group, group.head_dim, timescale, RotaryScaling::None));
            }
        }
        Ok(config)
    },
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["gemma3_text", "gemma3"],
        usual: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("vocab_size", 262208.0),
            ("max_position_embeddings", 131072.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_AROUND],
        settings: |config| {
            let mut settings = hugging_face::gemma(config, "gemma3")?;
            settings.set("use_qk_norm", true);
            settings.set_optional("final_logits_soft_cap", config.number("final_logit_softcapping")?);
            settings.set("query_pre_attn_scalar", config.number("query_pre_attn_scalar")?.unwrap_or(256.0));
            settings.set("sliding_window_size", config.integer("sliding_window")?.unwrap_or(4096));
            let period =
                config.integer("_sliding_window_pattern")?.or(config.integer("sliding_window_pattern")?);
            let period = period.unwrap_or(6).max(1) as usize;
            hugging_face::layer_types(config, &mut settings, |layer| (layer + 1) % period != 0)?;
            let local = config.number("rope_local_base_freq")?;
            let nested = || config.own_rope("sliding_attention", "rope_theta");
            config.check_local_rope(None)?;
            settings.set("local_rope_max_timescale", local.or_else(nested).unwrap_or(10_000.0));
            if config.own_rope("full_attention", "rope_theta").or(config.number("rope_theta")?).is_none() {
                settings.set("rope_max_timescale", 1_000_000.0);
            }
            Ok(settings)
        },
        config: |group, config| {
            let mut made = hugging_face::common_config(group, config, "gemma3_text", "Gemma3ForCausalLM");
            hugging_face::windows_and_caps(group, config, &mut made);
            let global = made.remove("rope_parameters").unwrap_or_default();
            let local =
                group.positions.local_rope_max_timescale.unwrap_or(group.positions.rope_max_timescale);
            let local = json!({"rope_type": "default", "rope_theta": local});
            made.insert(
                "rope_parameters".into(),
                json!({"full_attention": global, "sliding_attention": local}),
            );
            made
        },
    }),
};
