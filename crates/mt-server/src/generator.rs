//! The server's interface to an engine.

use std::task::{Context, Poll};

use mt_engine::serve::{AnswerEvent, Answers, EngineHandle, EngineMetrics, GenerationRequest, SubmitError};

/// A running engine.
pub trait Generator: Send + Sync {
    /// Begins to answer a request.
    ///
    /// # Errors
    /// The request is wrong, the queue is full, or the engine is shutting down.
    fn submit(&self, request: GenerationRequest) -> Result<Box<dyn AnswerStream>, SubmitError>;

    /// The engine's counts at this moment.
    fn metrics(&self) -> EngineMetrics;

    /// Why the engine answers no requests any more, if it has broken down.
    fn failure(&self) -> Option<String>;

    /// Accepts no new requests, and returns when the accepted ones are done.
    fn drain(&self);
}

/// The events of a request. Dropping the stream cancels the request.
pub trait AnswerStream: Send {
    /// The next event; `None` after the last one.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<AnswerEvent>>;

    /// Ends one answer, while others to the same prompt go on.
    fn end(&mut self, answer: usize);
}

impl Generator for EngineHandle {
    fn submit(&self, request: GenerationRequest) -> Result<Box<dyn AnswerStream>, SubmitError> {
        Ok(Box::new(Self::submit(self, request)?))
    }

    fn metrics(&self) -> EngineMetrics {
        Self::metrics(self)
    }

    fn failure(&self) -> Option<String> {
        Self::failure(self)
    }

    fn drain(&self) {
        Self::drain(self);
    }
}

impl AnswerStream for Answers {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<AnswerEvent>> {
        self.poll_recv(context)
    }

    fn end(&mut self, answer: usize) {
        Self::end(self, answer);
    }
}
