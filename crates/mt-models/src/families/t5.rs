//! T5: an encoder and a decoder with biases of attention logits by distance. T5 v1.1 and Flan-T5 have gated feed-forward
//! layers and an output matrix of their own.

use mt_config::{DecoderBlock, ModelGroup};
use mt_nn::attention::{AttentionKernel, MaskSpec, RelativeBuckets};
use serde_json::Value;

use super::{
    Family, HuggingFaceFamily, MaxTextLayers, ModelType, describe,
    names::{self, LayerStack, TensorName, matrix, out, table, vector},
};
use crate::{
    ModelError,
    decoder::{
        AttentionConfig, CrossAttentionConfig, DecoderConfig, EncoderConfig, LayerConfig, LayerNames,
        LayerRun,
    },
    hugging_face::{
        Described, Field, HuggingFaceConfig, Settings,
        fields::{self, Kind, Otherwise},
    },
};

fn describe(group: &ModelGroup) -> Result<DecoderConfig, ModelError> {
    let mut config = describe::decoder(group)?;
    let keys = &group.encoder;
    let buckets = |bidirectional| RelativeBuckets {
        count: keys.relative_attention_num_buckets,
        max_distance: keys.relative_attention_max_distance,
        bidirectional,
    };
    let all = MaskSpec { causal: false, ..MaskSpec::CAUSAL };
    let mut decoder_layer = config.layers[0].clone();
    if let Some(attention) = decoder_layer.attention_mut() {
        attention.rotary = None;
        attention.relative = Some(buckets(false));
        attention.drops_weights = true;
        // Attention logits are not scaled; small initial queries take the place of the factor.
        attention.query_init_scale = 1.0 / group.head_dim as f64;
        attention.options.scale = group.layers.query_pre_attn_scalar.map_or(1.0, |scalar| scalar.powf(-0.5));
        attention.options.kernel = AttentionKernel::Dense;
    }
    let with_mask = |attention: &AttentionConfig, relative| {
        let mut attention = AttentionConfig { relative, ..attention.clone() };
        attention.options.mask = all;
        attention
    };
    let mut encoder_layer = decoder_layer.clone();
    if let Some(attention) = encoder_layer.attention_mut() {
        *attention = with_mask(attention, Some(buckets(true)));
    }
    decoder_layer.cross = decoder_layer
        .attention()
        .map(|attention| CrossAttentionConfig { attention: with_mask(attention, None) });
    let num_layers = group.num_encoder_layers();
    let run = |name: &'static str, first| LayerRun {
        name: name.into(),
        first,
        cycle: 1,
        stored: LayerNames { counted_from: first, ..LayerNames::LAYERS },
    };
    config.layers =
        [vec![encoder_layer; num_layers], vec![decoder_layer; group.num_decoder_layers()]].concat();
    config.runs = vec![run("encoder", 0), run("", num_layers)];
    config.encoder = Some(EncoderConfig { num_layers, source_length: keys.max_source_length });
    // Whether logits are scaled does not depend on whether the head is tied.
    config.head.scale =
        if group.normalize_embedding_logits { (config.embed.size as f64).powf(-0.5) } else { 1.0 };
    config.embedding.init_deviation = Some(1.0);
    Ok(config)
}

pub(super) static T5: Family = Family {
    blocks: &[DecoderBlock::T5],
    describe,
    maxtext_names: &[
        ("attention", "self_attention"),
        ("pre_attention_norm", "pre_self_attention_layer_norm"),
        ("pre_cross_attention_norm", "pre_cross_attention_layer_norm"),
        ("pre_mlp_norm", "pre_mlp_layer_norm"),
    ],
    maxtext_layers: MaxTextLayers::Plain,
    folds_query_scale: false,
    hugging_face: Some(HuggingFaceFamily {
        model_types: &[ModelType {
            tied_by_files: true,
            ..ModelType::new("t5", "T5ForConditionalGeneration")
        }],
        fields: &[FIELDS],
        always: &[],
        tensors: &[MODEL, ENCODER, DECODER, CROSS],
        ignores: |config, name| {
            // Copies of the embedding, and a table that no layer uses.
            let unused = [
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            ];
            names::ignores(config, name) || unused.contains(&name)
        },
    }),
};

const FIELDS: &[Field] = &[
    Field::new("d_model", "base_emb_dim", Kind::Integer, |model| Some(model.group.emb_dim().into())),
    Field::new("d_kv", "head_dim", Kind::Integer, |model| Some(model.group.head_dim.into())),
    Field::new("d_ff", "base_mlp_dim", Kind::Integer, |model| Some(model.group.mlp_dim().into())),
    Field::with(
        &["num_heads"],
        |config, settings| {
            let heads = config.required("num_heads")?;
            settings.set("base_num_query_heads", heads);
            settings.set("base_num_kv_heads", heads);
            Ok(())
        },
        |model| Some(model.group.num_query_heads().into()),
    ),
    Field::new("num_layers", "base_num_encoder_layers", Kind::Integer, |model| {
        Some(model.group.num_encoder_layers().into())
    }),
    Field::new("num_decoder_layers", "base_num_decoder_layers", Kind::Integer, |model| {
        Some(model.group.num_decoder_layers().into())
    })
    .or(Otherwise::Of(|settings| settings.get("base_num_encoder_layers").cloned().unwrap_or_default())),
    Field::new("relative_attention_num_buckets", "relative_attention_num_buckets", Kind::Integer, |model| {
        Some(model.group.encoder.relative_attention_num_buckets.into())
    })
    .or(Otherwise::Integer(32)),
    Field::new(
        "relative_attention_max_distance",
        "relative_attention_max_distance",
        Kind::Integer,
        |model| Some(model.group.encoder.relative_attention_max_distance.into()),
    )
    .or(Otherwise::Integer(128)),
    fields::VOCABULARY,
    Field::new("layer_norm_epsilon", "normalization_layer_epsilon", Kind::Number, |model| {
        Some(model.group.normalization_layer_epsilon.into())
    })
    .or(Otherwise::Number(1e-6)),
    Field::with(&["feed_forward_proj"], read_functions, |model| Some(written_functions(model))),
    Field::new("decoder_start_token_id", "decoder_start_token_id", Kind::Integer, |model| {
        Some(model.group.encoder.decoder_start_token_id.into())
    })
    .or(Otherwise::Integer(0)),
    Field::with(&["tie_word_embeddings"], read_head, |model| Some(model.group.logits_via_embedding.into())),
    Field::silent("scale_decoder_outputs", |model| Some(model.group.normalize_embedding_logits.into())),
    Field::silent("is_encoder_decoder", |_| Some(true.into())),
    // These follow from `feed_forward_proj`, concern training or other tasks, or are of older releases.
    Field::silent("dense_act_fn", |_| None),
    Field::silent("is_gated_act", |_| None),
    Field::silent("dropout_rate", |_| None),
    Field::silent("initializer_factor", |_| None),
    Field::silent("classifier_dropout", |_| None),
    Field::silent("n_positions", |_| None),
    Field::silent("output_past", |_| None),
];

/// Reads whether logits are scaled and the head is tied. Older releases scale exactly the logits of tied heads.
fn read_head(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let tied = config.boolean("tie_word_embeddings")?.unwrap_or(true);
    settings.set("logits_via_embedding", tied);
    let scaled = config.boolean("scale_decoder_outputs")?.unwrap_or(tied);
    settings.set("normalize_embedding_logits", scaled);
    // No field states the objective; an encoder–decoder model has only this one.
    settings.set("training_objective", "span_corruption");
    Ok(())
}

/// The beginning of the names of gated feed-forward layers.
const GATED: &str = "gated-";

/// Reads the functions of feed-forward layers, such as `relu` or `gated-gelu`.
fn read_functions(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    const KEY: &str = "feed_forward_proj";
    let name = config.text(KEY)?.unwrap_or_else(|| "relu".to_owned());
    let (name, is_gated) = name.strip_prefix(GATED).map_or((name.as_str(), false), |name| (name, true));
    // A gated layer has the approximation that others call `gelu_new`.
    let name = if is_gated && name == "gelu" { "gelu_new" } else { name };
    let known = fields::ACTIVATIONS.iter().find(|(theirs, _)| *theirs == name);
    let (_, ours) = known.ok_or_else(|| config.unsupported(KEY, "this activation function"))?;
    let functions = if is_gated { vec![*ours, "linear"] } else { vec![*ours] };
    settings.set("mlp_activations", functions);
    Ok(())
}

fn written_functions(model: &Described<'_>) -> Value {
    let name = fields::written_activation(fields::ACTIVATIONS, model);
    let name = name.as_ref().and_then(Value::as_str).unwrap_or_default().to_owned();
    match is_gated(model.config) {
        true if name.starts_with("gelu") => format!("{GATED}gelu").into(),
        true => format!("{GATED}{name}").into(),
        false if name.starts_with("gelu") => "gelu_new".into(),
        false => name.into(),
    }
}

fn is_gated(config: &DecoderConfig) -> bool {
    config.layers.iter().filter_map(LayerConfig::mlp).any(|mlp| mlp.activations.len() == 2)
}

const MODEL: &[TensorName] = &[
    table("token_embedder.embedding", "shared.weight", 1),
    table("encoder.relative_bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 1),
    vector("encoder.final_norm.scale", "encoder.final_layer_norm.weight"),
    table("relative_bias", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 1),
    vector("final_norm.scale", "decoder.final_layer_norm.weight"),
    matrix("head.kernel", "lm_head.weight"),
];

/// The tensors of self-attention, the first module of a layer, and of the feed-forward layer, the module `$feed_forward`.
macro_rules! layer {
    ($stack:expr, $layer:literal, $feed_forward:literal) => {
        [
            vector("pre_attention_norm.scale", concat!($layer, "0.layer_norm.weight")).of($stack),
            matrix("attention.query.kernel", concat!($layer, "0.SelfAttention.q.weight")).of($stack),
            matrix("attention.key.kernel", concat!($layer, "0.SelfAttention.k.weight")).of($stack),
            matrix("attention.value.kernel", concat!($layer, "0.SelfAttention.v.weight")).of($stack),
            out("attention.out.kernel", concat!($layer, "0.SelfAttention.o.weight")).of($stack),
            vector("pre_mlp_norm.scale", concat!($layer, $feed_forward, ".layer_norm.weight")).of($stack),
            matrix("mlp.wi_0.kernel", concat!($layer, $feed_forward, ".DenseReluDense.wi_0.weight"))
                .of($stack)
                .when(is_gated),
            matrix("mlp.wi_0.kernel", concat!($layer, $feed_forward, ".DenseReluDense.wi.weight"))
                .of($stack)
                .when(|config| !is_gated(config)),
            matrix("mlp.wi_1.kernel", concat!($layer, $feed_forward, ".DenseReluDense.wi_1.weight"))
                .of($stack),
            matrix("mlp.wo.kernel", concat!($layer, $feed_forward, ".DenseReluDense.wo.weight")).of($stack),
        ]
    };
}

const ENCODER: &[TensorName] = &layer!(LayerStack::Encoder, "encoder.block.{layer}.layer.", "1");
const DECODER: &[TensorName] = &layer!(LayerStack::Decoder, "decoder.block.{layer}.layer.", "2");

const CROSS: &[TensorName] = &[
    vector("pre_cross_attention_norm.scale", "decoder.block.{layer}.layer.1.layer_norm.weight")
        .of(LayerStack::Decoder),
    matrix("cross_attention.query.kernel", "decoder.block.{layer}.layer.1.EncDecAttention.q.weight")
        .of(LayerStack::Decoder),
    matrix("cross_attention.key.kernel", "decoder.block.{layer}.layer.1.EncDecAttention.k.weight")
        .of(LayerStack::Decoder),
    matrix("cross_attention.value.kernel", "decoder.block.{layer}.layer.1.EncDecAttention.v.weight")
        .of(LayerStack::Decoder),
    out("cross_attention.out.kernel", "decoder.block.{layer}.layer.1.EncDecAttention.o.weight")
        .of(LayerStack::Decoder),
];
