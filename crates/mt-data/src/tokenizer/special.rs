//! Which tokens mark the beginning, the end and the padding of a text.

use serde_json::{Map, Value, json};

use super::TOKENIZER_CONFIG_FILE;
use super::backend::Backend;
use super::companions::{Companions, SPECIAL_TOKENS_MAP_FILE};
use crate::error::Result;

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
    /// Reads the files beside the tokenizer, the more specific one first; without any, asks the model, or goes by the
    /// known names.
    pub(super) fn find(tokenizer: &Backend, companions: &Companions) -> Result<Self> {
        for name in [TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_MAP_FILE] {
            let Some(content) = companions.object(name)? else { continue };
            // A file may be about other settings only; one that names any role decides all of them.
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

    /// The text of a `tokenizer_config.json` that [`SpecialTokens::find`] reads back.
    pub(super) fn config_json(&self, tokenizer: &Backend) -> String {
        let mut content = Map::new();
        // The class of the others depends on the model family.
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

/// The text of a token in a file of settings: a string, or an object that holds the string and its options.
pub(crate) fn text_of(token: &Value) -> Option<&str> {
    match token {
        Value::String(token) => Some(token),
        Value::Object(object) => object.get("content").and_then(Value::as_str),
        _ => None,
    }
}
