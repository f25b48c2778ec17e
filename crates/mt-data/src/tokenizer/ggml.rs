//! The vocabulary of a tokenizer as llama.cpp's files hold it.
//!
//! llama.cpp has two tokenizers of its own for the families that are exported: `gpt2` for byte-level byte pair encoding,
//! whose splitting of texts into words is one of a fixed list (`pre`), and `llama` for SentencePiece's byte pair encoding.
//! A tokenizer that neither reproduces is refused.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::sentencepiece::{ModelProto, PieceKind};
use super::{TOKENIZER_CONFIG_FILE, Tokenizer, TokenizerKind};
use crate::error::{DataError, Result};

/// The kind of a token, with llama.cpp's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgmlTokenKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// A vocabulary in llama.cpp's form.
#[derive(Debug, Clone, PartialEq)]
pub struct GgmlVocabulary {
    /// `gpt2` or `llama`.
    pub model: &'static str,
    /// The name of the rule that splits texts into words.
    pub pre: &'static str,
    /// The tokens with their kinds, by id.
    pub tokens: Vec<(String, GgmlTokenKind)>,
    /// The scores of tokens, of which greater ones are merged first; only for `llama`.
    pub scores: Option<Vec<f32>>,
    /// The merges, each of two tokens with a space between them; only for `gpt2`.
    pub merges: Option<Vec<String>>,
    /// Whether texts begin with a space; only for `llama`.
    pub adds_space: Option<bool>,
    /// The template of chats.
    pub chat_template: Option<String>,
}

/// A rule by which words are split, and whether a word that is a token stays whole.
struct Rule {
    pre: &'static str,
    splits: &'static [Split],
    ignores_merges: bool,
}

/// A step of a pre-tokenizer before the bytes are spelled.
#[derive(Debug, PartialEq)]
enum Split {
    /// A regular expression isolates words.
    Pattern(&'static str),
    /// Each digit is a word.
    Digits,
    /// GPT-2's own pattern, which the byte-level step applies.
    ByteLevel,
}

const RULES: &[Rule] = &[
    Rule { pre: "gpt-2", splits: &[Split::ByteLevel], ignores_merges: false },
    Rule {
        pre: "llama-bpe",
        splits: &[Split::Pattern(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ignores_merges: true,
    },
    Rule {
        pre: "qwen2",
        splits: &[Split::Pattern(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ignores_merges: false,
    },
    Rule { pre: "smollm", splits: &[Split::Digits, Split::ByteLevel], ignores_merges: false },
];

impl Tokenizer {
    /// The vocabulary in llama.cpp's form.
    ///
    /// # Errors
    /// llama.cpp has no tokenizer that splits and merges texts in the same way.
    pub fn ggml_vocabulary(&self) -> Result<GgmlVocabulary> {
        let refused = |(reason, hint): Refusal| DataError::NotInGguf {
            tokenizer: self.name.clone(),
            reason,
            hint: hint.to_owned(),
        };
        let mut vocabulary = match self.kind {
            TokenizerKind::SentencePiece => self.of_sentence_piece().map_err(refused)?,
            TokenizerKind::HuggingFace => {
                let json: Value = serde_json::from_slice(&self.file)
                    .map_err(|error| refused((error.to_string(), "the file is damaged")))?;
                of_json(&json).map_err(refused)?
            }
            TokenizerKind::Tiktoken => {
                let reason = "a tiktoken file of ranks has no merges".to_owned();
                return Err(refused((reason, "use the same model's `tokenizer.json`")));
            }
        };
        for token in self.companions.added_tokens()? {
            let (index, kind) = (token.id as usize, kind_of_added(token.is_special));
            if vocabulary.tokens.len() <= index {
                fill(&mut vocabulary.tokens, index + 1);
            }
            if vocabulary.tokens[index].1 != GgmlTokenKind::Unknown {
                vocabulary.tokens[index] = (token.text, kind);
            }
        }
        if let Some(scores) = &mut vocabulary.scores {
            scores.resize(vocabulary.tokens.len(), 0.0);
        }
        vocabulary.chat_template = self.chat_template_text()?;
        Ok(vocabulary)
    }

    fn chat_template_text(&self) -> Result<Option<String>> {
        let files = self.companions.files();
        if let Some((_, bytes)) = files.iter().find(|(name, _)| *name == "chat_template.jinja") {
            return Ok(String::from_utf8(bytes.clone()).ok());
        }
        let config = self.companions.object(TOKENIZER_CONFIG_FILE)?.unwrap_or_default();
        Ok(config.get("chat_template").and_then(Value::as_str).map(str::to_owned))
    }

    fn of_sentence_piece(&self) -> Result<GgmlVocabulary, Refusal> {
        const BYTE_PAIR: u64 = 2;
        let damaged = |reason| (reason, "the file is damaged");
        let ModelProto { pieces, trainer, normalizer, .. } =
            ModelProto::parse(&self.file).map_err(damaged)?;
        let not_of_llama = |what: &str| {
            let hint = "llama.cpp's tokenizer `llama` is that of Llama 2, Mistral and Gemma";
            Err((format!("it {what}"), hint))
        };
        if trainer.model_type != BYTE_PAIR {
            return not_of_llama("is not a byte pair model");
        }
        if !trainer.byte_fallback {
            return not_of_llama("has no tokens for single bytes");
        }
        if !normalizer.charsmap.is_empty() || normalizer.remove_extra_whitespaces {
            return not_of_llama("changes texts before it splits them");
        }
        if trainer.treat_whitespace_as_suffix || !normalizer.escape_whitespaces {
            return not_of_llama("has spaces elsewhere than at the beginning of words");
        }
        let kind = |kind| match kind {
            PieceKind::Normal => GgmlTokenKind::Normal,
            PieceKind::Unknown => GgmlTokenKind::Unknown,
            PieceKind::Control => GgmlTokenKind::Control,
            PieceKind::UserDefined => GgmlTokenKind::UserDefined,
            PieceKind::Unused => GgmlTokenKind::Unused,
            PieceKind::Byte => GgmlTokenKind::Byte,
        };
        Ok(GgmlVocabulary {
            model: "llama",
            pre: "default",
            scores: Some(pieces.iter().map(|piece| piece.score).collect()),
            tokens: pieces.into_iter().map(|piece| (piece.text, kind(piece.kind))).collect(),
            merges: None,
            adds_space: Some(normalizer.add_dummy_prefix),
            chat_template: None,
        })
    }
}

/// The reason why a tokenizer cannot be exported, and a hint.
type Refusal = (String, &'static str);

const OTHER_RULE: &str = "the known ones are GPT-2's, Llama 3's, Qwen2's and SmolLM's, and those of SentencePiece's byte pair models";

fn unknown(what: impl Into<String>) -> Refusal {
    (format!("llama.cpp knows no tokenizer with {}", what.into()), OTHER_RULE)
}

fn kind_of_added(is_special: bool) -> GgmlTokenKind {
    if is_special { GgmlTokenKind::Control } else { GgmlTokenKind::UserDefined }
}

/// Adds unused tokens up to a number.
fn fill(tokens: &mut Vec<(String, GgmlTokenKind)>, number: usize) {
    let missing = tokens.len()..number;
    tokens.extend(missing.map(|id| (format!("[PAD{id}]"), GgmlTokenKind::Unused)));
}

impl GgmlVocabulary {
    /// Extends or shortens the vocabulary to the rows of the model's embedding table. llama.cpp has a row for each token.
    pub fn resize(&mut self, vocab_size: usize) {
        self.tokens.truncate(vocab_size);
        fill(&mut self.tokens, vocab_size);
        if let Some(scores) = &mut self.scores {
            scores.resize(vocab_size, 0.0);
        }
    }
}

/// The vocabulary of a `tokenizer.json`.
fn of_json(json: &Value) -> Result<GgmlVocabulary, Refusal> {
    let model = &json["model"];
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return Err(unknown(format!("a model of the type `{kind}` in its `tokenizer.json`")));
    }
    for key in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
        if !model[key].is_null() && model[key] != "" {
            return Err(unknown(format!("the option `{key}`")));
        }
    }
    let empty = Map::new();
    let known = model["vocab"].as_object().unwrap_or(&empty);
    let merges = merges_of(&model["merges"]);
    let added = json["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ids = known.values().chain(added.iter().map(|token| &token["id"])).filter_map(Value::as_u64);
    let number = ids.max().map_or(0, |last| last as usize + 1);
    let mut tokens = Vec::new();
    fill(&mut tokens, number);
    for (text, id) in known {
        if let Some(token) = id.as_u64().and_then(|id| tokens.get_mut(id as usize)) {
            *token = (text.clone(), GgmlTokenKind::Normal);
        }
    }
    let falls_back = model["byte_fallback"] == true;
    for token in added {
        if let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) {
            tokens[id as usize] = (text.to_owned(), kind_of_added(token["special"] == true));
        }
    }
    if falls_back {
        return of_sentence_piece_json(json, tokens, &merges);
    }
    let pre = rule_of(json, model["ignore_merges"] == true)?;
    let merges = merges.into_iter().map(|(left, right)| format!("{left} {right}")).collect();
    Ok(GgmlVocabulary {
        model: "gpt2",
        pre,
        tokens,
        scores: None,
        merges: Some(merges),
        adds_space: None,
        chat_template: None,
    })
}

/// The merges of a model, in both of their spellings: two tokens in an array, or in one text with a space between them.
fn merges_of(merges: &Value) -> Vec<(&str, &str)> {
    fn pair(merge: &Value) -> Option<(&str, &str)> {
        match merge {
            Value::String(text) => text.split_once(' '),
            other => Some((other[0].as_str()?, other[1].as_str()?)),
        }
    }
    merges.as_array().into_iter().flatten().filter_map(pair).collect()
}

/// The name of the rule by which a byte-level tokenizer splits texts.
fn rule_of(json: &Value, ignores_merges: bool) -> Result<&'static str, Refusal> {
    let normalizer = &json["normalizer"];
    if !normalizer.is_null() && normalizer["type"] != "NFC" {
        return Err(unknown(format!("the normalizer `{}`", name_of(normalizer))));
    }
    let steps = match json["pre_tokenizer"]["type"].as_str() {
        Some("Sequence") => json["pre_tokenizer"]["pretokenizers"].as_array().cloned().unwrap_or_default(),
        _ => vec![json["pre_tokenizer"].clone()],
    };
    let Some((last, before)) = steps.split_last().filter(|(last, _)| last["type"] == "ByteLevel") else {
        return Err(unknown(format!("the pre-tokenizer `{}`", name_of(&json["pre_tokenizer"]))));
    };
    if last["add_prefix_space"] == true {
        return Err(unknown("a space before each text (`add_prefix_space`)"));
    }
    let uses_pattern = last["use_regex"] != false;
    let is_step = |split: &Split, step: &Value| match split {
        Split::Pattern(pattern) => {
            step["type"] == "Split"
                && step["pattern"]["Regex"] == *pattern
                && step["behavior"] == "Isolated"
                && step["invert"] != true
        }
        Split::Digits => step["type"] == "Digits" && step["individual_digits"] == true,
        Split::ByteLevel => false,
    };
    let is_of = |rule: &&Rule| {
        let (patterns, at_end) = match rule.splits.split_last() {
            Some((Split::ByteLevel, patterns)) => (patterns, true),
            _ => (rule.splits, false),
        };
        rule.ignores_merges == ignores_merges
            && at_end == uses_pattern
            && patterns.len() == before.len()
            && patterns.iter().zip(before).all(|(split, step)| is_step(split, step))
    };
    let rule = RULES.iter().find(is_of);
    rule.map(|rule| rule.pre).ok_or_else(|| {
        let pattern = before.iter().find_map(|step| step["pattern"]["Regex"].as_str());
        unknown(match pattern {
            Some(pattern) => format!("the pre-tokenizer of the pattern `{pattern}`"),
            None => format!("the pre-tokenizer `{}`", name_of(&json["pre_tokenizer"])),
        })
    })
}

fn name_of(component: &Value) -> String {
    component["type"].as_str().unwrap_or("none").to_owned()
}

/// The vocabulary of a `tokenizer.json` that was converted from a SentencePiece model. The order of its merges gives the
/// tokens' scores.
fn of_sentence_piece_json(
    json: &Value,
    mut tokens: Vec<(String, GgmlTokenKind)>,
    merges: &[(&str, &str)],
) -> Result<GgmlVocabulary, Refusal> {
    let adds_space = spaces_of(json)?;
    let unknown_token = json["model"]["unk_token"].as_str();
    let mut ids = HashMap::new();
    for (id, (text, kind)) in tokens.iter_mut().enumerate() {
        if Some(text.as_str()) == unknown_token {
            *kind = GgmlTokenKind::Unknown;
        } else if is_byte(text) {
            *kind = GgmlTokenKind::Byte;
        }
        ids.insert(text.clone(), id);
    }
    let mut scores = vec![0.0_f32; tokens.len()];
    let mut last = 0.0;
    for (rank, (left, right)) in merges.iter().enumerate() {
        let Some(&id) = ids.get(&format!("{left}{right}")) else { continue };
        if scores[id] == 0.0 {
            scores[id] = -(rank as f32 + 1.0);
        }
        // llama.cpp has one score for all merges to a token, so these have to be adjacent.
        if scores[id] > last {
            return Err(unknown("the order of merges in its `tokenizer.json`"));
        }
        last = scores[id];
    }
    Ok(GgmlVocabulary {
        model: "llama",
        pre: "default",
        tokens,
        scores: Some(scores),
        merges: None,
        adds_space: Some(adds_space),
        chat_template: None,
    })
}

/// Whether a token is a single byte, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.chars().all(|digit| digit.is_ascii_hexdigit()))
}

/// Whether texts begin with a space, if spaces are all that the tokenizer changes.
fn spaces_of(json: &Value) -> Result<bool, Refusal> {
    const SPACE: &str = "\u{2581}";
    let mut adds = false;
    let normalizer = &json["normalizer"];
    let steps = match normalizer["type"].as_str() {
        None => Vec::new(),
        Some("Sequence") => normalizer["normalizers"].as_array().cloned().unwrap_or_default(),
        Some(_) => vec![normalizer.clone()],
    };
    for step in &steps {
        match step["type"].as_str() {
            Some("Prepend") if step["prepend"] == SPACE => adds = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == SPACE => {}
            _ => return Err(unknown(format!("the normalizer `{}`", name_of(step)))),
        }
    }
    let splitter = &json["pre_tokenizer"];
    match splitter["type"].as_str() {
        None => {}
        Some("Metaspace") if splitter["replacement"] == SPACE => {
            let scheme = splitter["prepend_scheme"].as_str();
            adds |= scheme.map_or(splitter["add_prefix_space"] != false, |scheme| scheme != "never");
        }
        // There are no spaces left to split at.
        Some("Split") if splitter["pattern"]["String"] == " " => {}
        Some(_) => return Err(unknown(format!("the pre-tokenizer `{}`", name_of(splitter)))),
    }
    Ok(adds)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn byte_level(splits: Value, options: Value, ignores_merges: bool) -> Value {
        let mut last = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
        last.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let mut steps = splits.as_array().unwrap().clone();
        steps.push(last);
        json!({
            "normalizer": null,
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
            "added_tokens": [{ "id": 3, "content": "<|end|>", "special": true }],
            "model": {
                "type": "BPE", "ignore_merges": ignores_merges,
                "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": ["a b"],
            },
        })
    }

    fn split(pattern: &str) -> Value {
        json!([{ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false }])
    }

    #[test]
    fn rules_are_known_by_their_patterns() {
        let check = |json: Value, expected: Result<&str, &str>| match (of_json(&json), expected) {
            (Ok(made), Ok(pre)) => assert_eq!((made.model, made.pre), ("gpt2", pre)),
            (Err((reason, _)), Err(expected)) => assert!(reason.contains(expected), "{reason}"),
            (made, expected) => panic!("{made:?}, not {expected:?}"),
        };
        let pattern = |pre: &str| {
            let rule = RULES.iter().find(|rule| rule.pre == pre).unwrap();
            let [Split::Pattern(pattern)] = rule.splits else { panic!() };
            split(pattern)
        };
        let none = json!({});
        let with_pattern = json!({ "use_regex": true });
        check(byte_level(json!([]), with_pattern.clone(), false), Ok("gpt-2"));
        check(byte_level(pattern("llama-bpe"), none.clone(), true), Ok("llama-bpe"));
        check(byte_level(pattern("llama-bpe"), none.clone(), false), Err("p{N}{1,3}"));
        check(byte_level(pattern("qwen2"), none.clone(), false), Ok("qwen2"));
        let digits = json!([{ "type": "Digits", "individual_digits": true }]);
        check(byte_level(digits, with_pattern, false), Ok("smollm"));
        check(byte_level(split("[0-9]+"), none.clone(), false), Err("the pattern `[0-9]+`"));
        check(
            byte_level(json!([]), json!({ "use_regex": true, "add_prefix_space": true }), false),
            Err("a space"),
        );
        check(byte_level(json!([]), none, false), Err("the pre-tokenizer `Sequence`"));
        let unigram = json!({ "model": { "type": "Unigram" } });
        check(unigram, Err("the type `Unigram`"));
    }

    #[test]
    fn gaps_are_unused_and_sizes_follow_the_model() {
        let mut made = of_json(&byte_level(json!([]), json!({ "use_regex": true }), false)).unwrap();
        assert_eq!(made.tokens[3], ("<|end|>".to_owned(), GgmlTokenKind::Control));
        assert_eq!(made.merges, Some(vec!["a b".to_owned()]));
        made.resize(6);
        assert_eq!(made.tokens[5], ("[PAD5]".to_owned(), GgmlTokenKind::Unused));
        made.resize(2);
        assert_eq!(made.tokens.len(), 2);
    }

    #[test]
    fn merges_of_sentence_piece_give_scores() {
        let json = |merges: Value| {
            json!({
                "normalizer": { "type": "Sequence", "normalizers": [
                    { "type": "Prepend", "prepend": "\u{2581}" },
                    { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
                ] },
                "pre_tokenizer": null,
                "added_tokens": [{ "id": 0, "content": "<unk>", "special": true }],
                "model": {
                    "type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
                    "vocab": { "<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "ab": 4, "aba": 5, "ba": 6 },
                    "merges": merges,
                },
            })
        };
        let made = of_json(&json(json!([["a", "b"], ["b", "a"], ["ab", "a"], ["a", "ba"]]))).unwrap();
        assert_eq!((made.model, made.pre, made.adds_space), ("llama", "default", Some(true)));
        assert_eq!(made.scores.unwrap(), [0.0, 0.0, 0.0, 0.0, -1.0, -3.0, -2.0]);
        let kinds: Vec<_> = made.tokens.iter().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds[..3], [GgmlTokenKind::Unknown, GgmlTokenKind::Byte, GgmlTokenKind::Normal]);
        // Two merges to one token with another between them have no common score.
        let (reason, _) =
            of_json(&json(json!([["ab", "a"], ["b", "a"], ["a", "ba"], ["a", "b"]]))).unwrap_err();
        assert!(reason.contains("the order of merges"), "{reason}");
    }
}
