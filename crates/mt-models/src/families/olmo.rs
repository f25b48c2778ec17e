//! OLMo 3.

use mt_config::{DecoderBlock, LayerAttention, RopeType};
use mt_nn::RotaryScaling;
use serde_json::json;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, names};
use crate::{
    decoder::{LayerNorms, NormKind, QueryKeyNorm},
    hugging_face,
};

const LOCAL: LayerAttention = LayerAttention::Local;

pub(super) static OLMO3: Family = Family {
    blocks: &[DecoderBlock::Olmo3],
    describe: |group| {
        let mut config = describe::decoder(group)?;
        let kinds = describe::pattern(group, &mut config, &[LOCAL, LOCAL, LOCAL, LayerAttention::Global]);
        for (layer, kind) in config.layers.iter_mut().zip(kinds) {
            layer.norms = LayerNorms::after(NormKind::RootMeanSquare);
            let Some(attention) = layer.attention_mut() else { continue };
            attention.query_key_norm = QueryKeyNorm::AllHeads;
            // MaxText scales all layers; as published, only those that see far are.
            if let Some(rotary) = attention.rotary.as_mut().filter(|_| kind == LOCAL) {
                rotary.scaling = RotaryScaling::None;
            }
        }
        Ok(config)
    },
    maxtext_parts: &[
        ("post_attention_norm", "post_self_attention_layer_norm"),
        ("post_mlp_norm", "post_mlp_layer_norm"),
    ],
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["olmo3"],
        usual: &[("rms_norm_eps", 1e-5), ("rope_theta", 500_000.0), ("max_position_embeddings", 2048.0)],
        tensors: &[names::MODEL, names::LAYER, names::NORMS_AROUND],
        settings: |config| {
            let mut settings = hugging_face::common(config, "olmo3")?;
            config.check_local_rope(Some(config.rope("full_attention")?.theta.unwrap_or(10_000.0)))?;
            settings.set("use_qk_norm", true);
            settings.set("attention_bias", config.boolean("attention_bias")?.unwrap_or(false));
            settings.set("sliding_window_size", config.integer("sliding_window")?.unwrap_or(4096));
            hugging_face::layer_types(config, &mut settings, |layer| (layer + 1) % 4 != 0)?;
            Ok(settings)
        },
        config: |group, config| {
            let mut made = hugging_face::common_config(group, config, "olmo3", "Olmo3ForCausalLM");
            made.insert("sliding_window".into(), group.layers.sliding_window_size.into());
            made.insert("layer_types".into(), hugging_face::layer_type_names(config).into());
            if group.positions.rope_type != RopeType::Default {
                let global = made.remove("rope_parameters").unwrap_or_default();
                let local = json!({"rope_type": "default", "rope_theta": group.positions.rope_max_timescale});
                made.insert(
                    "rope_parameters".into(),
                    json!({"full_attention": global, "sliding_attention": local}),
                );
            }
            made
        },
    }),
};
