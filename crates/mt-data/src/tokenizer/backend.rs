//! The implementation that turns text into tokens: one kind of tokenizer, and its added tokens.

use std::collections::HashMap;

use super::hugging_face::HuggingFace;
use super::sentencepiece::{SentencePiece, SentencePieceToken};
use super::tiktoken::Tiktoken;
use super::trie::ByteTrie;

/// A kind of tokenizer with its vocabulary.
pub(super) enum Backend {
    HuggingFace(Box<HuggingFace>),
    SentencePiece(Box<SentencePiece>, AddedTokens),
    Tiktoken(Box<Tiktoken>, AddedTokens),
}

/// A token outside the model's vocabulary, or one of its tokens that no text encodes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedToken {
    pub text: String,
    pub id: u32,
    /// Whether decoded text omits it.
    pub is_special: bool,
}

/// Tokens that are searched in a text before the model encodes the text between them.
pub(super) struct AddedTokens {
    by_id: HashMap<u32, AddedToken>,
    by_text: ByteTrie,
    /// Whether a token begins with each byte.
    begins: [bool; 256],
}

impl AddedTokens {
    pub(super) fn new(tokens: Vec<AddedToken>) -> Self {
        let entries = tokens.iter().map(|token| (token.text.as_bytes(), token.id)).collect();
        let by_text = ByteTrie::new(entries);
        let mut begins = [false; 256];
        for first in tokens.iter().filter_map(|token| token.text.bytes().next()) {
            begins[usize::from(first)] = true;
        }
        Self { by_text, begins, by_id: tokens.into_iter().map(|token| (token.id, token)).collect() }
    }

    /// The text of an added token.
    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.by_id.get(&id).map(|token| token.text.as_str())
    }

    /// Whether decoded text omits a token.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.by_id.get(&id).is_some_and(|token| token.is_special)
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.by_id.values().find(|token| token.text == text).map(|token| token.id)
    }

    fn last_id(&self) -> Option<u32> {
        self.by_id.keys().max().copied()
    }

    /// Splits a text at its added tokens. Each pair is a stretch of text and the added token that follows it.
    pub(super) fn split<'a>(&self, text: &'a str) -> Vec<(&'a str, Option<u32>)> {
        let (mut stretches, mut start, mut at) = (Vec::new(), 0, 0);
        let bytes = text.as_bytes();
        while let Some(next) = bytes[at..].iter().position(|byte| self.begins[usize::from(*byte)]) {
            at += next;
            match self.by_text.longest_prefix(&bytes[at..]) {
                Some((length, id)) => {
                    stretches.push((&text[start..at], Some(id)));
                    at += length;
                    start = at;
                }
                None => at += 1,
            }
        }
        stretches.push((&text[start..], None));
        stretches
    }
}

/// A token and the offset at which it ends in the text.
pub(super) type Token = (u32, usize);

impl Backend {
    /// The token ids of a text, without BOS and EOS.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.encode(text),
            Self::SentencePiece(model, _) => Ok(model.encode(text).into_iter().map(|(id, _)| id).collect()),
            Self::Tiktoken(model, _) => model.encode(text),
        }
    }

    /// Calls `visit` with each token of [`Backend::encode`] and the offset at which it ends. Byte tokens of one
    /// character may end at the same offset, and offsets may omit white space.
    pub(super) fn for_each_token(&self, text: &str, mut visit: impl FnMut(Token)) -> Result<(), String> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.for_each_token(text, visit)?,
            Self::SentencePiece(model, _) => model.encode(text).into_iter().for_each(visit),
            Self::Tiktoken(model, _) => {
                let mut end = 0;
                for id in model.encode(text)? {
                    end += model.bytes(id).map_or(0, <[u8]>::len);
                    visit((id, text.ceil_char_boundary(end)));
                }
            }
        }
        Ok(())
    }

    /// [`Backend::encode`], except that the text of a special token encodes to that token.
    pub(super) fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        self.for_each_token_with_special(text, |(id, _)| ids.push(id))?;
        Ok(ids)
    }

    /// [`Backend::for_each_token`], except that the text of a special token encodes to that token.
    pub(super) fn for_each_token_with_special(
        &self,
        text: &str,
        mut visit: impl FnMut(Token),
    ) -> Result<(), String> {
        let added = match self {
            Self::HuggingFace(_) => return self.for_each_token(text, visit),
            Self::SentencePiece(_, added) | Self::Tiktoken(_, added) => added,
        };
        let mut start = 0;
        for (stretch, token) in added.split(text) {
            if !stretch.is_empty() {
                self.for_each_token(stretch, |(id, end)| visit((id, start + end)))?;
            }
            start += stretch.len();
            if let Some(id) = token {
                start += added.by_id.get(&id).map_or(0, |token| token.text.len());
                visit((id, start));
            }
        }
        Ok(())
    }

    /// The text of tokens. Bytes that form no character become U+FFFD.
    pub(super) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, String> {
        let is_seen = |token: &&AddedToken| !(token.is_special && skip_special_tokens);
        match self {
            Self::HuggingFace(tokenizer) => {
                tokenizer.inner.decode(ids, skip_special_tokens).map_err(|error| error.to_string())
            }
            Self::SentencePiece(model, added) => {
                let tokens = ids.iter().filter_map(|id| match added.by_id.get(id) {
                    Some(token) => {
                        Some(token).filter(is_seen).map(|token| SentencePieceToken::Literal(&token.text))
                    }
                    None => model.piece(*id).map(|_| SentencePieceToken::Id(*id)),
                });
                Ok(model.decode(tokens))
            }
            Self::Tiktoken(model, added) => {
                let mut bytes = Vec::new();
                for id in ids {
                    match added.by_id.get(id) {
                        Some(token) => bytes.extend(
                            Some(token).filter(is_seen).into_iter().flat_map(|token| token.text.bytes()),
                        ),
                        None => bytes.extend_from_slice(model.bytes(*id).unwrap_or_default()),
                    }
                }
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }

    /// The token as the vocabulary spells it.
    pub(super) fn token(&self, id: u32) -> Option<String> {
        let (added, own) = match self {
            Self::HuggingFace(tokenizer) => return tokenizer.inner.id_to_token(id),
            Self::SentencePiece(model, added) => (added, model.piece(id).map(str::to_string)),
            Self::Tiktoken(model, added) => {
                (added, model.bytes(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
            }
        };
        added.by_id.get(&id).map(|token| token.text.clone()).or(own)
    }

    /// The id of a token as the vocabulary spells it.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.inner.token_to_id(token),
            Self::SentencePiece(model, added) => added.id(token).or_else(|| model.id(token)),
            Self::Tiktoken(model, added) => added.id(token).or_else(|| model.id(token)),
        }
    }

    /// The largest id plus one.
    pub(super) fn vocab_size(&self) -> usize {
        let (own, added) = match self {
            Self::HuggingFace(tokenizer) => {
                return tokenizer.inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
            }
            Self::SentencePiece(model, added) => (model.len(), added),
            Self::Tiktoken(model, added) => (model.len(), added),
        };
        own.max(added.last_id().map_or(0, |id| id as usize + 1))
    }
}
