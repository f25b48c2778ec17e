//! The bytes of single tokens.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::backend::Backend;
use super::bpe::byte_characters;
use super::hugging_face::HuggingFace;
use super::sentencepiece::byte_of;

/// The character that stands for a space in SentencePiece's vocabularies.
const SPACE: &str = "\u{2581}";

/// The bytes for which the characters of byte-level vocabularies stand.
static BYTES: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| byte_characters().into_iter().zip(0..=u8::MAX).collect());

impl Backend {
    /// The bytes that a token adds to a text; those of its name for a special token.
    pub(super) fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer.token_bytes(id),
            Self::SentencePiece(model, added) => match added.text(id) {
                Some(text) => Some(text.as_bytes().to_vec()),
                None => model.piece(id).map(piece_bytes),
            },
            Self::Tiktoken(model, added) => match added.text(id) {
                Some(text) => Some(text.as_bytes().to_vec()),
                None => model.bytes(id).map(<[u8]>::to_vec),
            },
        }
    }

    /// Whether decoding with `skip_special_tokens` omits a token.
    pub(super) fn is_special(&self, id: u32) -> bool {
        match self {
            Self::HuggingFace(tokenizer) => tokenizer
                .inner
                .get_added_vocabulary()
                .get_added_tokens_decoder()
                .get(&id)
                .is_some_and(|token| token.special),
            Self::SentencePiece(_, added) | Self::Tiktoken(_, added) => added.is_special(id),
        }
    }
}

impl HuggingFace {
    fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.inner.id_to_token(id)?;
        if self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id) {
            return Some(token.into_bytes());
        }
        Some(match self.spelling {
            Spelling::ByteLevel => {
                // A character outside the alphabet stands for itself, as in the library's decoder.
                let bytes: Option<Vec<u8>> = token.chars().map(|c| BYTES.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.into_bytes())
            }
            Spelling::SentencePiece => piece_bytes(&token),
            Spelling::Decoded => self.inner.decode(&[id], false).ok()?.into_bytes(),
        })
    }
}

/// How the tokens of a `tokenizer.json` are spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each character stands for a byte.
    ByteLevel,
    /// Spaces are `▁`, and `<0x0A>` is a byte.
    SentencePiece,
    /// As the tokenizer's decoder reads single tokens.
    Decoded,
}

impl Spelling {
    /// The spelling that a tokenizer's decoder reads.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_string(decoder).ok());
        let decoder = decoder.unwrap_or_default();
        if decoder.contains("\"ByteLevel\"") {
            Self::ByteLevel
        } else if decoder.contains(SPACE) || decoder.contains("\"ByteFallback\"") {
            Self::SentencePiece
        } else {
            Self::Decoded
        }
    }
}

/// The bytes of a piece of SentencePiece's spelling.
fn piece_bytes(piece: &str) -> Vec<u8> {
    match byte_of(piece) {
        Some(byte) => vec![byte],
        None => piece.replace(SPACE, " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;

    #[track_caller]
    fn check(tokenizer: &Tokenizer, text: &str) {
        let tokens = tokenizer.encode(text, false, false).unwrap();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| tokenizer.token_bytes(*token).unwrap()).collect();
        assert_eq!(bytes, text.as_bytes());
    }

    #[test]
    fn bytes_of_tokens_join_to_the_text() {
        let bytes = Tokenizer::bytes();
        check(&bytes, "Grüße,\n漢字 ❤\t end");
        assert_eq!(bytes.token_bytes(0).unwrap(), b"<|pad|>");
        assert!(bytes.is_special(2) && !bytes.is_special(3));
        assert_eq!(bytes.token_bytes(259), None);
        assert_eq!(bytes.token_bytes(3).unwrap(), [0]);
    }
}
