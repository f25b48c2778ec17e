//! The vocabulary without distinctions that hardly change what a token means.

use std::collections::HashMap;

use tokenizers::{
    NormalizedString, Normalizer, Result as TokenizersResult,
    normalizers::{
        Lowercase, NFD, NFKC, NormalizerWrapper, Replace, Sequence, Strip, StripAccents,
        replace::ReplacePattern,
    },
};

use super::Tokenizer;
use crate::error::Result;

/// Numbers of tokens, the same for tokens whose texts differ in case, accents, forms of characters or white space alone
/// (DeepSeek-AI, 2026, "Conditional Memory via Scalable Lookup").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressedVocabulary {
    /// The number of each token. Numbers are counted in the order in which they first occur.
    pub numbers: Vec<i32>,
    /// How many numbers there are.
    pub size: usize,
}

/// Stands for a single space while spaces around texts are removed.
const SPACE: char = '\u{e000}';

impl CompressedVocabulary {
    pub(super) fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let normalizer = normalizer().map_err(|error| tokenizer.failure("compress", error.to_string()))?;
        let mut known: HashMap<String, i32> = HashMap::new();
        let mut numbers = Vec::with_capacity(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as u32 {
            let text = tokenizer.decode(&[id], false)?;
            let key = if text.contains('\u{fffd}') {
                // A part of a character has no text of its own.
                tokenizer.token(id).unwrap_or(text)
            } else {
                let mut normalized = NormalizedString::from(text.as_str());
                normalizer
                    .normalize(&mut normalized)
                    .map_err(|error| tokenizer.failure("compress", error.to_string()))?;
                if normalized.is_empty() { text } else { normalized.get().to_owned() }
            };
            let next = known.len() as i32;
            numbers.push(*known.entry(key).or_insert(next));
        }
        Ok(Self { numbers, size: known.len() })
    }
}

fn normalizer() -> TokenizersResult<Sequence> {
    let replaced = |pattern: &str, content: &str| {
        Ok::<_, tokenizers::Error>(NormalizerWrapper::from(Replace::new(
            ReplacePattern::Regex(pattern.to_owned()),
            content.to_owned(),
        )?))
    };
    let given = SPACE.to_string();
    Ok(Sequence::new(vec![
        NFKC.into(),
        NFD.into(),
        StripAccents.into(),
        Lowercase.into(),
        replaced(r"[ \t\r\n]+", " ")?,
        replaced("^ $", &given)?,
        Strip::new(true, true).into(),
        replaced(&given, " ")?,
    ]))
}
