//! Log-probabilities in the forms of OpenAI's routes.

use mt_data::Tokenizer;
use mt_engine::serve::TokenLogProbability;
use serde_json::{Map, Value, json};

/// The text of a single token; its bytes are spelled if they are no text.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> String {
    let bytes = tokenizer.token_bytes(token).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let spelled: String = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}")).collect();
        format!("bytes:{spelled}")
    })
}

/// A log-probability as JSON, which has no infinity.
fn number(log_probability: f32) -> f32 {
    log_probability.max(-9999.0)
}

/// The entries of chat completions.
pub fn chat_entry(tokenizer: &Tokenizer, token: &TokenLogProbability) -> Value {
    let entry = |id: u32, log_probability: f32| {
        json!({
            "token": token_text(tokenizer, id),
            "logprob": number(log_probability),
            "bytes": tokenizer.token_bytes(id),
        })
    };
    let mut found = entry(token.token, token.log_probability);
    found["top_logprobs"] = token.top.iter().map(|(id, log)| entry(*id, *log)).collect();
    found
}

/// The lists of completions.
#[derive(Default)]
pub struct TokenLists {
    tokens: Vec<String>,
    token_log_probabilities: Vec<Option<f32>>,
    top: Vec<Value>,
    offsets: Vec<usize>,
    /// The offset of the next token in the text, in characters.
    offset: usize,
}

impl TokenLists {
    /// Lists that begin at an offset.
    pub fn at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Adds a token, without log-probabilities if it is the first of a prompt. With `skips_special`, the text omits
    /// special tokens.
    pub fn push(
        &mut self,
        tokenizer: &Tokenizer,
        token: u32,
        found: Option<&TokenLogProbability>,
        skips_special: bool,
    ) {
        let text = token_text(tokenizer, token);
        self.offsets.push(self.offset);
        if !(skips_special && tokenizer.is_special(token)) {
            self.offset += text.chars().count();
        }
        self.token_log_probabilities.push(found.map(|found| number(found.log_probability)));
        self.top.push(match found {
            None => Value::Null,
            Some(found) => {
                let mut top: Map<String, Value> = Map::new();
                // The most probable of tokens with equal texts counts.
                for (id, log) in &found.top {
                    top.entry(token_text(tokenizer, *id)).or_insert_with(|| json!(number(*log)));
                }
                // OpenAI adds the chosen token to the most probable ones.
                top.entry(text.clone()).or_insert_with(|| json!(number(found.log_probability)));
                Value::Object(top)
            }
        });
        self.tokens.push(text);
    }

    /// The lists since the last call.
    pub fn take(&mut self) -> Value {
        let offset = self.offset;
        let Self { tokens, token_log_probabilities, top, offsets, .. } =
            std::mem::replace(self, Self::at(offset));
        json!({
            "tokens": tokens,
            "token_logprobs": token_log_probabilities,
            "top_logprobs": top,
            "text_offset": offsets,
        })
    }
}
