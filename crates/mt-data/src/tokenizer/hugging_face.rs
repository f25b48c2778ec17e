//! Tokenizers from a `tokenizer.json`. The tokenizers library uses about a hundred bytes of memory per token while it
//! encodes a text, so long documents are encoded in pieces, and the byte tokenizer bypasses the library.

use std::collections::HashSet;

use rayon::prelude::*;
use tokenizers::{Encoding, PreTokenizerWrapper};

use super::BYTE_LEVEL_SPECIAL_TOKENS;
use super::backend::{AddedToken, AddedTokens, Token};
use super::bpe::byte_level_json;
use super::pieces::pieces;
use super::token_bytes::Spelling;

/// Pieces of one document that are encoded in parallel.
const GROUP: usize = 64;

pub(super) struct HuggingFace {
    pub(super) inner: tokenizers::Tokenizer,
    encoding: HowEncoded,
    pub(super) spelling: Spelling,
}

enum HowEncoded {
    /// Texts are encoded whole, because the ends of words are unknown.
    Whole,
    /// Words are those of the byte-level pattern. No piece begins with a character that occurs in an added token.
    InPieces(HashSet<char>),
    /// The built-in tokenizer: each byte is a token, whose id follows those of the special tokens.
    AsBytes(AddedTokens),
}

impl HuggingFace {
    /// The tokenizer `inner`, which was read from `file`.
    pub(super) fn new(inner: tokenizers::Tokenizer, file: &[u8]) -> Self {
        let added = inner.get_added_tokens_decoder();
        let cuts_by_pattern = match (inner.get_normalizer(), inner.get_pre_tokenizer()) {
            (None, Some(PreTokenizerWrapper::ByteLevel(byte_level))) => {
                byte_level.use_regex && !byte_level.add_prefix_space
            }
            _ => false,
        };
        let encoding = if file == byte_level_json(&BYTE_LEVEL_SPECIAL_TOKENS, &[]).as_bytes() {
            let token = |(id, text): (usize, &&str)| AddedToken {
                text: (*text).to_owned(),
                id: id as u32,
                is_special: true,
            };
            HowEncoded::AsBytes(AddedTokens::new(
                BYTE_LEVEL_SPECIAL_TOKENS.iter().enumerate().map(token).collect(),
            ))
        } else if cuts_by_pattern && !added.values().any(|token| token.lstrip || token.rstrip) {
            HowEncoded::InPieces(added.values().flat_map(|token| token.content.chars()).collect())
        } else {
            HowEncoded::Whole
        };
        let spelling = Spelling::of(&inner);
        Self { inner, encoding, spelling }
    }

    /// The token ids of a text.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        if let HowEncoded::AsBytes(added) = &self.encoding {
            as_bytes(added, text, |(id, _)| ids.push(id));
            return Ok(ids);
        }
        let encode = |piece: &str| self.inner.encode_fast(piece, false);
        self.in_pieces(text, encode, |encoding, _| ids.extend_from_slice(encoding.get_ids()))?;
        Ok(ids)
    }

    /// Calls `visit` with each token of a text, in order.
    pub(super) fn for_each_token(&self, text: &str, mut visit: impl FnMut(Token)) -> Result<(), String> {
        if let HowEncoded::AsBytes(added) = &self.encoding {
            as_bytes(added, text, visit);
            return Ok(());
        }
        let encode = |piece: &str| self.inner.encode(piece, false);
        self.in_pieces(text, encode, |encoding, start| {
            let ends = encoding.get_offsets().iter().map(|(_, end)| start + end);
            encoding.get_ids().iter().copied().zip(ends).for_each(&mut visit);
        })
    }

    /// Encodes a text, in pieces if it is long, and calls `visit` with the encoding and the offset of each piece.
    fn in_pieces(
        &self,
        text: &str,
        encode: impl Fn(&str) -> tokenizers::Result<Encoding> + Sync,
        mut visit: impl FnMut(&Encoding, usize),
    ) -> Result<(), String> {
        let pieces: Vec<&str> = match &self.encoding {
            HowEncoded::InPieces(taken) => pieces(text, |first| !taken.contains(&first)).collect(),
            _ => vec![text],
        };
        let mut start = 0;
        for group in pieces.chunks(GROUP) {
            let encodings: Vec<_> = match group {
                [piece] => vec![encode(piece)],
                group => group.par_iter().map(|piece| encode(piece)).collect(),
            };
            for (piece, encoding) in group.iter().zip(encodings) {
                visit(&encoding.map_err(|error| error.to_string())?, start);
                start += piece.len();
            }
        }
        Ok(())
    }
}

/// The tokens of the built-in tokenizer. As in the tokenizers library, each byte of a character ends where the
/// character does.
fn as_bytes(added: &AddedTokens, text: &str, mut visit: impl FnMut(Token)) {
    let first_byte = BYTE_LEVEL_SPECIAL_TOKENS.len() as u32;
    let mut end = 0;
    for (stretch, token) in added.split(text) {
        for character in stretch.chars() {
            end += character.len_utf8();
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                visit((first_byte + u32::from(byte), end));
            }
        }
        if let Some(id) = token {
            end += BYTE_LEVEL_SPECIAL_TOKENS[id as usize].len();
            visit((id, end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a text according to the tokenizers library.
    fn whole(tokenizer: &HuggingFace, text: &str) -> Vec<Token> {
        let encoding = tokenizer.inner.encode(text, false).unwrap();
        let ends = encoding.get_offsets().iter().map(|(_, end)| *end);
        encoding.get_ids().iter().copied().zip(ends).collect()
    }

    #[track_caller]
    fn check(tokenizer: &HuggingFace, text: &str) {
        let expected = whole(tokenizer, text);
        let mut tokens = Vec::new();
        tokenizer.for_each_token(text, |token| tokens.push(token)).unwrap();
        assert!(tokens == expected, "{} tokens instead of {}", tokens.len(), expected.len());
        let ids: Vec<u32> = expected.into_iter().map(|(id, _)| id).collect();
        assert!(tokenizer.encode(text).unwrap() == ids);
    }

    fn tokenizer(merges: &[(&str, &str)]) -> HuggingFace {
        let merges: Vec<_> =
            merges.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect();
        let json = byte_level_json(&BYTE_LEVEL_SPECIAL_TOKENS, &merges);
        HuggingFace::new(json.parse().unwrap(), json.as_bytes())
    }

    const TEXT: &str =
        "Grüße,\n\n  Jürgen ❤ — it's 漢字。かな\t12 <|end_of_text|> <|pad| naïve\r\nfn main() {}  \u{fffd} ";

    #[test]
    fn bytes_are_those_of_the_library() {
        let tokenizer = tokenizer(&[]);
        assert!(matches!(tokenizer.encoding, HowEncoded::AsBytes(_)));
        check(&tokenizer, "");
        check(&tokenizer, TEXT);
        check(&tokenizer, "<|pad|><|pad|>x<|begin_of_text|>");
    }

    #[test]
    fn pieces_are_those_of_the_whole() {
        let tokenizer = tokenizer(&[("Ġ", "J"), ("i", "t"), ("a", "i"), ("Ġ", "Ġ")]);
        assert!(matches!(tokenizer.encoding, HowEncoded::InPieces(_)));
        check(&tokenizer, TEXT);
        check(&tokenizer, &TEXT.repeat(6000));
        check(&tokenizer, &"it's<|pad|>".repeat(40_000));
        check(&tokenizer, &"漢字。".repeat(40_000));
        check(&tokenizer, &" \n".repeat(100_000));
    }
}
