//! Incremental decoding of tokens.

use std::sync::Arc;

use super::Tokenizer;
use crate::error::Result;

/// Decodes token by token and never emits half a character.
///
/// The pieces that [`DecodeStream::push`] and [`DecodeStream::finish`] return join to the result of
/// [`Tokenizer::decode`] for all ids.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    /// The ids since the second-last point at which the text ended with a whole character. Earlier ids cannot change
    /// the text any more.
    ids: Vec<u32>,
    /// The number of `ids` that have been emitted, and their text.
    shown: usize,
    shown_text: String,
}

impl DecodeStream {
    /// A stream without tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), shown: 0, shown_text: String::new() }
    }

    /// Adds a token and returns the text that it completes, which is empty in the middle of a character.
    ///
    /// # Errors
    /// The tokenizer does not have the id.
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

    /// The text that is still held back. Bytes that form no character become U+FFFD.
    ///
    /// # Errors
    /// As [`DecodeStream::push`].
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, self.skip_special_tokens)?;
        self.show(text)
    }

    fn show(&mut self, text: String) -> Result<String> {
        let new = text.get(self.shown_text.len()..).unwrap_or_default().to_string();
        // Decoders treat the first token differently (for example, its leading space), so the last emitted tokens stay
        // in the window as context for the next ones.
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
