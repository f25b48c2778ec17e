//! From a model of ours to a `config.json`.

use mt_config::{Config, ModelGroup, Request, RopeType, value_text};
use mt_shape::DType;
use serde_json::{Map, Value, json};

use super::{HuggingFaceConfig, settings_in};
use crate::{
    ModelError, build_decoder,
    decoder::{DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig},
    families::family_of,
};

/// The `config.json` of a model whose weights are written in `dtype`; none if its family has no published models.
pub fn config_of(group: &ModelGroup, config: &DecoderConfig, dtype: DType) -> Option<Map<String, Value>> {
    let family = family_of(group.decoder_block).hugging_face.as_ref()?;
    let mut made = (family.config)(group, config);
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    made.insert("dtype".into(), name.into());
    Some(made)
}

/// Refuses a `config.json` that means another model when it is read again: keys can ask for more than families say in
/// theirs, and what is not said there would be missing without a word. `given` is the configuration of the model.
///
/// # Errors
/// It means another model; what differs is named, with the keys that make the difference.
pub fn check_described(
    made: &Map<String, Value>,
    config: &DecoderConfig,
    given: &Config,
) -> Result<(), ModelError> {
    let differing: Vec<String> = match read_again(made) {
        Ok((read, meant)) => differences(config, &read)
            .into_iter()
            .map(|(part, keys)| with_keys(part, keys, |key| given.entry(key).value != meant.entry(key).value))
            .collect(),
        // The first line says what is wrong, those after it what to do about a file.
        Err(error) => error
            .lines()
            .take(1)
            .map(|line| with_keys(line, ROTARY_KEYS, |key| given.entry(key).is_changed()))
            .collect(),
    };
    if differing.is_empty() {
        return Ok(());
    }
    let model_type = made.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    Err(ModelError::NotDescribable { model_type, differing })
}

/// A part of a model with those of its keys that differ.
fn with_keys(part: &str, keys: &[&str], differs: impl Fn(&str) -> bool) -> String {
    let keys: Vec<String> = keys.iter().filter(|key| differs(key)).map(|key| format!("`{key}`")).collect();
    if keys.is_empty() { part.to_owned() } else { format!("{part} ({})", keys.join(", ")) }
}

/// The model that a `config.json` means with its configuration, or why it means none.
fn read_again(made: &Map<String, Value>) -> Result<(DecoderConfig, Config), String> {
    let settings =
        settings_in(HuggingFaceConfig::of_values(made.clone())).map_err(|error| error.to_string())?;
    let text = |(key, value): (&str, Value)| format!("{key}={}", value_text(&value));
    let arguments = settings.into_pairs().into_iter().map(text).collect();
    let config = Config::resolve(&Request { arguments, ..Request::default() });
    let config = config.map_err(|error| error.to_string())?;
    let group = ModelGroup::from_config(&config).map_err(|error| error.to_string())?;
    let read = build_decoder(&group).map_err(|error| error.to_string())?.config().clone();
    Ok((read, config))
}

const ROTARY_KEYS: &[&str] = &[
    "rope_type",
    "rope_use_scale",
    "rope_min_timescale",
    "rope_max_timescale",
    "local_rope_max_timescale",
    "rope_linear_scaling_factor",
    "rope_factor",
    "rope_truncate",
    "rope_attention_scaling",
    "rope_attention_factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "nope_layer_interval",
];

/// The parts in which two models differ, however they are run, and the keys that say what these parts are.
fn differences(one: &DecoderConfig, other: &DecoderConfig) -> Vec<(&'static str, &'static [&'static str])> {
    let layers = || one.layers.iter().zip(&other.layers);
    let differ = |part: fn(&LayerConfig, &LayerConfig) -> bool| layers().any(|(a, b)| part(a, b));
    let norms = (one.norm, one.final_norm) != (other.norm, other.final_norm);
    let parts: [(&str, &[&str], bool); 9] = [
        (
            "the size of embeddings",
            &["base_emb_dim", "vocab_size"],
            (one.embed, one.vocab) != (other.embed, other.vocab),
        ),
        ("the number of layers", &["base_num_decoder_layers"], one.layers.len() != other.layers.len()),
        (
            "what is done to embeddings",
            &["use_untrainable_positional_embedding", "trainable_position_size"],
            one.embedding != other.embedding,
        ),
        (
            "the scores of tokens",
            &["logits_via_embedding", "normalize_embedding_logits", "final_logits_soft_cap"],
            {
                let of = |config: &DecoderConfig| (config.head.tied, config.head.scale, config.head.soft_cap);
                of(one) != of(other)
            },
        ),
        (
            "normalization",
            &["normalization_layer_epsilon", "use_post_attn_norm", "use_post_ffw_norm"],
            norms || differ(|a, b| a.norms != b.norms),
        ),
        ("rotary embeddings", ROTARY_KEYS, {
            let rotary = |layer: &LayerConfig| layer.mixer.as_ref().and_then(|mixer| mixer.rotary().copied());
            one.dynamic_ntk != other.dynamic_ntk || layers().any(|(a, b)| rotary(a) != rotary(b))
        }),
        (
            "attention",
            &[
                "base_num_query_heads",
                "base_num_kv_heads",
                "head_dim",
                "attention_bias",
                "attention_type",
                "attention_pattern",
                "sliding_window_size",
                "chunk_attn_window_size",
                "attn_logits_soft_cap",
                "query_pre_attn_scalar",
                "use_qk_norm",
            ],
            differ(|a, b| parts_differ(a.mixer.as_ref(), b.mixer.as_ref(), MixerConfig::differs_from)),
        ),
        (
            "feed-forward layers",
            &["base_mlp_dim", "mlp_activations", "mlp_bias"],
            differ(|a, b| {
                let (a, b) = (a.feed_forward.as_ref(), b.feed_forward.as_ref());
                parts_differ(a, b, FeedForwardConfig::differs_from)
            }),
        ),
        ("how layers are wired", &["decoder_block"], {
            differ(|a, b| (a.parallel, a.scaled, a.square) != (b.parallel, b.scaled, b.square))
        }),
    ];
    parts.into_iter().filter(|(_, _, is_other)| *is_other).map(|(part, keys, _)| (part, keys)).collect()
}

fn parts_differ<P>(one: Option<&P>, other: Option<&P>, differ: fn(&P, &P) -> bool) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => differ(one, other),
        (one, other) => one.is_some() != other.is_some(),
    }
}

/// How many positions a model says it is made for, where `declared` is what its own description says. Some ways of
/// scaling rotary embeddings settle it: transformers derives their factors from the number, or warns if they differ.
pub fn context_length(group: &ModelGroup, declared: Option<usize>) -> usize {
    let positions = &group.positions;
    let scaled = |original: usize, factor: f64| (original as f64 * factor).round() as usize;
    match positions.rope_type {
        RopeType::Yarn => scaled(positions.original_max_position_embeddings, positions.rope_factor),
        RopeType::Ntk => positions.original_max_position_embeddings,
        RopeType::Llama31 if positions.rope_use_scale => {
            let reached = scaled(positions.llama3_rope_original_length, positions.llama3_rope_factor);
            declared.unwrap_or(reached.max(group.max_target_length))
        }
        _ => declared.unwrap_or(group.max_target_length),
    }
}

/// What nearly all families say in the same words.
pub(crate) fn common_config(
    group: &ModelGroup,
    config: &DecoderConfig,
    model_type: &str,
    architecture: &str,
) -> Map<String, Value> {
    let activation = match group.mlp_activations.first().map(|activation| activation.name()) {
        Some("gelu") => "gelu_pytorch_tanh",
        Some(name) => name,
        None => "silu",
    };
    // Gemma's first models have the name that all others have.
    let is_later_gemma = model_type.starts_with("gemma") && model_type != "gemma";
    let made = json!({
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": group.emb_dim(),
        "num_attention_heads": group.num_query_heads(),
        "num_key_value_heads": group.num_kv_heads(),
        "head_dim": group.head_dim,
        "intermediate_size": group.mlp_dim(),
        "num_hidden_layers": config.layers.len(),
        "vocab_size": group.vocab_size,
        "rms_norm_eps": group.normalization_layer_epsilon,
        if is_later_gemma { "hidden_activation" } else { "hidden_act" }: activation,
        "tie_word_embeddings": group.logits_via_embedding,
        "max_position_embeddings": context_length(group, None),
        "rope_parameters": rope(group),
    });
    match made {
        Value::Object(made) => made,
        _ => unreachable!("the literal is an object"),
    }
}

fn rope(group: &ModelGroup) -> Value {
    let positions = &group.positions;
    let mut made = json!({"rope_type": "default", "rope_theta": positions.rope_max_timescale});
    match positions.rope_type {
        RopeType::Default if positions.rope_linear_scaling_factor != 1.0 => {
            made["rope_type"] = "linear".into();
            made["factor"] = positions.rope_linear_scaling_factor.into();
        }
        RopeType::Default => {}
        RopeType::Ntk => {
            made["rope_type"] = "dynamic".into();
            made["factor"] = positions.rope_factor.into();
        }
        RopeType::Llama31 if !positions.rope_use_scale => {}
        RopeType::Llama31 => {
            made["rope_type"] = "llama3".into();
            made["factor"] = positions.llama3_rope_factor.into();
            made["low_freq_factor"] = positions.rope_low_frequency_factor.into();
            made["high_freq_factor"] = positions.rope_high_frequency_factor.into();
            made["original_max_position_embeddings"] = positions.llama3_rope_original_length.into();
        }
        RopeType::Yarn => {
            made["rope_type"] = "yarn".into();
            made["factor"] = positions.rope_factor.into();
            made["beta_fast"] = positions.beta_fast.into();
            made["beta_slow"] = positions.beta_slow.into();
            made["original_max_position_embeddings"] = positions.original_max_position_embeddings.into();
            made["truncate"] = positions.rope_truncate.into();
            match (positions.rope_attention_factor, positions.rope_attention_scaling) {
                (Some(factor), _) => made["attention_factor"] = factor.into(),
                (None, false) => made["attention_factor"] = 1.0.into(),
                (None, true) => {}
            }
        }
    }
    if positions.partial_rotary_factor != 1.0 {
        made["partial_rotary_factor"] = positions.partial_rotary_factor.into();
    }
    made
}

/// The window of the layers that have one.
pub(crate) fn window(config: &DecoderConfig) -> Option<usize> {
    config.attentions().find_map(|attention| attention.options.mask.window)
}

/// The kind of each layer.
pub(crate) fn layer_type_names(config: &DecoderConfig) -> Vec<&'static str> {
    let name = |is_local: bool| if is_local { "sliding_attention" } else { "full_attention" };
    config.attentions().map(|attention| name(attention.options.mask.window.is_some())).collect()
}

/// Windows, soft caps and the scale of scores, as Gemma's models say them.
pub(crate) fn windows_and_caps(group: &ModelGroup, config: &DecoderConfig, made: &mut Map<String, Value>) {
    let layers = &group.layers;
    let scalar = layers.query_pre_attn_scalar.unwrap_or(group.head_dim as f64);
    made.insert("sliding_window".into(), layers.sliding_window_size.into());
    made.insert("layer_types".into(), layer_type_names(config).into());
    // Transformers wants a whole number where it is one.
    let is_whole = scalar.fract() == 0.0;
    let scalar = if is_whole { Value::from(scalar as i64) } else { Value::from(scalar) };
    made.insert("query_pre_attn_scalar".into(), scalar);
    made.insert("attn_logit_softcapping".into(), layers.attn_logits_soft_cap.filter(|cap| *cap > 0.0).into());
    made.insert(
        "final_logit_softcapping".into(),
        layers.final_logits_soft_cap.filter(|cap| *cap > 0.0).into(),
    );
    made.insert("attention_bias".into(), layers.attention_bias.into());
}
