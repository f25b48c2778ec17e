//! The text of an answer as its tokens arrive: whole characters, and nothing beyond a stop string.

use std::sync::Arc;

use mt_data::{DecodeStream, Tokenizer};

use crate::error::Result;

/// The text of one answer.
pub struct AnswerText {
    stream: DecodeStream,
    stops: StopStrings,
    /// The number of tokens whose text ends no answer.
    min_tokens: usize,
    num_tokens: usize,
}

impl AnswerText {
    /// The text of an answer after a prompt, whose last tokens may affect the text of the answer's first ones. Stop strings
    /// that end within the first `min_tokens` tokens do not count.
    pub fn after(
        prompt: &[u32],
        tokenizer: &Arc<Tokenizer>,
        skip_special: bool,
        stops: StopStrings,
        min_tokens: usize,
    ) -> Self {
        let mut stream = DecodeStream::new(tokenizer.clone(), skip_special);
        // A few tokens suffice as context, because decoders look at the beginning of a text alone.
        for token in &prompt[prompt.len().saturating_sub(8)..] {
            // Unknown tokens of the prompt were refused before.
            let _ = stream.push(*token);
        }
        let _ = stream.finish();
        Self { stream, stops, min_tokens, num_tokens: 0 }
    }

    /// Adds a token. Returns the text that is certain now, and whether a stop string ends the answer.
    ///
    /// # Errors
    /// The tokenizer does not have the token.
    pub fn push(&mut self, token: u32) -> Result<(String, bool)> {
        let text = self.stream.push(token)?;
        self.num_tokens += 1;
        Ok(self.stops.push(&text, self.num_tokens > self.min_tokens))
    }

    /// The text that was held back.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn finish(&mut self) -> Result<String> {
        let last = self.stream.finish()?;
        let (mut text, ended) = self.stops.push(&last, self.num_tokens > self.min_tokens);
        if !ended {
            text += &self.stops.release();
        }
        Ok(text)
    }

    /// The stop string that has occurred.
    pub fn found_stop(&self) -> Option<&str> {
        self.stops.found.as_deref()
    }
}

/// Searches stop strings in a text that arrives in pieces. Text that may begin a stop string is held back.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Whether a stop string belongs to the answer.
    keep: bool,
    held: String,
    ended: bool,
    /// The stop string that has occurred.
    found: Option<String>,
}

impl StopStrings {
    pub fn new(stops: Vec<String>, keep: bool) -> Self {
        Self { stops, keep, ..Self::default() }
    }

    /// Adds text. Returns the text that belongs to the answer for certain, and whether a stop string has occurred, after
    /// which no more text does. Unless the text `counts`, stop strings that end in it are text like any other.
    pub fn push(&mut self, text: &str, counts: bool) -> (String, bool) {
        if self.ended || self.stops.is_empty() {
            return (if self.ended { String::new() } else { text.to_owned() }, self.ended);
        }
        self.held += text;
        let starts = self.stops.iter().filter_map(|stop| self.held.find(stop).map(|at| (at, stop)));
        // The shortest of the stop strings that begin at the same place counts.
        let first = starts.filter(|_| counts).min_by_key(|(at, stop)| (*at, stop.len()));
        if let Some((at, stop)) = first {
            let length = stop.len();
            self.found = Some(stop.clone());
            self.held.truncate(if self.keep { at + length } else { at });
            self.ended = true;
            return (std::mem::take(&mut self.held), true);
        }
        let held = self.stops.iter().map(|stop| length_of_begun(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - held);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The text that was held back, when no more will follow.
    pub fn release(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The length of the longest end of `text` that begins `mark` without completing it.
pub fn length_of_begun(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len().saturating_sub(1));
    let begins = |length: &usize| {
        let start = text.len() - length;
        text.is_char_boundary(start) && mark.as_bytes().starts_with(&text.as_bytes()[start..])
    };
    (1..=longest).rev().find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(stops: &[&str], keep: bool, pieces: &[&str], expected: &[&str], ends: bool) {
        let mut search = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), keep);
        let mut ended = false;
        let mut found: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let (text, end) = search.push(piece, true);
                ended = end;
                text
            })
            .collect();
        found.push(search.release());
        assert_eq!(found, expected);
        assert_eq!(ended, ends);
    }

    #[test]
    fn stop_strings_are_found_across_pieces() {
        check(&[], false, &["a", "b"], &["a", "b", ""], false);
        check(&["END"], false, &["one E", "N", "D two", "three"], &["one ", "", "", "", ""], true);
        check(&["END"], false, &["one E", "N", "x"], &["one ", "", "ENx", ""], false);
        check(&["END"], true, &["one E", "ND two"], &["one ", "END", ""], true);
        check(&["END"], false, &["one EN"], &["one ", "EN"], false);
        check(&["aab"], false, &["aa", "ab"], &["", "a", ""], true);
        check(&["xyz", "y"], false, &["xy", "z"], &["x", "", ""], true);
        check(&["é!"], false, &["caf", "é", "?"], &["caf", "", "é?", ""], false);
    }

    #[test]
    fn stop_strings_within_the_first_tokens_are_text() {
        let tokenizer = Arc::new(Tokenizer::bytes());
        for (min_tokens, expected) in [(0, "a"), (2, "a"), (3, "a--b"), (5, "a--b"), (6, "a--b--")] {
            let stops = StopStrings::new(vec!["--".to_owned()], false);
            let mut answer = AnswerText::after(&[1], &tokenizer, true, stops, min_tokens);
            let mut made = String::new();
            for token in tokenizer.encode("a--b--", false, false).unwrap() {
                let (new, ends) = answer.push(token).unwrap();
                made += &new;
                if ends {
                    break;
                }
            }
            let is_found = answer.found_stop() == Some("--");
            made += &answer.finish().unwrap();
            assert_eq!((made.as_str(), is_found), (expected, min_tokens < 6), "{min_tokens}");
        }
    }

    /// The answer up to the first stop string of a whole text.
    fn cut<'a>(text: &'a str, stops: &[String]) -> &'a str {
        let end = stops.iter().filter_map(|stop| text.find(stop)).min();
        &text[..end.unwrap_or(text.len())]
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let mut search = StopStrings::new(stops.clone(), false);
            let mut text = String::new();
            let mut ended = false;
            // Generation ends with the first piece that completes a stop string.
            let mut read = String::new();
            for piece in &pieces {
                read += piece;
                let (new, end) = search.push(piece, true);
                text += &new;
                ended = end;
                if end {
                    break;
                }
            }
            if !ended {
                text += &search.release();
            }
            prop_assert_eq!(text, cut(&read, &stops));
        }

        #[test]
        fn characters_are_whole(text in "\\PC{0,20}") {
            let tokenizer = Arc::new(Tokenizer::bytes());
            let mut answer = AnswerText::after(&[1], &tokenizer, true, StopStrings::default(), 0);
            let mut joined = String::new();
            for token in tokenizer.encode(&text, false, false).unwrap() {
                let (new, _) = answer.push(token).unwrap();
                let is_broken = new.contains(char::REPLACEMENT_CHARACTER) && !text.contains(char::REPLACEMENT_CHARACTER);
                prop_assert!(!is_broken);
                joined += &new;
            }
            joined += &answer.finish().unwrap();
            prop_assert_eq!(joined, text);
        }
    }
}
