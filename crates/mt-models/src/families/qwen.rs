//! Dense models of Qwen 2, 2.5 and 3.

use mt_config::DecoderBlock;

use super::{Family, HuggingFaceFamily, MaxTextLayers, ModelType, describe, llama, names};
use crate::{
    ModelError,
    decoder::{LayerConfig, QueryKeyNorm},
    hugging_face::{
        self, Field, HuggingFaceConfig, Settings,
        fields::{self, COMMON, Otherwise},
    },
};

pub(super) static QWEN2: Family = Family {
    blocks: &[DecoderBlock::Qwen2],
    describe: |group| {
        let mut config = describe::decoder(group)?;
        for attention in config.layers.iter_mut().filter_map(LayerConfig::attention_mut) {
            // Only the input projections have biases.
            attention.output_bias = false;
        }
        Ok(config)
    },
    maxtext_parts: llama::PARTS,
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &[ModelType::new("qwen2", "Qwen2ForCausalLM")],
        fields: &[COMMON, BOTH],
        always: &[("attention_bias", true)],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        ignores: names::ignores,
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
        model_types: &[ModelType::new("qwen3", "Qwen3ForCausalLM")],
        fields: &[
            COMMON,
            BOTH,
            &[fields::HEAD_DIM.if_absent(Otherwise::Integer(128)), fields::ATTENTION_BIAS],
        ],
        always: &[("use_qk_norm", true)],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_BEFORE],
        ignores: names::ignores,
    }),
};

/// The fields of both generations. Only later layers have windows, and only if `use_sliding_window` is set.
const BOTH: &[Field] = &[
    fields::KV_HEADS.if_absent(Otherwise::Integer(32)),
    fields::CONTEXT.if_absent(Otherwise::Integer(32_768)),
    Field::with(
        &["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"],
        windows,
        |model| Some(hugging_face::window(model.config).is_some().into()),
    ),
    Field::silent("sliding_window", |model| Some(hugging_face::window(model.config).into())),
    Field::silent("layer_types", |model| Some(hugging_face::layer_type_names(model.config))),
];

fn windows(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    if config.boolean("use_sliding_window")?.unwrap_or(false)
        && let Some(window) = config.integer_or("sliding_window", 4096)?
    {
        settings.set("sliding_window_size", window);
        let first = config.integer_or("max_window_layers", 28)?.unwrap_or(0);
        hugging_face::layer_types(config, settings, |layer| layer as i64 >= first)?;
    }
    Ok(())
}
