//! The BOS, EOS, padding and unknown tokens of a tokenizer.

use serde_json::{Map, Value, json};

use super::TOKENIZER_CONFIG_FILE;
use super::backend::Backend;
use super::companions::{Companions, SPECIAL_TOKENS_MAP_FILE};
use crate::error::Result;

/// Ids of the special tokens that the tokenizer has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token at the beginning of a text (BOS).
    pub bos: Option<u32>,
    /// The token at the end of a text (EOS).
    pub eos: Option<u32>,
    /// The padding token.
    pub pad: Option<u32>,
    /// The token for text outside the vocabulary.
    pub unk: Option<u32>,
}

const ROLES: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// Common names, the most specific first, for tokenizers whose files do not name special tokens.
const KNOWN_NAMES: [&[&str]; 4] = [
    &["<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>", "[BOS]", "<|begin▁of▁sentence|>"],
    &["<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>", "[EOS]", "<|end▁of▁sentence|>"],
    &["<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"],
    &["<unk>", "[UNK]"],
];

impl SpecialTokens {
    /// Reads the files beside the tokenizer, the more specific one first. Without them, takes the model's own special
    /// tokens, or recognizes common names.
    pub(super) fn find(tokenizer: &Backend, companions: &Companions) -> Result<Self> {
        for name in [TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE] {
            let Some(content) = companions.object(name)? else { continue };
            // A file may contain only other settings. A file that names any role decides all of them.
            if !ROLES.iter().any(|role| content.get(*role).is_some_and(|value| !value.is_null())) {
                continue;
            }
            let mut ids = [None; 4];
            for (id, role) in ids.iter_mut().zip(ROLES) {
                if let Some(token) = content.get(role).and_then(text_of) {
                    let known = tokenizer.id(token);
                    *id = Some(known.ok_or_else(|| {
                        companions.invalid(name, format!("its `{role}` `{token}` is not in the vocabulary"))
                    })?);
                }
            }
            return Ok(Self::from_ids(ids));
        }
        if let Backend::SentencePiece(model, _) = tokenizer {
            return Ok(Self::from_ids(model.special_ids()));
        }
        let find = |names: &[&str]| names.iter().find_map(|name| tokenizer.id(name));
        Ok(Self::from_ids(KNOWN_NAMES.map(find)))
    }

    fn from_ids([bos, eos, pad, unk]: [Option<u32>; 4]) -> Self {
        Self { bos, eos, pad, unk }
    }

    /// The text of a `tokenizer_config.json` from which [`SpecialTokens::find`] reads the same tokens.
    pub(super) fn config_json(&self, tokenizer: &Backend) -> String {
        let mut content = Map::new();
        // For other kinds, the class depends on the model family.
        if matches!(tokenizer, Backend::HuggingFace(_)) {
            content.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        }
        for (role, id) in ROLES.iter().zip([self.bos, self.eos, self.pad, self.unk]) {
            content.insert((*role).into(), json!(id.and_then(|id| tokenizer.token(id))));
        }
        content.insert("clean_up_tokenization_spaces".into(), json!(false));
        let mut text = serde_json::to_string_pretty(&content).expect("strings are representable in JSON");
        text.push('\n');
        text
    }
}

/// The text of a token in a JSON file: a string, or an object with the string and its options.
pub(crate) fn text_of(token: &Value) -> Option<&str> {
    match token {
        Value::String(token) => Some(token),
        Value::Object(object) => object.get("content").and_then(Value::as_str),
        _ => None,
    }
}
