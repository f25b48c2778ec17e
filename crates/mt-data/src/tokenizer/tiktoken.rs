//! tiktoken's byte pair encoding: a file of ranks, a split pattern, and special tokens.

use std::cmp::Reverse;
use std::collections::HashMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use fancy_regex::Regex;

use super::merge::{Symbol, join};
use super::words::LLAMA3_PATTERN;

/// The named special tokens of Llama 3. Their ids follow the ranks, and reserved tokens follow them.
const LLAMA3_SPECIAL: [&str; 10] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
];
const LLAMA3_NUM_SPECIAL: usize = 256;
/// The longest run of white space, or of other characters. Longer runs are cut, as in Llama's tokenizer, because the
/// pattern's search would run out of memory.
const MAX_RUN: usize = 25_000;

/// A tiktoken tokenizer.
#[derive(Debug)]
pub(super) struct Tiktoken {
    ranks: HashMap<Vec<u8>, u32>,
    tokens: HashMap<u32, Vec<u8>>,
    pattern: Regex,
    special: Vec<(String, u32)>,
}

impl Tiktoken {
    /// Whether a file begins like a file of ranks.
    pub(super) fn recognizes(bytes: &[u8]) -> bool {
        let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        bytes.len() > line.len() && parse_line(line).is_some()
    }

    /// Parses a file of ranks. The default `pattern` and `special` tokens are those of Llama 3.
    pub(super) fn parse(
        bytes: &[u8],
        pattern: Option<&str>,
        special: Option<Vec<(String, u32)>>,
    ) -> Result<Self, String> {
        let (mut ranks, mut tokens) = (HashMap::new(), HashMap::new());
        for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let (token, rank) = parse_line(line)
                .ok_or_else(|| format!("its line {} is not a token in base64 and a rank", index + 1))?;
            if tokens.insert(rank, token.clone()).is_some() || ranks.insert(token, rank).is_some() {
                return Err(format!("its line {} repeats a token or a rank", index + 1));
            }
        }
        if let Some(byte) = (0..=u8::MAX).find(|byte| !ranks.contains_key([*byte].as_slice())) {
            return Err(format!("it has no token for the byte {byte:#04x}"));
        }
        let first_special = tokens.keys().max().map_or(0, |rank| *rank as usize + 1);
        let special = special.unwrap_or_else(|| llama3_special(first_special));
        if let Some((token, id)) = special.iter().find(|(_, id)| tokens.contains_key(id)) {
            return Err(format!("its special token `{token}` has the id {id}, which is a rank"));
        }
        let pattern = Regex::new(pattern.unwrap_or(LLAMA3_PATTERN))
            .map_err(|error| format!("its split pattern is not a valid regular expression: {error}"))?;
        Ok(Self { ranks, tokens, pattern, special })
    }

    /// The special tokens and their ids. No text encodes to them.
    pub(super) fn special(&self) -> &[(String, u32)] {
        &self.special
    }

    /// The largest id plus one.
    pub(super) fn len(&self) -> usize {
        let special = self.special.iter().map(|(_, id)| id);
        self.tokens.keys().chain(special).max().map_or(0, |id| *id as usize + 1)
    }

    /// The split pattern.
    pub(super) fn pattern(&self) -> &str {
        self.pattern.as_str()
    }

    /// The bytes of an ordinary token.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(&id).map(Vec::as_slice)
    }

    /// The id of a token.
    pub(super) fn id(&self, token: &str) -> Option<u32> {
        let special = self.special.iter().find(|(special, _)| special == token).map(|(_, id)| *id);
        special.or_else(|| self.ranks.get(token.as_bytes()).copied())
    }

    /// The tokens of a text, in which names of special tokens are ordinary text.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        for stretch in cut_runs(text, MAX_RUN) {
            for word in self.pattern.find_iter(stretch) {
                let word = word.map_err(|error| error.to_string())?.as_str().as_bytes();
                match self.ranks.get(word) {
                    Some(rank) => ids.push(*rank),
                    None => self.join_bytes(word, &mut ids),
                }
            }
        }
        Ok(ids)
    }

    fn join_bytes(&self, word: &[u8], ids: &mut Vec<u32>) {
        let symbol = |index| Symbol { range: index..index + 1, frozen: false };
        let cut = join((0..word.len()).map(symbol).collect(), |left, right| {
            self.ranks.get(&word[left.start..right.end]).map(|rank| Reverse(*rank))
        });
        // Every byte is a token, and so is every merged range.
        ids.extend(cut.into_iter().filter_map(|range| self.ranks.get(&word[range])));
    }
}

fn parse_line(line: &[u8]) -> Option<(Vec<u8>, u32)> {
    let line = std::str::from_utf8(line).ok()?;
    let (token, rank) = line.trim_end().split_once(' ')?;
    let token = BASE64_STANDARD.decode(token).ok().filter(|token| !token.is_empty())?;
    Some((token, rank.parse().ok()?))
}

fn llama3_special(first: usize) -> Vec<(String, u32)> {
    let num_reserved = LLAMA3_NUM_SPECIAL - LLAMA3_SPECIAL.len();
    let reserved = (5..5 + num_reserved).map(|number| format!("<|reserved_special_token_{number}|>"));
    let tokens = LLAMA3_SPECIAL.into_iter().map(str::to_string).chain(reserved);
    tokens.enumerate().map(|(index, token)| (token, (first + index) as u32)).collect()
}

/// Cuts a text after every `longest` successive characters that are all white space, or all not white space.
fn cut_runs(text: &str, longest: usize) -> Vec<&str> {
    let (mut stretches, mut start) = (Vec::new(), 0);
    let (mut length, mut is_space) = (0, false);
    for (at, character) in text.char_indices() {
        if character.is_whitespace() != is_space {
            length = 1;
            is_space = !is_space;
        } else {
            length += 1;
            if length > longest {
                stretches.push(&text[start..at]);
                start = at;
                length = 1;
            }
        }
    }
    stretches.push(&text[start..]);
    stretches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_are_cut() {
        assert_eq!(cut_runs("", 3), [""]);
        assert_eq!(cut_runs("abcd  e", 3), ["abc", "d  e"]);
        assert_eq!(cut_runs("ab    éééé", 3), ["ab   ", " ééé", "é"]);
    }

    #[test]
    fn files_of_ranks_are_recognized() {
        for (bytes, expected) in
            [("IQ== 0\n", true), ("IQ== 0", false), ("{\n", false), ("a b\n", false), ("", false)]
        {
            assert_eq!(Tiktoken::recognizes(bytes.as_bytes()), expected, "{bytes:?}");
        }
    }

    #[test]
    fn damaged_files_are_explained() {
        let bytes: String =
            (0..=u8::MAX).map(|byte| format!("{} {byte}\n", BASE64_STANDARD.encode([byte]))).collect();
        let check = |extra: &str, special: Option<Vec<(String, u32)>>, expected: &str| {
            let error = Tiktoken::parse(format!("{bytes}{extra}").as_bytes(), None, special).unwrap_err();
            assert_eq!(error, expected);
        };
        check("IQ== x\n", None, "its line 257 is not a token in base64 and a rank");
        check("YWI= 7\n", None, "its line 257 repeats a token or a rank");
        check("", Some(vec![("<eos>".into(), 3)]), "its special token `<eos>` has the id 3, which is a rank");
        let error = Tiktoken::parse(b"IQ== 0\n", None, None).unwrap_err();
        assert_eq!(error, "it has no token for the byte 0x00");
        let error = Tiktoken::parse(bytes.as_bytes(), Some("("), None).unwrap_err();
        assert!(error.starts_with("its split pattern is not a valid regular expression: "), "{error}");
        let llama = Tiktoken::parse(bytes.as_bytes(), None, None).unwrap();
        assert_eq!((llama.len(), llama.id("<|eot_id|>")), (512, Some(265)));
        assert_eq!(llama.id("<|reserved_special_token_250|>"), Some(511));
    }
}
