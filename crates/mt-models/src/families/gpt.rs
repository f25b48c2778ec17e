//! GPT-3, and GPT-2's published models, which have its layers.

use mt_config::{DecoderBlock, ModelGroup};
use serde_json::json;

use super::{Family, HuggingFaceFamily, MaxTextLayers, describe, names};
use crate::{
    ModelError,
    decoder::{DecoderConfig, LayerNorms, NormKind, Positions},
    hugging_face::Settings,
};

fn describe(group: &ModelGroup) -> Result<DecoderConfig, ModelError> {
    let mut config = describe::decoder(group)?;
    config.final_norm = Some(NormKind::Layer);
    if config.embedding.positions == Positions::None {
        config.embedding.positions = Positions::Learned(group.max_target_length);
    }
    for layer in &mut config.layers {
        layer.norms = LayerNorms::before(NormKind::Layer);
        if let Some(attention) = layer.attention_mut() {
            (attention.input_bias, attention.output_bias, attention.rotary) = (true, true, None);
            attention.stored_fused = group.layers.fused_qkv;
        }
        if let Some(mlp) = layer.mlp_mut() {
            mlp.bias = true;
        }
    }
    Ok(config)
}

/// The norm before the feed-forward layer, which is inside it.
const MLP_NORM: &str = "mlp.mlp_layer_norm";

/// The key that earlier versions of this program gave to a parameter.
pub(super) fn earlier_key(key: &[String]) -> Vec<String> {
    let joined = key.join(".").replace(MLP_NORM, "pre_mlp_norm");
    joined.split('.').map(str::to_owned).collect()
}

pub(super) static GPT3: Family = Family {
    blocks: &[DecoderBlock::Gpt3],
    describe,
    maxtext_parts: &[
        ("attention", "self_attention"),
        ("pre_attention_norm", "pre_self_attention_norm"),
        ("pre_mlp_norm", MLP_NORM),
    ],
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &["gpt2"],
        usual: &[],
        tensors: &[names::GPT2],
        settings: |config| {
            for (key, value) in [
                ("scale_attn_weights", true),
                ("scale_attn_by_inverse_layer_idx", false),
                ("add_cross_attention", false),
            ] {
                if config.boolean(key)?.is_some_and(|given| given != value) {
                    return Err(config.unsupported(key, "this variant of GPT-2's attention"));
                }
            }
            let mut settings = Settings::new("gpt3");
            let (width, heads) = (config.required("n_embd")?, config.required("n_head")?);
            settings.set("base_emb_dim", width);
            settings.set("base_num_query_heads", heads);
            settings.set("base_num_kv_heads", heads);
            settings.set("head_dim", width / heads.max(1));
            settings.set("base_mlp_dim", config.integer("n_inner")?.unwrap_or(4 * width));
            settings.set("base_num_decoder_layers", config.required("n_layer")?);
            settings.set("vocab_size", config.required("vocab_size")?);
            settings.set("trainable_position_size", config.required("n_positions")?);
            settings.set("max_position_embeddings", config.required("n_positions")?);
            settings.set("normalization_layer_epsilon", config.number("layer_norm_epsilon")?.unwrap_or(1e-5));
            settings.set("mlp_activations", vec![config.activation("activation_function")?]);
            settings.set("logits_via_embedding", config.boolean("tie_word_embeddings")?.unwrap_or(true));
            settings.set("normalize_embedding_logits", false);
            settings.set("enable_dropout", false);
            Ok(settings)
        },
        config: |group, config| {
            let positions = match config.embedding.positions {
                Positions::Learned(count) => count,
                _ => group.max_target_length,
            };
            let made = json!({
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": group.emb_dim(),
                "n_head": group.num_query_heads(),
                "n_inner": group.mlp_dim(),
                "n_layer": group.num_decoder_layers(),
                "n_positions": positions,
                "vocab_size": group.vocab_size,
                "layer_norm_epsilon": group.normalization_layer_epsilon,
                "activation_function": "gelu_new",
                "tie_word_embeddings": group.logits_via_embedding,
            });
            match made {
                serde_json::Value::Object(made) => made,
                _ => unreachable!("the literal is an object"),
            }
        },
    }),
};
