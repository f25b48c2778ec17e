//! The text of answers, as it is generated and shown.

use std::{
    io::{self, Write},
    sync::Arc,
};

use mt_data::{DataError, DecodeStream, Tokenizer};

use crate::failure::Failure;

/// The text of an answer as its tokens arrive.
pub struct AnswerText {
    stream: DecodeStream,
    pub text: String,
    pub tokens: Vec<u32>,
}

impl AnswerText {
    /// An answer after a prompt, whose last tokens may affect the text of the answer's first ones.
    pub fn after(prompt: &[u32], tokenizer: &Arc<Tokenizer>) -> Result<Self, DataError> {
        let mut stream = DecodeStream::new(tokenizer.clone(), true);
        for token in prompt {
            stream.push(*token)?;
        }
        Ok(Self { stream, text: String::new(), tokens: Vec::new() })
    }

    /// Adds a token, and returns the text that it adds.
    pub fn push(&mut self, token: u32) -> Result<String, DataError> {
        let new = self.stream.push(token)?;
        self.tokens.push(token);
        self.text += &new;
        Ok(new)
    }

    pub fn finish(&mut self) -> Result<String, DataError> {
        let new = self.stream.finish()?;
        self.text += &new;
        Ok(new)
    }
}

/// Standard output, until its reader closes it.
pub struct Screen {
    pub open: bool,
}

impl Screen {
    pub fn show(&mut self, text: &str) -> Result<(), Failure> {
        if !self.open || text.is_empty() {
            return Ok(());
        }
        let mut output = io::stdout().lock();
        match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.open = false;
                Ok(())
            }
            Err(error) => Err(Failure::run(format!("cannot write to standard output: {error}"))),
        }
    }
}
