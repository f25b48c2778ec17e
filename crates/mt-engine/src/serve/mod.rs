//! Serving: requests join and leave between steps, over a cache of pages.
//!
//! [`EngineHandle::start`] runs an engine on a thread of its own. Clients submit a [`GenerationRequest`] and receive the
//! events of its [`Answers`]. The thread repeats steps: the scheduler plans which pieces of prompts are read and which
//! sequences receive a token, and the programs of the model do so for all rows at once.

mod answers;
mod choice;
mod handle;
mod options;
mod pages;
mod program;
mod request;
mod scheduler;
mod steps;
#[cfg(test)]
mod tests;
mod worker;

pub use answers::Answers;
pub use handle::{EngineHandle, ServedModel};
pub use options::{CacheSize, ServeOptions};
pub use program::SERVE_PROGRAMS;
pub use request::{
    AnswerEvent, AnswerLimits, EngineMetrics, GenerationRequest, SubmitError, TokenChoice, TokenFilter,
    TokenLogProbability,
};
