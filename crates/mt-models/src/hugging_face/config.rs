//! Converts `config.json` to configuration keys.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{
    consolidated, eagle,
    fields::{self, Field},
    kaggle, pax,
    quantized::Quantization,
    rope,
    source::has_tied_head,
};
use crate::{
    ModelError,
    families::{FAMILIES, Family, HuggingFaceFamily, ModelType},
};

/// The file that describes a directory's model.
const FILE: &str = "config.json";

/// The key of the object that holds the values of a multimodal model's text model.
const TEXT: &str = "text_config";

/// The key of the object that describes the layer of a decoder that drafts, in one of its published forms.
pub(super) const LAYER: &str = "transformer_layer_config";

/// The path of the file that describes a directory's model.
pub fn description_path(directory: &Path) -> PathBuf {
    if kaggle::is_at(directory) {
        return directory.join(kaggle::TREE_FILE);
    }
    if let Some(arrays) = pax::at(directory) {
        return arrays.join(pax::STEP);
    }
    directory.join(if consolidated::is_at(directory) { consolidated::PARAMS_FILE } else { FILE })
}

/// A model's `config.json`.
#[derive(Clone, Debug)]
pub struct HuggingFaceConfig {
    path: PathBuf,
    /// The key of the nested object that holds the values, if they are not those of the file itself.
    within: Option<String>,
    values: Map<String, Value>,
    /// The values of a multimodal model beside those of its text model.
    outside: Map<String, Value>,
}

/// Configuration keys with their values, in the order in which they were set.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pairs: Vec<(&'static str, Value)>,
    unread: Vec<String>,
}

/// The configuration keys for the model of a directory.
///
/// # Errors
/// `config.json` cannot be read, belongs to an unsupported family, or requires an unsupported feature.
pub fn settings_of(directory: &Path) -> Result<Settings, ModelError> {
    let config = HuggingFaceConfig::read(directory)?;
    let (_, model_type) = family_in(&config)?;
    let mut settings = settings_in(config)?;
    if let Some(tied) = model_type.tied_by_files.then(|| has_tied_head(directory)).flatten() {
        settings.set("logits_via_embedding", tied);
    }
    Ok(settings)
}

/// The configuration keys for a model's `config.json`.
pub(crate) fn settings_in(config: HuggingFaceConfig) -> Result<Settings, ModelError> {
    let ((family, form), model_type) = family_in(&config)?;
    let mut settings = Settings::new(family.blocks[0].name());
    settings.set("normalize_embedding_logits", false);
    settings.set("enable_dropout", false);
    for (key, value) in form.always {
        settings.set(key, *value);
    }
    let rows = fields::rows(
        [fields::OF_ALL].into_iter().chain(form.fields.iter().copied()).chain([model_type.fields]),
    );
    for field in &rows {
        field.set(&config, &mut settings)?;
    }
    settings.unread = config.unread(&rows);
    if let Some(quantization) = Quantization::of(&config)? {
        settings.unread.extend(quantization.unread);
    }
    Ok(settings)
}

/// A family with its form in Hugging Face's files.
type Published = (&'static Family, &'static HuggingFaceFamily);

/// The family of a model's `config.json`.
fn family_in(config: &HuggingFaceConfig) -> Result<(Published, &'static ModelType), ModelError> {
    let Some(model_type) = config.text("model_type")? else {
        return Err(ModelError::MissingValue { path: config.path.clone(), key: "model_type".to_owned() });
    };
    let families = || FAMILIES.iter().filter_map(|family| Some((*family, family.hugging_face.as_ref()?)));
    let found = families().find_map(|(family, form)| {
        let model_type = form.model_types.iter().find(|known| known.is_read && known.name == model_type)?;
        Some(((family, form), model_type))
    });
    found.ok_or_else(|| {
        let known = families().flat_map(|(_, form)| form.model_types).filter(|known| known.is_read);
        let built = known.map(|known| known.name.to_owned()).collect();
        ModelError::UnknownModelType { path: config.path.clone(), model_type, built }
    })
}

impl HuggingFaceConfig {
    /// Reads the `config.json` of a directory, or the equivalent in Llama's original format.
    ///
    /// # Errors
    /// The file is missing or is no JSON object.
    pub fn read(directory: &Path) -> Result<Self, ModelError> {
        let Self { path, mut values, .. } = Self::read_whole(directory)?;
        // Multimodal models nest the values of the text model.
        for key in [TEXT, LAYER] {
            match values.remove(key) {
                Some(Value::Object(inside)) => return Ok(Self { path, ..Self::nested_in(inside, values) }),
                Some(other) => {
                    values.insert(key.to_owned(), other);
                }
                None => {}
            }
        }
        Ok(Self { path, ..Self::of_values(values) })
    }

    /// As [`Self::read`], without looking for values in a nested object.
    pub(super) fn read_whole(directory: &Path) -> Result<Self, ModelError> {
        let path = description_path(directory);
        if path.ends_with(kaggle::TREE_FILE) {
            return Ok(Self { path, ..Self::of_values(kaggle::config_values(directory)?) });
        }
        if path.ends_with(pax::STEP) {
            return Ok(Self { path, ..Self::of_values(pax::config_values(directory)?) });
        }
        if path.ends_with(consolidated::PARAMS_FILE) {
            let values = consolidated::config_values(directory)?;
            return Ok(Self { path, ..Self::of_values(values) });
        }
        let unreadable = |reason: String| ModelError::Unreadable { path: path.clone(), reason };
        let text = std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?;
        match serde_json::from_str(&with_special_numbers(&text))
            .map_err(|error| unreadable(error.to_string()))?
        {
            Value::Object(values) => Ok(Self { path, ..Self::of_values(values) }),
            _ => Err(unreadable("it is no JSON object".to_owned())),
        }
    }

    /// A `config.json` that is not written yet.
    pub(crate) fn of_values(values: Map<String, Value>) -> Self {
        Self { path: FILE.into(), within: None, values, outside: Map::new() }
    }

    /// The text model of a multimodal one.
    fn nested_in(mut values: Map<String, Value>, mut outside: Map<String, Value>) -> Self {
        outside.remove(TEXT);
        for key in fields::OF_THE_WHOLE {
            let Some(value) = outside.get(*key).filter(|value| !value.is_null()) else { continue };
            if values.get(*key).is_none_or(Value::is_null) {
                values.insert((*key).to_owned(), value.clone());
            }
            if values.get(*key) == Some(value) {
                outside.remove(*key);
            }
        }
        Self { outside, ..Self::of_values(values) }
    }

    /// The object under a key of the file, with these values.
    pub(super) fn nested(&self, key: &str, values: Map<String, Value>) -> Self {
        Self { path: self.path.clone(), within: Some(self.full_key(key)), values, outside: Map::new() }
    }

    /// The values of a key's object that are not `null`.
    pub(super) fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| (key.as_str(), value))
    }

    /// The name of a key in messages.
    pub(super) fn full_key(&self, key: &str) -> String {
        self.within.as_ref().map_or_else(|| key.to_owned(), |within| format!("{within}.{key}"))
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn wrong(&self, key: &str, value: &Value, expected: &str) -> ModelError {
        ModelError::WrongValue {
            path: self.path.clone(),
            key: self.full_key(key),
            value: value.to_string(),
            expected: expected.to_owned(),
        }
    }

    pub(super) fn get<T>(
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

    /// Whether the key has a value other than `null`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|value| !value.is_null())
    }

    /// Whether the key is present with the value `null`.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_null)
    }

    /// The value of a key.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// The object under a key.
    ///
    /// # Errors
    /// The value is no object.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Map<String, Value>>, ModelError> {
        self.get(key, "an object", |value| value.as_object().cloned())
    }

    /// The integer value of a key.
    ///
    /// # Errors
    /// The value is no integer.
    pub fn integer(&self, key: &str) -> Result<Option<i64>, ModelError> {
        self.get(key, "a whole number", Value::as_i64)
    }

    /// The numeric value of a key.
    ///
    /// # Errors
    /// The value is no number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.get(key, "a number", Value::as_f64)
    }

    /// The Boolean value of a key.
    ///
    /// # Errors
    /// The value is no Boolean.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.get(key, "true or false", Value::as_bool)
    }

    /// The string value of a key.
    ///
    /// # Errors
    /// The value is no string.
    pub fn text(&self, key: &str) -> Result<Option<String>, ModelError> {
        self.get(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// The integer value of a required key.
    ///
    /// # Errors
    /// The key is missing, or its value is no integer.
    pub fn required(&self, key: &str) -> Result<i64, ModelError> {
        self.integer(key)?.ok_or_else(|| self.missing(key))
    }

    pub(crate) fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingValue { path: self.path.clone(), key: self.full_key(key) }
    }

    /// The error for a value that requires an unsupported feature.
    pub(crate) fn unsupported(&self, key: &str, feature: &str) -> ModelError {
        ModelError::NotBuilt {
            path: self.path.clone(),
            key: self.full_key(key),
            value: self.values.get(key).map(Value::to_string).unwrap_or_default(),
            feature: feature.to_owned(),
        }
    }

    /// The kind of each layer, if `layer_types` is present.
    pub(crate) fn layer_kinds(&self) -> Result<Option<Vec<String>>, ModelError> {
        self.texts("layer_types")
    }

    /// A list of texts.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, ModelError> {
        let texts = |value: &Value| -> Option<Vec<String>> {
            value.as_array()?.iter().map(|kind| kind.as_str().map(str::to_owned)).collect()
        };
        self.get(key, "a list of texts", texts)
    }

    /// The list of integers of a key.
    ///
    /// # Errors
    /// The value is no list of integers.
    pub(crate) fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        let integers = |value: &Value| value.as_array()?.iter().map(Value::as_i64).collect();
        self.get(key, "a list of whole numbers", integers)
    }

    /// An integer whose absence means `default` and whose `null` means `None`.
    pub(crate) fn integer_or(&self, key: &str, default: i64) -> Result<Option<i64>, ModelError> {
        if self.values.contains_key(key) { self.integer(key) } else { Ok(Some(default)) }
    }

    /// The keys that no row reads and that may describe the model.
    fn unread(&self, rows: &[&'static Field]) -> Vec<String> {
        let of_rows = rows.iter().flat_map(|field| field.others.iter().chain([&field.key]));
        let known = of_rows.chain(fields::WITHOUT_MATHEMATICS).chain(eagle::KEYS);
        let known: Vec<&str> = known.copied().collect();
        let values = self.values.iter().filter(|(_, value)| !value.is_null());
        let mut unread: Vec<String> =
            values.map(|(key, _)| key.clone()).filter(|key| !known.contains(&key.as_str())).collect();
        if known.contains(&rope::KEYS[0]) {
            unread.extend(self.unread_rope());
        }
        let is_known = |key: &str| {
            let known = [fields::WITHOUT_MATHEMATICS, fields::OF_OTHER_MODALITIES, eagle::KEYS];
            known.iter().any(|keys| keys.contains(&key))
        };
        let outside = self.outside.iter().filter(|(key, value)| !value.is_null() && !is_known(key));
        unread.extend(outside.map(|(key, _)| key.clone()));
        unread
    }
}

/// The text with Python's notation of numbers that JSON lacks replaced by that of newer releases of transformers: `Infinity`
/// becomes `{"__float__": "Infinity"}`.
fn with_special_numbers(text: &str) -> String {
    const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let (mut result, mut rest, mut is_in_text) = (String::with_capacity(text.len()), text, false);
    while let Some(first) = rest.chars().next() {
        if let Some(number) = NUMBERS.iter().find(|number| !is_in_text && rest.starts_with(**number)) {
            result.push_str(&format!("{{\"__float__\": \"{number}\"}}"));
            rest = &rest[number.len()..];
            continue;
        }
        // A backslash escapes the next character.
        let escaped = if first == '\\' { rest[1..].chars().next().map_or(0, char::len_utf8) } else { 0 };
        is_in_text ^= first == '"';
        let length = first.len_utf8() + escaped;
        result.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    result
}

impl Settings {
    /// Settings that contain only the `decoder_block`.
    fn new(block: &'static str) -> Self {
        Self { pairs: vec![("decoder_block", block.into())], unread: Vec::new() }
    }

    /// Sets a key.
    pub(crate) fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.pairs.retain(|(known, _)| *known != key);
        self.pairs.push((key, value.into()));
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.pairs.iter().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    /// The keys with their values.
    pub fn into_pairs(self) -> Vec<(&'static str, Value)> {
        self.pairs
    }

    /// The keys of the file that nothing reads, without those that cannot change what the model computes.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }
}

/// Sets the pattern of local and global layers from `layer_types`, or else from `is_local`.
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
