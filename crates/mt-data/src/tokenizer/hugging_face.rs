//! Tokenizers from a `tokenizer.json`. Byte-level models are encoded here, and so is the byte tokenizer; the tokenizers library
//! encodes the texts of the others.

use super::BYTE_LEVEL_SPECIAL_TOKENS;
use super::backend::{AddedToken, AddedTokens, Token};
use super::bpe::byte_level_json;
use super::byte_level::{ByteLevel, bpe};
use super::token_bytes::Spelling;

pub(super) struct HuggingFace {
    pub(super) inner: tokenizers::Tokenizer,
    encoding: HowEncoded,
    pub(super) spelling: Spelling,
}

enum HowEncoded {
    ByLibrary,
    /// By merges of bytes. The library encodes the texts that it would normalize.
    ByteLevel(Box<ByteLevel>),
    /// The built-in tokenizer: each byte is a token, whose id follows those of the special tokens.
    AsBytes(Box<AddedTokens>),
}

impl HuggingFace {
    /// The tokenizer `inner`, which was read from `file`.
    pub(super) fn new(inner: tokenizers::Tokenizer, file: &[u8]) -> Self {
        let encoding = if file == byte_level_json(&BYTE_LEVEL_SPECIAL_TOKENS, &[]).as_bytes() {
            let token = |(id, text): (usize, &&str)| AddedToken {
                text: (*text).to_owned(),
                id: id as u32,
                is_special: true,
            };
            let tokens = BYTE_LEVEL_SPECIAL_TOKENS.iter().enumerate().map(token).collect();
            HowEncoded::AsBytes(Box::new(AddedTokens::new(tokens)))
        } else if let Some(byte_level) = ByteLevel::of(&inner, file) {
            HowEncoded::ByteLevel(Box::new(byte_level))
        } else {
            HowEncoded::ByLibrary
        };
        let spelling = Spelling::of(&inner);
        Self { inner, encoding, spelling }
    }

    /// The token ids of a text.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        if self.for_each_here(text, |id, _| ids.push(id))? {
            return Ok(ids);
        }
        let encoding = self.inner.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Calls `visit` with each token of a text, in order.
    pub(super) fn for_each_token(&self, text: &str, mut visit: impl FnMut(Token)) -> Result<(), String> {
        let mut end = 0;
        // As in the tokenizers library, each byte of a character ends where the character does.
        let is_encoded = self.for_each_here(text, |id, length| {
            end += length;
            visit((id, text.ceil_char_boundary(end)));
        })?;
        if !is_encoded {
            let encoding = self.inner.encode(text, false).map_err(|error| error.to_string())?;
            let ends = encoding.get_offsets().iter().map(|(_, end)| *end);
            encoding.get_ids().iter().copied().zip(ends).for_each(&mut visit);
        }
        Ok(())
    }

    /// Calls `visit` with each token of a text and the number of its bytes, and returns true, unless the library has to encode
    /// the text.
    fn for_each_here(&self, text: &str, visit: impl FnMut(u32, usize)) -> Result<bool, String> {
        match (&self.encoding, bpe(&self.inner)) {
            (HowEncoded::AsBytes(added), _) => {
                as_bytes(added, text, visit);
                Ok(true)
            }
            (HowEncoded::ByteLevel(byte_level), Some(model)) => byte_level.for_each(model, text, visit),
            _ => Ok(false),
        }
    }
}

/// The tokens of the built-in tokenizer, with the number of their bytes.
fn as_bytes(added: &AddedTokens, text: &str, mut visit: impl FnMut(u32, usize)) {
    let first_byte = BYTE_LEVEL_SPECIAL_TOKENS.len() as u32;
    for (stretch, token) in added.split(text) {
        stretch.bytes().for_each(|byte| visit(first_byte + u32::from(byte), 1));
        if let Some(id) = token {
            visit(id, BYTE_LEVEL_SPECIAL_TOKENS[id as usize].len());
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
    fn long_texts_have_the_tokens_of_the_library() {
        let tokenizer = tokenizer(&[("Ġ", "J"), ("i", "t"), ("a", "i"), ("Ġ", "Ġ")]);
        assert!(matches!(tokenizer.encoding, HowEncoded::ByteLevel(_)));
        check(&tokenizer, TEXT);
        check(&tokenizer, &TEXT.repeat(6000));
        check(&tokenizer, &"it's<|pad|>".repeat(40_000));
        check(&tokenizer, &"漢字。".repeat(40_000));
        check(&tokenizer, &" \n".repeat(100_000));
    }
}
