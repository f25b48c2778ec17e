//! Qwen 2, 2.5 and 3, dense.

use mt_config::{DecoderBlock, ModelGroup};

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, llama, names};
use crate::{
    ModelError,
    decoder::{DecoderConfig, LayerConfig, QueryKeyNorm},
    hugging_face::{self, HuggingFaceConfig, Settings},
};

pub(super) static QWEN2: Family = Family {
    blocks: &[DecoderBlock::Qwen2],
    describe: |group| {
        let mut config = describe::decoder(group)?;
        for attention in config.layers.iter_mut().filter_map(LayerConfig::attention_mut) {
            // Only what goes into attention has biases.
            attention.output_bias = false;
        }
        Ok(config)
    },
    maxtext_parts: llama::PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["qwen2"],
        usual: &[
            ("num_key_value_heads", 32.0),
            ("sliding_window", 4096.0),
            ("max_window_layers", 28.0),
            ("max_position_embeddings", 32_768.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| {
            let mut settings = windows(config, hugging_face::common(config, "qwen2")?)?;
            settings.set("attention_bias", true);
            Ok(settings)
        },
        config: |group, config| windows_config(group, config, "qwen2", "Qwen2ForCausalLM"),
    }),
};

pub(super) static QWEN3: Family = Family {
    blocks: &[DecoderBlock::Qwen3],
    describe: |group| {
        let mut config = describe::decoder(group)?;
        for attention in config.layers.iter_mut().filter_map(LayerConfig::attention_mut) {
            attention.query_key_norm = QueryKeyNorm::PerHead;
        }
        Ok(config)
    },
    maxtext_parts: llama::PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["qwen3"],
        usual: &[
            ("num_key_value_heads", 32.0),
            ("head_dim", 128.0),
            ("sliding_window", 4096.0),
            ("max_window_layers", 28.0),
            ("max_position_embeddings", 32_768.0),
        ],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| {
            let mut settings = windows(config, hugging_face::common(config, "qwen3")?)?;
            settings.set("use_qk_norm", true);
            settings.set("attention_bias", config.boolean("attention_bias")?.unwrap_or(false));
            Ok(settings)
        },
        config: |group, config| {
            let mut made = windows_config(group, config, "qwen3", "Qwen3ForCausalLM");
            made.insert("attention_bias".into(), group.layers.attention_bias.into());
            made
        },
    }),
};

/// Windows, which only the later layers have, and only if they are switched on.
fn windows(config: &HuggingFaceConfig, mut settings: Settings) -> Result<Settings, ModelError> {
    if config.boolean("use_sliding_window")?.unwrap_or(false)
        && let Some(window) = config.integer("sliding_window")?
    {
        settings.set("sliding_window_size", window);
        let first = config.integer("max_window_layers")?.unwrap_or(0);
        hugging_face::layer_types(config, &mut settings, |layer| layer as i64 >= first)?;
    }
    Ok(settings)
}

fn windows_config(
    group: &ModelGroup,
    config: &DecoderConfig,
    model_type: &str,
    architecture: &str,
) -> serde_json::Map<String, serde_json::Value> {
    let mut made = hugging_face::common_config(group, config, model_type, architecture);
    let window = hugging_face::window(config);
    made.insert("use_sliding_window".into(), window.is_some().into());
    made.insert("sliding_window".into(), window.into());
    made.insert("layer_types".into(), hugging_face::layer_type_names(config).into());
    made
}
