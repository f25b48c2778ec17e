//! From `config.json` to configuration keys.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::consolidated;
use crate::{ModelError, families::FAMILIES};

/// The name of the file that says what model a directory holds.
const FILE: &str = "config.json";

/// The file that says what model a directory holds.
pub fn description_path(directory: &Path) -> PathBuf {
    directory.join(if consolidated::is_at(directory) { consolidated::PARAMS_FILE } else { FILE })
}

/// A model's `config.json`.
#[derive(Clone, Debug)]
pub struct HuggingFaceConfig {
    path: PathBuf,
    values: Map<String, Value>,
}

/// Configuration keys with their values, in the order they were set.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings(Vec<(&'static str, Value)>);

/// How layers of one kind turn positions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rope {
    pub theta: Option<f64>,
    pub partial: Option<f64>,
    pub kind: Option<String>,
    values: Map<String, Value>,
}

/// The configuration keys that the model of a directory means.
///
/// # Errors
/// `config.json` cannot be read, is of a family that is not built, or asks for what is not built.
pub fn settings_of(directory: &Path) -> Result<Settings, ModelError> {
    settings_in(HuggingFaceConfig::read(directory)?)
}

/// The configuration keys that a model's `config.json` means.
pub(crate) fn settings_in(config: HuggingFaceConfig) -> Result<Settings, ModelError> {
    let Some(model_type) = config.text("model_type")? else {
        return Err(ModelError::MissingValue { path: config.path, key: "model_type".to_owned() });
    };
    let mut known = FAMILIES.iter().filter_map(|family| family.hugging_face.as_ref());
    let family = known.find(|family| family.model_types.contains(&model_type.as_str()));
    let Some(family) = family else {
        let built = FAMILIES.iter().filter_map(|family| family.hugging_face.as_ref());
        return Err(ModelError::UnknownModelType {
            path: config.path,
            model_type,
            built: built.flat_map(|family| family.model_types).map(|name| (*name).to_owned()).collect(),
        });
    };
    if config.has("quantization_config") {
        return Err(config.unsupported("quantization_config", "loading quantized weights"));
    }
    (family.settings)(&config.with_usual(family.usual))
}

impl HuggingFaceConfig {
    /// With what its family assumes in place of absent keys. A key that is `null` is not absent.
    fn with_usual(mut self, usual: &[(&'static str, f64)]) -> Self {
        for (key, number) in usual {
            let value =
                if number.fract() == 0.0 { Value::from(*number as i64) } else { Value::from(*number) };
            self.values.entry(*key).or_insert(value);
        }
        self
    }

    /// Reads the `config.json` of a directory, or what stands for it in Llama's first format.
    ///
    /// # Errors
    /// There is none, or it is no JSON object.
    pub fn read(directory: &Path) -> Result<Self, ModelError> {
        let path = description_path(directory);
        if path.ends_with(consolidated::PARAMS_FILE) {
            return Ok(Self { values: consolidated::config_values(directory)?, path });
        }
        let unreadable = |reason: String| ModelError::Unreadable { path: path.clone(), reason };
        let text = std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?;
        match serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))? {
            // Models that also see and hear have the text model's values inside.
            Value::Object(mut values) => match values.remove("text_config") {
                Some(Value::Object(inside)) => Ok(Self { path, values: inside }),
                _ => Ok(Self { path, values }),
            },
            _ => Err(unreadable("it is no JSON object".to_owned())),
        }
    }

    /// A `config.json` that is not written yet.
    pub(crate) fn of_values(values: Map<String, Value>) -> Self {
        Self { path: FILE.into(), values }
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> ModelError {
        ModelError::WrongValue {
            path: self.path.clone(),
            key: key.to_owned(),
            value: value.to_string(),
            expected: expected.to_owned(),
        }
    }

    fn get<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.values.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, value, expected)),
        }
    }

    /// Whether there is a value.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| !value.is_null())
    }

    /// A whole number.
    ///
    /// # Errors
    /// The value is something else.
    pub fn integer(&self, key: &str) -> Result<Option<i64>, ModelError> {
        self.get(key, "a whole number", Value::as_i64)
    }

    /// A number.
    ///
    /// # Errors
    /// The value is something else.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.get(key, "a number", Value::as_f64)
    }

    /// A truth value.
    ///
    /// # Errors
    /// The value is something else.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get(key, "true or false", Value::as_bool)
    }

    /// A text.
    ///
    /// # Errors
    /// The value is something else.
    pub fn text(&self, key: &str) -> Result<Option<String>, ModelError> {
        self.get(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// A whole number that has to be there.
    ///
    /// # Errors
    /// It is not, or is something else.
    pub fn required(&self, key: &str) -> Result<i64, ModelError> {
        let missing = || ModelError::MissingValue { path: self.path.clone(), key: key.to_owned() };
        self.integer(key)?.ok_or_else(missing)
    }

    /// What to say if a value asks for something that is not built.
    pub(crate) fn unsupported(&self, key: &str, feature: &str) -> ModelError {
        ModelError::NotBuilt {
            path: self.path.clone(),
            key: key.to_owned(),
            value: self.values.get(key).map(Value::to_string).unwrap_or_default(),
            feature: feature.to_owned(),
        }
    }

    /// The activation function that a key names, as configuration keys call it.
    pub(crate) fn activation(&self, key: &str) -> Result<&'static str, ModelError> {
        let name = self.text(key)?.unwrap_or_default();
        let is_gemma = self.text("model_type")?.is_some_and(|name| name.starts_with("gemma"));
        match name.as_str() {
            // Gemma's first models say the one and mean the other.
            "gelu" if is_gemma && key == "hidden_act" => Ok("gelu"),
            // What transformers assumes.
            "" if is_gemma || key == "activation_function" => Ok("gelu"),
            "" => Ok("silu"),
            "silu" | "swish" => Ok("silu"),
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok("gelu"),
            "relu" => Ok("relu"),
            _ => Err(self.unsupported(key, "this activation function")),
        }
    }

    /// A value of the first layer of global attention, where layers have values of their own.
    pub(crate) fn of_global_layer(&self, key: &str) -> Result<Option<i64>, ModelError> {
        let kinds = self.layer_kinds()?.unwrap_or_default();
        let Some(layer) = kinds.iter().position(|kind| kind == "full_attention") else { return Ok(None) };
        let own = self.values.get("per_layer_config").and_then(|layers| layers.get(layer.to_string()));
        Ok(own.and_then(|own| own.get(key)).and_then(Value::as_i64))
    }

    fn layer_kinds(&self) -> Result<Option<Vec<String>>, ModelError> {
        let texts = |value: &Value| -> Option<Vec<String>> {
            value.as_array()?.iter().map(|kind| kind.as_str().map(str::to_owned)).collect()
        };
        self.get("layer_types", "a list of texts", texts)
    }

    /// A value of what `rope_parameters` says of one kind of layer.
    pub(crate) fn own_rope(&self, kind: &str, key: &str) -> Option<f64> {
        self.values.get("rope_parameters")?.get(kind)?.get(key)?.as_f64()
    }

    /// A number whose absence means `default`, but whose `null` means none.
    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<Option<f64>, ModelError> {
        if self.values.contains_key(key) { self.number(key) } else { Ok(Some(default)) }
    }

    /// Refuses layers with a window whose positions are turned otherwise than plainly, or by another base than `theta`
    /// if one is given.
    pub(crate) fn check_local_rope(&self, theta: Option<f64>) -> Result<(), ModelError> {
        let own = |key: &str| self.values.get("rope_parameters")?.get("sliding_attention")?.get(key);
        if own("rope_type").and_then(Value::as_str).is_some_and(|kind| kind != "default") {
            let feature = "scaling the rotary embeddings of layers with a window";
            return Err(self.unsupported("rope_parameters", feature));
        }
        let other = own("rope_theta").and_then(Value::as_f64);
        if theta.zip(other).is_some_and(|(theta, other)| theta != other) {
            let feature = "another base for the layers with a window of this model type";
            return Err(self.unsupported("rope_parameters", feature));
        }
        Ok(())
    }

    /// How layers of a kind turn positions: `rope_parameters`, of all layers or of each kind, or the older keys.
    pub(crate) fn rope(&self, kind: &str) -> Result<Rope, ModelError> {
        let object = |key: &str| self.get(key, "an object", |value| value.as_object().cloned());
        let nested = object("rope_parameters")?;
        let is_nested = nested.as_ref().is_some_and(|nested| nested.values().any(Value::is_object));
        // Of both spellings the older one counts, unless the newer one is of each kind of layer.
        let parameters = match (nested, object("rope_scaling")?) {
            (Some(nested), _) if is_nested => nested,
            (nested, older) => older.or(nested).unwrap_or_default(),
        };
        let values = match parameters.get(kind) {
            Some(Value::Object(own)) => own.clone(),
            _ => parameters,
        };
        let number = |key: &str| values.get(key).and_then(Value::as_f64);
        let kind = values.get("rope_type").or_else(|| values.get("type")).and_then(Value::as_str);
        Ok(Rope {
            theta: number("rope_theta").or(self.number("rope_theta")?),
            partial: number("partial_rotary_factor").or(self.number("partial_rotary_factor")?),
            kind: kind.map(str::to_owned),
            values,
        })
    }
}

impl Settings {
    /// No settings but the kind of layer.
    pub(crate) fn new(block: &'static str) -> Self {
        Self(vec![("decoder_block", block.into())])
    }

    /// Sets a key.
    pub(crate) fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.0.retain(|(known, _)| *known != key);
        self.0.push((key, value.into()));
    }

    /// Sets a key to a number, or to none.
    pub(crate) fn set_optional(&mut self, key: &'static str, value: Option<f64>) {
        self.set(key, value.map_or(Value::Null, Value::from));
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    /// The keys with their values.
    pub fn into_pairs(self) -> Vec<(&'static str, Value)> {
        self.0
    }
}

/// What nearly all families say in the same words.
pub(crate) fn common(config: &HuggingFaceConfig, block: &'static str) -> Result<Settings, ModelError> {
    let mut settings = Settings::new(block);
    let (width, heads) = (config.required("hidden_size")?, config.required("num_attention_heads")?);
    settings.set("base_emb_dim", width);
    settings.set("base_num_query_heads", heads);
    settings.set("base_num_kv_heads", config.integer("num_key_value_heads")?.unwrap_or(heads));
    settings.set("head_dim", config.integer("head_dim")?.unwrap_or(width / heads.max(1)));
    settings.set("base_mlp_dim", config.required("intermediate_size")?);
    settings.set("base_num_decoder_layers", config.required("num_hidden_layers")?);
    settings.set("vocab_size", config.required("vocab_size")?);
    settings.set("normalization_layer_epsilon", config.number("rms_norm_eps")?.unwrap_or(1e-6));
    // Gemma's first models are read by the older name, which the later ones do not have.
    let is_first = config.text("model_type")?.as_deref() == Some("gemma");
    let activation = if !is_first && config.text("hidden_activation")?.is_some() {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    settings.set("mlp_activations", vec![config.activation(activation)?, "linear"]);
    settings.set("logits_via_embedding", config.boolean("tie_word_embeddings")?.unwrap_or(false));
    settings.set("normalize_embedding_logits", false);
    settings.set("enable_dropout", false);
    if let Some(length) = config.integer("max_position_embeddings")? {
        settings.set("max_position_embeddings", length);
    }
    rope(config, &mut settings)?;
    Ok(settings)
}

/// Gemma's models: as most, tied unless they say otherwise, and named differently in places.
pub(crate) fn gemma(config: &HuggingFaceConfig, block: &'static str) -> Result<Settings, ModelError> {
    let mut settings = common(config, block)?;
    settings.set("logits_via_embedding", config.boolean("tie_word_embeddings")?.unwrap_or(true));
    // MaxText's tied table is the scaled one, which cancels.
    settings.set("normalize_embedding_logits", true);
    settings.set("attention_bias", config.boolean("attention_bias")?.unwrap_or(false));
    // Newer files name a kind of layers instead of `true`.
    if config.has("use_bidirectional_attention")
        && config.boolean("use_bidirectional_attention") != Ok(Some(false))
    {
        return Err(config.unsupported("use_bidirectional_attention", "attention to later positions"));
    }
    Ok(settings)
}

/// The values of a rotary embedding that are numbers.
const ROPE_NUMBERS: &[&str] = &[
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
];

fn rope(config: &HuggingFaceConfig, settings: &mut Settings) -> Result<(), ModelError> {
    let rope = config.rope("full_attention")?;
    for key in ROPE_NUMBERS {
        if let Some(value) = rope.values.get(*key).filter(|value| !value.is_null() && !value.is_number()) {
            return Err(config.wrong(&format!("rope_parameters.{key}"), value, "a number"));
        }
    }
    let number = |key: &str| rope.values.get(key).and_then(Value::as_f64);
    let wanted = |key: &str, default: f64| number(key).unwrap_or(default);
    let length = config.integer("max_position_embeddings")?;
    let original = || rope.values.get("original_max_position_embeddings").and_then(Value::as_i64);
    settings.set("rope_max_timescale", rope.theta.unwrap_or(10_000.0));
    // Only Gemma 4 turns a part of its heads; its family reads that itself.
    let is_gemma4 = config.text("model_type")?.is_some_and(|name| name.starts_with("gemma4"));
    let is_proportional = is_gemma4 && rope.kind.as_deref() == Some("proportional");
    if rope.partial.is_some_and(|share| share != 1.0) && !is_proportional {
        return Err(config.unsupported("rope_parameters", "turning a part of the heads of this model type"));
    }
    settings.set("partial_rotary_factor", 1.0);
    match rope.kind.as_deref().unwrap_or("default") {
        "default" => {}
        "linear" => settings.set("rope_linear_scaling_factor", wanted("factor", 1.0)),
        "dynamic" => {
            settings.set("rope_type", "ntk");
            settings.set("rope_factor", wanted("factor", 1.0));
            // As in transformers, which does not look at an original length here.
            settings.set("original_max_position_embeddings", length.unwrap_or(2048));
        }
        "llama3" => {
            settings.set("rope_type", "llama3.1");
            settings.set("llama3_rope_factor", wanted("factor", 8.0));
            settings.set("rope_low_frequency_factor", wanted("low_freq_factor", 1.0));
            settings.set("rope_high_frequency_factor", wanted("high_freq_factor", 4.0));
            settings.set("llama3_rope_original_length", original().unwrap_or(8192));
        }
        "yarn" => {
            let original = original().or(length).unwrap_or(4096);
            settings.set("rope_type", "yarn");
            let stretched = length.map_or(1.0, |length| length as f64 / original as f64);
            settings.set("rope_factor", wanted("factor", stretched));
            settings.set("beta_fast", wanted("beta_fast", 32.0));
            settings.set("beta_slow", wanted("beta_slow", 1.0));
            settings.set("original_max_position_embeddings", original);
            let truncate = rope.values.get("truncate").and_then(Value::as_bool).unwrap_or(true);
            settings.set("rope_truncate", truncate);
            settings.set("rope_attention_scaling", true);
            if let Some(factor) = number("attention_factor").or_else(|| mscale_factor(&number)) {
                settings.set("rope_attention_factor", factor);
            }
        }
        // What the layers that see far make of it, the family says.
        "proportional" if is_proportional && wanted("factor", 1.0) == 1.0 => {}
        _ => return Err(config.unsupported("rope_parameters", "this rotary scaling")),
    }
    Ok(())
}

/// YaRN's factor from the two scales that some models give in its place.
fn mscale_factor(number: &impl Fn(&str) -> Option<f64>) -> Option<f64> {
    let (scale, of_all) = (number("mscale")?, number("mscale_all_dim")?);
    let factor = number("factor")?;
    let of = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    (scale != 0.0 && of_all != 0.0).then(|| of(scale) / of(of_all))
}

/// Sets the pattern of local and global layers: `layer_types`, or else what `is_local` says of each layer.
pub(crate) fn layer_types(
    config: &HuggingFaceConfig,
    settings: &mut Settings,
    is_local: impl Fn(usize) -> bool,
) -> Result<(), ModelError> {
    let num_layers = config.required("num_hidden_layers")?.max(0) as usize;
    let kinds = match config.layer_kinds()? {
        Some(kinds) => {
            let named: Option<Vec<&'static str>> = kinds
                .iter()
                .map(|kind| match kind.as_str() {
                    "sliding_attention" => Some("local"),
                    "full_attention" => Some("global"),
                    _ => None,
                })
                .collect();
            named.ok_or_else(|| config.unsupported("layer_types", "this kind of layer"))?
        }
        None => (0..num_layers).map(|layer| if is_local(layer) { "local" } else { "global" }).collect(),
    };
    if kinds.len() != num_layers {
        return Err(config.wrong("layer_types", &json!(kinds), "a list of one kind for each layer"));
    }
    settings.set("attention_pattern", kinds);
    Ok(())
}
