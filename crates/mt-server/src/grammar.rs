//! Restrictions of an answer's text, as masks of tokens.

use std::sync::Arc;

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use mt_data::Tokenizer;
use mt_engine::serve::TokenFilter;
use serde_json::{Value, json};

use crate::error::{ApiError, Result};

/// A restriction of an answer's text.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    JsonSchema(Value),
    Regex(String),
    Lark(String),
}

impl Grammar {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(json!({ "type": "object" }))
    }

    /// One of some texts.
    pub fn choice(texts: &[String]) -> Self {
        let quoted: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
        Self::Lark(format!("start: {}", quoted.join(" | ")))
    }

    /// A schema whose white space has an end: one space, or a new line with its indentation. A model that is unsure may
    /// otherwise write white space without end.
    pub fn with_bounded_space(mut schema: Value) -> Value {
        if let Some(object) = schema.as_object_mut() {
            let options = json!({ "whitespace_pattern": r" |\n[ \t]{0,24}" });
            object.entry("x-guidance").or_insert(options);
        }
        schema
    }

    fn top_level(&self) -> TopLevelGrammar {
        match self {
            Self::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(Self::with_bounded_space(schema.clone()))
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        }
    }
}

/// An error's first line. Errors of regular expressions draw the place behind it, and then name the reason.
fn in_one_line(error: &str) -> String {
    let first = error.lines().next().unwrap_or_default();
    let reason = error.lines().find_map(|line| line.trim().strip_prefix("error: "));
    match (first.strip_suffix(':'), reason) {
        (Some(first), Some(reason)) => format!("{first}: {reason}"),
        (Some(first), None) => first.to_owned(),
        (None, _) => first.to_owned(),
    }
}

/// Compiles grammars for one tokenizer.
pub struct Grammars {
    factory: ParserFactory,
    num_words: usize,
}

impl Grammars {
    /// Prepares the vocabulary. `end_tokens` end an answer.
    ///
    /// # Errors
    /// The tokenizer's vocabulary cannot be used.
    pub fn new(tokenizer: &Tokenizer, end_tokens: &[u32]) -> Result<Self> {
        let size = tokenizer.vocab_size();
        let failed = |error: &dyn std::fmt::Display| {
            ApiError::internal(format!("grammars are unavailable with this tokenizer: {error}"))
        };
        let Some(first) = end_tokens.first() else {
            return Err(ApiError::invalid(
                "the model has no end-of-sequence token, which an answer in a given format needs",
            ));
        };
        let words: Vec<Vec<u8>> = (0..size as u32)
            .map(|token| {
                let bytes = tokenizer.token_bytes(token).unwrap_or_default();
                if tokenizer.is_special(token) {
                    let mut marked = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                    marked.extend(bytes);
                    return marked;
                }
                bytes
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(size as u32, *first), &words).with_eos_tokens(end_tokens);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| failed(&error))?;
        factory.quiet();
        Ok(Self { factory, num_words: size.div_ceil(32) })
    }

    /// A filter that keeps an answer within a grammar. With `after`, the answer is free up to that text.
    ///
    /// # Errors
    /// The grammar is wrong; `field` names it.
    pub fn filter(
        &self,
        grammar: &Grammar,
        field: &str,
        after: Option<&str>,
        tokenizer: &Arc<Tokenizer>,
    ) -> Result<Box<dyn TokenFilter>> {
        let parser = self.factory.create_parser(grammar.top_level());
        let mut matcher = Matcher::new(parser);
        // The first mask shows whether the grammar allows any text.
        let checked = match matcher.get_error() {
            Some(error) => Err(error),
            None => matcher.compute_mask_or_eos().map_err(|error| error.to_string()),
        };
        match checked {
            Ok(mask) if !mask.is_zero() => {}
            Ok(_) => return Err(ApiError::field(field, format!("`{field}` allows no answer"))),
            Err(error) => {
                let message = format!("`{field}` cannot be used: {}", in_one_line(&error));
                return Err(ApiError::field(field, message).with_code("invalid_grammar"));
            }
        }
        let filter = Matched { matcher, num_words: self.num_words };
        Ok(match after {
            None => Box::new(filter),
            Some(mark) => Box::new(After {
                mark: mark.as_bytes().to_vec(),
                seen: Vec::new(),
                tokenizer: tokenizer.clone(),
                begun: false,
                filter,
            }),
        })
    }
}

/// A grammar's position in an answer.
struct Matched {
    matcher: Matcher,
    num_words: usize,
}

impl TokenFilter for Matched {
    fn allowed(&mut self, allowed: &mut [u32]) {
        // After an error, which the check of the grammar rules out as far as possible, the answer ends.
        let Ok(mask) = self.matcher.compute_mask_or_eos() else { return };
        for (word, bits) in allowed.iter_mut().zip(mask.as_slice()).take(self.num_words) {
            *word |= bits;
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        self.matcher.consume_token(token).is_ok() && !self.matcher.is_stopped()
    }
}

/// A filter that begins after a mark, such as the end of reasoning.
struct After {
    mark: Vec<u8>,
    /// The last bytes of the answer, as many as the mark has.
    seen: Vec<u8>,
    tokenizer: Arc<Tokenizer>,
    begun: bool,
    filter: Matched,
}

impl TokenFilter for After {
    fn allowed(&mut self, allowed: &mut [u32]) {
        match self.begun {
            true => self.filter.allowed(allowed),
            false => allowed.fill(u32::MAX),
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        if self.begun {
            return self.filter.accept(token);
        }
        self.seen.extend(self.tokenizer.token_bytes(token).unwrap_or_default());
        self.begun = self.seen.windows(self.mark.len()).any(|window| window == self.mark);
        self.seen.drain(..self.seen.len().saturating_sub(self.mark.len()));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a filter lets each byte of a text pass, and then the end.
    #[track_caller]
    fn check(grammar: &Grammar, after: Option<&str>, text: &str, expected: bool) {
        let tokenizer = Arc::new(Tokenizer::bytes());
        let grammars = Grammars::new(&tokenizer, &[2]).unwrap();
        let mut filter = grammars.filter(grammar, "schema", after, &tokenizer).unwrap();
        let tokens = tokenizer.encode(text, false, false).unwrap();
        let mut passes = true;
        let mut goes_on = true;
        for token in tokens.into_iter().chain([2]) {
            let mut allowed = vec![0_u32; 259_usize.div_ceil(32)];
            filter.allowed(&mut allowed);
            passes &= allowed[token as usize / 32] >> (token % 32) & 1 == 1;
            if !passes {
                break;
            }
            goes_on &= token == 2 || filter.accept(token);
            if !goes_on {
                break;
            }
        }
        assert_eq!(passes, expected, "{text}");
    }

    #[test]
    fn schemas_restrict_answers() {
        let schema = Grammar::JsonSchema(json!({
            "$defs": { "count": { "type": "integer", "minimum": 0 } },
            "type": "object",
            "properties": { "name": { "type": "string" }, "count": { "$ref": "#/$defs/count" } },
            "required": ["name", "count"],
            "additionalProperties": false,
        }));
        check(&schema, None, r#"{"name": "x", "count": 3}"#, true);
        check(&schema, None, r#"{"name": "x"}"#, false);
        check(&schema, None, r#"{"name": 1}"#, false);
        check(&schema, None, "{\n  \"name\": \"x\",\n  \"count\": 3\n}", true);
        check(&schema, None, "{  \"name\": \"x\", \"count\": 3}", false);
        check(&schema, Some("</think>"), r#"so </think>{"name": "é", "count": 3}"#, true);
        check(&schema, Some("</think>"), r#"so </think>{"name": 1}"#, false);
        check(&Grammar::Regex("[a-c]+".into()), None, "abc", true);
        check(&Grammar::Regex("[a-c]+".into()), None, "abd", false);
        check(&Grammar::choice(&["yes".into(), "no \"x\"".into()]), None, "no \"x\"", true);
        check(&Grammar::choice(&["yes".into(), "no".into()]), None, "maybe", false);
        check(&Grammar::json_object(), None, r#"{"a": [1, {"b": null}]}"#, true);
        check(&Grammar::json_object(), None, "[1]", false);
    }

    #[test]
    fn wrong_grammars_are_refused() {
        let tokenizer = Arc::new(Tokenizer::bytes());
        let grammars = Grammars::new(&tokenizer, &[2]).unwrap();
        for grammar in [
            Grammar::JsonSchema(json!({ "type": "nothing" })),
            Grammar::Regex("(".into()),
            Grammar::Lark("start: missing".into()),
        ] {
            let error = grammars.filter(&grammar, "schema", None, &tokenizer).err().unwrap();
            assert!(error.message.starts_with("`schema` cannot be used: "), "{}", error.message);
        }
        let pattern = Grammar::JsonSchema(json!({ "type": "string", "pattern": "(" }));
        for grammar in [Grammar::Regex("(".into()), pattern] {
            let error = grammars.filter(&grammar, "schema", None, &tokenizer).err().unwrap();
            assert!(error.message.contains("regex parse error"), "{}", error.message);
            assert!(!error.message.ends_with([':', '^']), "{}", error.message);
        }
    }
}
