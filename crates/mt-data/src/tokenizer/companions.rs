//! The files beside a tokenizer, which list special tokens, added tokens, and the tokens that end generation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::TOKENIZER_CONFIG_FILE;
use super::backend::AddedToken;
use crate::error::{DataError, Result};

/// The file that names special tokens if `tokenizer_config.json` does not.
pub(crate) const SPECIAL_TOKENS_MAP_FILE: &str = "special_tokens_map.json";
const ADDED_TOKENS_FILE: &str = "added_tokens.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// The file that describes the whole model. It may list the tokens that end generation.
const MODEL_CONFIG_FILE: &str = "config.json";
/// The files that are saved along with a tokenizer.
const FILES: [&str; 6] = [
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_MAP_FILE,
    ADDED_TOKENS_FILE,
    GENERATION_CONFIG_FILE,
    "chat_template.jinja",
    "chat_template.json",
];

/// The content of the files as it was read.
#[derive(Debug, Default)]
pub(super) struct Companions {
    directory: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Companions {
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let mut companions = Self { directory: directory.into(), files: Vec::new() };
        for name in FILES {
            companions.files.extend(read(&directory.join(name))?.map(|bytes| (name, bytes)));
        }
        if companions.object(GENERATION_CONFIG_FILE)?.is_none()
            && let Some(bytes) = read(&directory.join(MODEL_CONFIG_FILE))?
            && let Some(ids) = companions.parse(MODEL_CONFIG_FILE, &bytes)?.get("eos_token_id")
        {
            // The transformers library does the same, so a copy of the tokenizer ends generation where the model does.
            let content = json!({ "eos_token_id": ids }).to_string();
            companions.files.push((GENERATION_CONFIG_FILE, content.into_bytes()));
        }
        Ok(companions)
    }

    /// The names and the content of the existing files.
    pub(super) fn files(&self) -> &[(&'static str, Vec<u8>)] {
        &self.files
    }

    /// The content of a JSON file, if it exists.
    pub(super) fn object(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        let file = self.files.iter().find(|(file, _)| *file == name);
        file.map(|(_, bytes)| self.parse(name, bytes)).transpose()
    }

    /// An error about one of the files.
    pub(super) fn invalid(&self, name: &str, reason: impl Into<String>) -> DataError {
        DataError::Tokenizer { path: self.directory.join(name), reason: reason.into(), hint: "" }
    }

    /// The split pattern for a file of ranks, from `tokenizer_config.json`.
    pub(super) fn pattern(&self) -> Result<Option<String>> {
        let config = self.object(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        Ok(config.get("pat_str").and_then(Value::as_str).map(str::to_string))
    }

    /// Whether texts begin with BOS and end with EOS.
    pub(super) fn adds(&self) -> Result<[Option<bool>; 2]> {
        let config = self.object(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        Ok(["add_bos_token", "add_eos_token"].map(|key| config.get(key).and_then(Value::as_bool)))
    }

    /// The tokens outside the model's vocabulary.
    pub(super) fn added_tokens(&self) -> Result<Vec<AddedToken>> {
        let mut tokens = Vec::new();
        let config = self.object(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        for (id, token) in config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten()
        {
            let (id, text) = (id.parse(), token.get("content").and_then(Value::as_str));
            let (Ok(id), Some(text)) = (id, text.filter(|text| !text.is_empty())) else {
                let reason = "its `added_tokens_decoder` does not map numbers to texts";
                return Err(self.invalid(TOKENIZER_CONFIG_FILE, reason));
            };
            let is_special = token.get("special").and_then(Value::as_bool).unwrap_or_default();
            tokens.push(AddedToken { text: text.into(), id, is_special });
        }
        for (text, id) in self.object(ADDED_TOKENS_FILE)?.unwrap_or_default() {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| self.invalid(ADDED_TOKENS_FILE, "it does not map texts to numbers"))?;
            if !tokens.iter().any(|token| token.id == id) && !text.is_empty() {
                tokens.push(AddedToken { text, id, is_special: false });
            }
        }
        Ok(tokens)
    }

    /// The tokens that end generation, from `generation_config.json` or `config.json`.
    pub(super) fn end_ids(&self) -> Result<BTreeSet<u32>> {
        let config = self.object(GENERATION_CONFIG_FILE)?.unwrap_or_default();
        let ids = match config.get("eos_token_id") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
        };
        let number = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        ids.iter()
            .map(|id| {
                let reason = || format!("its `eos_token_id` holds `{id}`, which is not a token id");
                number(id).ok_or_else(|| self.invalid(GENERATION_CONFIG_FILE, reason()))
            })
            .collect()
    }

    fn parse(&self, name: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
        serde_json::from_slice(bytes).map_err(|error| self.invalid(name, error.to_string()))
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(DataError::io("read", path)(error)),
    }
}
