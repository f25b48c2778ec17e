//! Llama 2, 3, 3.1 and 3.3, and Mistral.

use mt_config::DecoderBlock;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, names};
use crate::hugging_face;

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
        model_types: &["llama"],
        usual: &[("max_position_embeddings", 2048.0)],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        settings: |config| {
            let mut settings = hugging_face::common(config, "llama2")?;
            settings.set("attention_bias", config.boolean("attention_bias")?.unwrap_or(false));
            settings.set("mlp_bias", config.boolean("mlp_bias")?.unwrap_or(false));
            Ok(settings)
        },
        config: |group, config| {
            let mut made = hugging_face::common_config(group, config, "llama", "LlamaForCausalLM");
            made.insert("attention_bias".into(), group.layers.attention_bias.into());
            made.insert("mlp_bias".into(), group.layers.mlp_bias.into());
            made
        },
    }),
};

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
