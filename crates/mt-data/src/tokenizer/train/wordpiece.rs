//! WordPiece, as BERT's tokenizers read it.

use serde_json::{Map, Value, json};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use super::super::bpe::added_tokens;
use super::characters::{alphabet, count, of_known};
use super::symbols::{Vocabulary, learn};
use super::{TrainingOptions, no_text, too_small};
use crate::error::Result;
use crate::watch::Watch;

/// The special tokens, in the order of their ids.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
/// The beginning of the later pieces of a word.
const CONTINUES: &str = "##";

/// The `tokenizer.json` of a model.
pub(super) fn train<I>(documents: I, options: &TrainingOptions, watch: Watch<'_>) -> Result<String>
where
    I: IntoIterator<Item = Result<String>>,
{
    let normalizer = BertNormalizer::new(true, true, None, options.lowercase);
    let divide = |text: &str, visit: &mut dyn FnMut(&str)| {
        let mut normalized = NormalizedString::from(text);
        // Neither of the two fails on any text.
        if normalizer.normalize(&mut normalized).is_ok() {
            let mut split = PreTokenizedString::from(normalized);
            if BertPreTokenizer.pre_tokenize(&mut split).is_ok() {
                let words = split.get_splits(OffsetReferential::Normalized, OffsetType::None);
                words.into_iter().filter(|(word, ..)| !word.is_empty()).for_each(|(word, ..)| visit(word));
            }
        }
    };
    let words = count(documents, divide, watch)?;
    let known = alphabet(&words, options.character_coverage);
    let words = of_known(words, &known);
    if words.is_empty() {
        return Err(no_text());
    }
    // A character continues a word unless it begins one.
    let mut pieces = std::collections::BTreeSet::new();
    for word in words.keys() {
        pieces.extend(symbols(word));
    }
    let minimum = SPECIAL.len() + pieces.len();
    if options.vocab_size < minimum {
        return Err(too_small(options, minimum));
    }
    let mut vocabulary = Vocabulary::new(SPECIAL.map(str::to_owned).into_iter().chain(pieces));
    let spelled = words.iter().map(|(word, count)| {
        (symbols(word).map(|piece| vocabulary.id(&piece).unwrap_or(1)).collect(), *count)
    });
    let spelled = spelled.collect();
    let joined =
        |left: &str, right: &str| format!("{left}{}", right.strip_prefix(CONTINUES).unwrap_or(right));
    learn(spelled, &mut vocabulary, options.vocab_size, joined, watch)?;
    Ok(file(&vocabulary.texts, options.lowercase))
}

/// The characters of a word as pieces.
fn symbols(word: &str) -> impl Iterator<Item = String> + '_ {
    word.chars().enumerate().map(|(place, character)| match place {
        0 => character.to_string(),
        _ => format!("{CONTINUES}{character}"),
    })
}

fn file(tokens: &[String], lowercase: bool) -> String {
    let vocabulary: Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let one = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let special = |name: &str, id: usize| json!({"id": name, "ids": [id], "tokens": [name]});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(&SPECIAL),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [one("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, one("[SEP]")],
            "pair": [
                one("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, one("[SEP]"),
                {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
            ],
            "special_tokens": {"[CLS]": special("[CLS]", 2), "[SEP]": special("[SEP]", 3)},
        },
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": 100, "vocab": vocabulary,
        },
    });
    let mut text = serde_json::to_string_pretty(&tokenizer).expect("strings are representable in JSON");
    text.push('\n');
    text
}
