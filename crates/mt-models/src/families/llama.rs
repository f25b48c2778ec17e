//! Llama 2, 3, 3.1 and 3.3, and Mistral.

use mt_config::DecoderBlock;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, names};
use crate::{
    ModelError,
    hugging_face::{self, HuggingFaceConfig, Settings},
};

/// The `model_type` of Llama's layers with factors: it describes a Llama whose scores are those of normalized
/// embeddings, or whose attention has a scale of its own.
const GRANITE: &str = "granite";

pub(super) const PARTS: &[(&str, &str)] = &[
    ("pre_attention_norm", "pre_self_attention_layer_norm"),
    ("attention", "self_attention"),
    ("pre_mlp_norm", "post_self_attention_layer_norm"),
];

pub(super) static LLAMA: Family = Family {
    blocks: &[DecoderBlock::Llama2],
    describe: describe::decoder,
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: true,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["llama", GRANITE],
        usual: &[("max_position_embeddings", 2048.0)],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| {
            let mut settings = hugging_face::common(config, "llama2")?;
            if config.text("model_type")?.as_deref() == Some(GRANITE) {
                granite_settings(config, &mut settings)?;
            }
            settings.set("attention_bias", config.boolean("attention_bias")?.unwrap_or(false));
            settings.set("mlp_bias", config.boolean("mlp_bias")?.unwrap_or(false));
            Ok(settings)
        },
        config: |group, config| {
            let scale = config.attentions().next().map_or(1.0, |attention| attention.options.scale);
            let is_granite = config.head.scale != 1.0 || scale != usual_scale(group.head_dim);
            let (model_type, architecture) =
                if is_granite { (GRANITE, "GraniteForCausalLM") } else { ("llama", "LlamaForCausalLM") };
            let mut made = hugging_face::common_config(group, config, model_type, architecture);
            if is_granite {
                made.insert("embedding_multiplier".into(), 1.0.into());
                made.insert("residual_multiplier".into(), 1.0.into());
                made.insert("attention_multiplier".into(), scale.into());
                made.insert("logits_scaling".into(), (1.0 / config.head.scale).into());
            }
            made.insert("attention_bias".into(), group.layers.attention_bias.into());
            made.insert("mlp_bias".into(), group.layers.mlp_bias.into());
            made
        },
    }),
};

/// The scale of attention that goes without saying.
fn usual_scale(head_dim: usize) -> f64 {
    (head_dim as f64).powf(-0.5)
}

/// Whether two factors are the same but for the rounding of decimals and inverses.
fn is_close(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-9 * other.abs()
}

/// The meaning of Granite's factors.
fn granite_settings(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    for key in ["embedding_multiplier", "residual_multiplier"] {
        if config.number(key)?.is_some_and(|factor| factor != 1.0) {
            return Err(config.unsupported(key, "this factor of Granite's models"));
        }
    }
    let width = config.required("hidden_size")?.max(1);
    let head_dim =
        config.integer("head_dim")?.unwrap_or(width / config.required("num_attention_heads")?.max(1));
    let scale = config.number("attention_multiplier")?.unwrap_or(1.0);
    if !is_close(scale, usual_scale(head_dim.max(1) as usize)) {
        let scalar = scale.powi(-2);
        let whole = scalar.round();
        settings.set("query_pre_attn_scalar", if is_close(scalar, whole) { whole } else { scalar });
    }
    let is_tied = config.boolean("tie_word_embeddings")?.unwrap_or(false);
    match config.number("logits_scaling")?.unwrap_or(1.0) {
        1.0 => {}
        divisor if is_tied && is_close(divisor, (width as f64).sqrt()) => {
            settings.set("normalize_embedding_logits", true);
        }
        _ => return Err(config.unsupported("logits_scaling", "this factor of Granite's models")),
    }
    Ok(())
}

pub(super) static MISTRAL: Family = Family {
    blocks: &[DecoderBlock::Mistral],
    describe: describe::decoder,
    maxtext_parts: PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: true,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["mistral"],
        usual: &[
            ("num_key_value_heads", 8.0),
            ("sliding_window", 4096.0),
            ("max_position_embeddings", 131_072.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| {
            let mut settings = hugging_face::common(config, "mistral")?;
            if let Some(window) = config.integer("sliding_window")? {
                settings.set("attention_type", "local_sliding");
                settings.set("sliding_window_size", window);
            }
            Ok(settings)
        },
        config: |group, config| {
            let mut made = hugging_face::common_config(group, config, "mistral", "MistralForCausalLM");
            made.insert("sliding_window".into(), hugging_face::window(config).into());
            made
        },
    }),
};
