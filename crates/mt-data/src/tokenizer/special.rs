//! Which tokens mark the beginning, the end and the padding of a text.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::TOKENIZER_CONFIG_FILE;
use crate::error::{DataError, Result};

/// Ids with a meaning of their own; a tokenizer need not have them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of a text.
    pub bos: Option<u32>,
    /// End of a text.
    pub eos: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// What the tokenizer cannot express.
    pub unk: Option<u32>,
}

const ROLES: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Names in use, the most specific first, for tokenizers that come without a word about their special tokens.
const KNOWN_NAMES: [&[&str]; 4] = [
    &["<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>", "[BOS]", "<|begin▁of▁sentence|>"],
    &["<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>", "[EOS]", "<|end▁of▁sentence|>"],
    &["<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"],
    &["<unk>", "[UNK]"],
];

impl SpecialTokens {
    /// Reads the files in `directory`, the more specific one first; without any, goes by the known names.
    pub(super) fn find(tokenizer: &tokenizers::Tokenizer, directory: Option<&Path>) -> Result<Self> {
        for name in [TOKENIZER_CONFIG_FILE, "special_tokens_map.json"] {
            let Some(path) = directory.map(|directory| directory.join(name)).filter(|path| path.is_file())
            else {
                continue;
            };
            let invalid = |reason: String| DataError::Tokenizer { path: path.clone(), reason, hint: "" };
            let text = std::fs::read_to_string(&path).map_err(DataError::io("read", &path))?;
            let content: Map<String, Value> =
                serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
            // A file may be about other settings only; one that names any role decides all of them.
            if !ROLES.iter().any(|role| content.get(*role).is_some_and(|value| !value.is_null())) {
                continue;
            }
            let mut ids = [None; 4];
            for (id, role) in ids.iter_mut().zip(ROLES) {
                // A token is a string, or an object that holds the string and its options.
                let token = match content.get(role) {
                    Some(Value::String(token)) => Some(token.as_str()),
                    Some(Value::Object(object)) => object.get("content").and_then(Value::as_str),
                    _ => None,
                };
                if let Some(token) = token {
                    let known = tokenizer.token_to_id(token);
                    *id = Some(known.ok_or_else(|| {
                        invalid(format!("its `{role}` `{token}` is not in the vocabulary"))
                    })?);
                }
            }
            return Ok(Self::from_ids(ids));
        }
        let find = |names: &[&str]| names.iter().find_map(|name| tokenizer.token_to_id(name));
        Ok(Self::from_ids(KNOWN_NAMES.map(find)))
    }

    fn from_ids([bos, eos, pad, unk]: [Option<u32>; 4]) -> Self {
        Self { bos, eos, pad, unk }
    }

    /// The text of a `tokenizer_config.json` that [`SpecialTokens::find`] reads back.
    pub(super) fn config_json(&self, tokenizer: &tokenizers::Tokenizer) -> String {
        let mut content = Map::new();
        content.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        for (role, id) in ROLES.iter().zip([self.bos, self.eos, self.pad, self.unk]) {
            content.insert((*role).into(), json!(id.and_then(|id| tokenizer.id_to_token(id))));
        }
        content.insert("clean_up_tokenization_spaces".into(), json!(false));
        let mut text = serde_json::to_string_pretty(&content).expect("strings are representable in JSON");
        text.push('\n');
        text
    }
}
