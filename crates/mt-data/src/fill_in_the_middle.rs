//! Documents whose middle comes last, so that a model learns to fill gaps (Bavarian et al., 2022).

use crate::error::{DataError, Result};
use crate::random::{key, mix, uniform};
use crate::tokenizer::{EncodedDocument, Tokenizer};

/// The names of the marks before the prefix, the suffix and the middle in published vocabularies.
const NAMES: [[&str; 3]; 5] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<PRE>", "<SUF>", "<MID>"],
];

/// How often documents are rearranged, and the marks between their pieces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FillInTheMiddle {
    /// The share of documents that are rearranged.
    pub rate: f64,
    /// The share of these whose suffix comes first (SPM); in the others, the prefix does (PSM).
    pub suffix_first: f64,
    /// The tokens before the prefix, the suffix and the middle.
    pub marks: [i32; 3],
}

impl FillInTheMiddle {
    /// The marks of a tokenizer, or else the last three tokens of a vocabulary that the tokenizer leaves unused.
    ///
    /// # Errors
    /// There are no such tokens.
    pub fn marks(tokenizer: &Tokenizer, vocab_size: usize) -> Result<[i32; 3]> {
        for names in NAMES {
            if let [Some(prefix), Some(suffix), Some(middle)] = names.map(|name| tokenizer.token_id(name)) {
                return Ok([prefix, suffix, middle].map(|id| id as i32));
            }
        }
        if tokenizer.vocab_size() + 3 > vocab_size {
            return Err(DataError::Options(format!(
                "`fim_rate` needs marks between the pieces of a document, but the tokenizer {} has no `<|fim_prefix|>`, \
                 `<|fim_suffix|>` and `<|fim_middle|>`, and uses {} of the {vocab_size} tokens of `vocab_size`\nhint: set \
                 `vocab_size={}` or more, or use a tokenizer with such tokens",
                tokenizer.name(),
                tokenizer.vocab_size(),
                tokenizer.vocab_size() + 3
            )));
        }
        Ok([3, 2, 1].map(|behind| (vocab_size - behind) as i32))
    }

    /// The tokens of a document, rearranged if the draw for `example` says so.
    pub(crate) fn encode(
        &self,
        text: &str,
        tokenizer: &Tokenizer,
        (adds_bos, adds_eos): (bool, bool),
        (seed, example): (u64, u64),
    ) -> Result<EncodedDocument> {
        let own = key(&[seed, example, 0xf1]);
        let drawn = |number: u64| uniform(mix(own ^ number));
        if drawn(1) >= self.rate {
            return tokenizer.encode_document(text, adds_bos, adds_eos);
        }
        let cut = |number: u64| text.floor_char_boundary((drawn(number) * (text.len() + 1) as f64) as usize);
        let (first, second) = (cut(2).min(cut(3)), cut(2).max(cut(3)));
        let piece = |text: &str| match text.is_empty() {
            true => Ok(EncodedDocument::default()),
            false => tokenizer.encode_document(text, false, false),
        };
        let [prefix, middle, suffix] = [&text[..first], &text[first..second], &text[second..]].map(piece);
        let (prefix, middle, suffix) = (prefix?, middle?, suffix?);
        let [before_prefix, before_suffix, before_middle] = self.marks;
        let mut whole = EncodedDocument::default();
        let mut add = |tokens: &[i32], bytes: &[u32]| {
            whole.tokens.extend_from_slice(tokens);
            whole.bytes.extend_from_slice(bytes);
        };
        if let Some(bos) = tokenizer.special().bos.filter(|_| adds_bos) {
            add(&[bos as i32], &[0]);
        }
        if drawn(4) < self.suffix_first {
            add(&[before_prefix, before_suffix], &[0, 0]);
            add(&suffix.tokens, &suffix.bytes);
            add(&[before_middle], &[0]);
            add(&prefix.tokens, &prefix.bytes);
        } else {
            add(&[before_prefix], &[0]);
            add(&prefix.tokens, &prefix.bytes);
            add(&[before_suffix], &[0]);
            add(&suffix.tokens, &suffix.bytes);
            add(&[before_middle], &[0]);
        }
        add(&middle.tokens, &middle.bytes);
        if let Some(eos) = tokenizer.special().eos.filter(|_| adds_eos) {
            add(&[eos as i32], &[0]);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "So rested he by the Tumtum tree — and stood awhile in thought.";

    /// The text of a rearranged document, and whether the suffix comes first.
    fn restored(tokens: &[i32], marks: [i32; 3]) -> (String, bool) {
        let tokenizer = Tokenizer::bytes();
        let decode = |tokens: &[i32]| {
            let ids: Vec<u32> = tokens.iter().map(|id| id.cast_unsigned()).collect();
            tokenizer.decode(&ids, true).unwrap()
        };
        let place = |mark: i32| tokens.iter().position(|token| *token == mark).unwrap();
        let [prefix, suffix, middle] = marks.map(place);
        assert!(prefix < suffix && suffix < middle);
        let is_suffix_first = suffix == prefix + 1 && middle > suffix;
        let between = [&tokens[prefix + 1..suffix], &tokens[suffix + 1..middle], &tokens[middle + 1..]];
        let [first, second, third] = between.map(decode);
        match first.is_empty() {
            // Prefix and middle follow one another behind the last mark.
            true => (third + &second, is_suffix_first),
            false => (first + &third + &second, false),
        }
    }

    #[test]
    fn rearranged_documents_hold_the_whole_text() {
        let tokenizer = Tokenizer::bytes();
        let marks = FillInTheMiddle::marks(&tokenizer, 300).unwrap();
        assert_eq!(marks, [297, 298, 299]);
        let fim = FillInTheMiddle { rate: 0.7, suffix_first: 0.5, marks };
        let (mut rearranged, mut suffix_first) = (0, 0);
        for example in 0..400 {
            let document = fim.encode(TEXT, &tokenizer, (true, true), (1, example)).unwrap();
            assert_eq!(document.bytes.iter().sum::<u32>() as usize, TEXT.len());
            assert_eq!((document.tokens[0], document.tokens[document.tokens.len() - 1]), (1, 2));
            if document.tokens.contains(&marks[0]) {
                let (text, is_first) = restored(&document.tokens, marks);
                assert_eq!(text, TEXT);
                rearranged += 1;
                suffix_first += u32::from(is_first);
            } else {
                assert_eq!(document, tokenizer.encode_document(TEXT, true, true).unwrap());
            }
            assert_eq!(document, fim.encode(TEXT, &tokenizer, (true, true), (1, example)).unwrap());
        }
        assert!(
            (240..320).contains(&rearranged) && (100..180).contains(&suffix_first),
            "{rearranged} {suffix_first}"
        );
        let message = FillInTheMiddle::marks(&tokenizer, 260).unwrap_err().to_string();
        assert!(message.contains("`vocab_size=262`"), "{message}");
    }
}
