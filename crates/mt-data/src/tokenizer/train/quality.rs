//! How well a tokenizer suits a text.

use std::collections::HashSet;

use rayon::prelude::*;

use super::super::Tokenizer;
use crate::error::Result;

/// Documents that are measured in parallel.
const CHUNK: usize = 256;

/// Counts of a text and its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TokenizerQuality {
    pub documents: u64,
    pub bytes: u64,
    pub characters: u64,
    /// Words between spaces.
    pub words: u64,
    pub tokens: u64,
    /// The tokens that spell a character by bytes, although it is no single byte, or stand for an unknown one.
    pub uncovered_tokens: u64,
    /// The tokens of the vocabulary that occur.
    pub used: u64,
    pub vocab_size: u64,
}

impl TokenizerQuality {
    /// The tokens of a word.
    pub fn fertility(&self) -> f64 {
        self.tokens as f64 / (self.words as f64).max(1.0)
    }

    /// The bytes of text of a token.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes as f64 / (self.tokens as f64).max(1.0)
    }

    /// The share of tokens that hold text as such.
    pub fn coverage(&self) -> f64 {
        1.0 - self.uncovered_tokens as f64 / (self.tokens as f64).max(1.0)
    }

    /// Measures a tokenizer on documents, up to a number of bytes.
    ///
    /// # Errors
    /// A document cannot be read or tokenized.
    pub fn measure(
        tokenizer: &Tokenizer,
        documents: impl IntoIterator<Item = Result<String>>,
        most_bytes: u64,
    ) -> Result<Self> {
        let mut found = Self { vocab_size: tokenizer.vocab_size() as u64, ..Self::default() };
        let is_uncovered: Vec<bool> =
            (0..tokenizer.vocab_size() as u32).map(|id| is_uncovered(tokenizer, id)).collect();
        let mut used = HashSet::new();
        let mut documents = documents.into_iter();
        while found.bytes < most_bytes {
            let chunk = documents.by_ref().take(CHUNK).collect::<Result<Vec<String>>>()?;
            if chunk.is_empty() {
                break;
            }
            let encoded = chunk.par_iter().map(|text| tokenizer.encode(text, false, false));
            for (text, ids) in chunk.iter().zip(encoded.collect::<Vec<_>>()) {
                let ids = ids?;
                found.documents += 1;
                found.bytes += text.len() as u64;
                found.characters += text.chars().count() as u64;
                found.words += text.split_whitespace().count() as u64;
                found.tokens += ids.len() as u64;
                found.uncovered_tokens += ids.iter().filter(|id| is_uncovered[**id as usize]).count() as u64;
                used.extend(ids);
            }
        }
        found.used = used.len() as u64;
        Ok(found)
    }
}

/// Whether a token is a byte of a longer character, or stands for unknown text.
fn is_uncovered(tokenizer: &Tokenizer, id: u32) -> bool {
    let name = tokenizer.token(id).unwrap_or_default();
    let is_byte = name.len() == 6 && name.starts_with("<0x") && name.ends_with('>');
    let is_unknown = matches!(name.as_str(), "<unk>" | "[UNK]");
    let is_part = tokenizer.token_bytes(id).is_some_and(|bytes| std::str::from_utf8(&bytes).is_err());
    is_byte || is_unknown || is_part
}
