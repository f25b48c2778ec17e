//! Text from tokens as they come.

use std::sync::Arc;

use super::Tokenizer;
use crate::error::Result;

/// Decodes token by token without ever showing half a character.
///
/// The pieces that [`DecodeStream::push`] and [`DecodeStream::finish`] return join to what [`Tokenizer::decode`] makes
/// of all ids at once.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// The ids since the last but one point at which the text ended with a whole character; earlier ones cannot change
    /// the text any more.
    ids: Vec<u32>,
    /// How many of `ids` have been shown, and their text.
    shown: usize,
    shown_text: String,
}

impl DecodeStream {
    /// A stream that has seen no token yet.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), shown: 0, shown_text: String::new() }
    }

    /// Adds a token; returns the text that it completes, which is empty in the middle of a character.
    ///
    /// # Errors
    /// An id that the tokenizer does not have.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids, self.skip_special_tokens);
        let text = text.inspect_err(|_| {
            self.ids.pop();
        })?;
        if text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.show(text)
    }

    /// The text that is still held back: bytes that never became a character show as U+FFFD.
    ///
    /// # Errors
    /// As [`DecodeStream::push`].
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, self.skip_special_tokens)?;
        self.show(text)
    }

    fn show(&mut self, text: String) -> Result<String> {
        let new = text.get(self.shown_text.len()..).unwrap_or_default().to_string();
        // Decoders treat the first token in a special way (a leading space, say), so the window keeps those tokens that
        // were shown last as context for the next ones.
        let context = self.tokenizer.decode(&self.ids[self.shown..], self.skip_special_tokens)?;
        if !new.is_empty() && !context.is_empty() {
            self.ids.drain(..self.shown);
            self.shown_text = context;
        } else {
            self.shown_text = text;
        }
        self.shown = self.ids.len();
        Ok(new)
    }
}
