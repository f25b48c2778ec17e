//! The inference engine: continues token sequences with a model and a cache of keys and values.
//!
//! Phase: trace, compile and run. An [`Engine`] traces a model of `mt-models` in two forms, compiles them for a few
//! sizes with `mt-runtime`, and loops. [`load()`] makes one of a configuration and a checkpoint. Commands and servers are
//! above; this crate knows neither argument lists nor HTTP.
//!
//! Prompts of one batch are padded on the right and processed at once, all but their last tokens, which only fills the
//! cache. Then each step takes one token of every row, the prompt's last one first, and yields the next one. Rows
//! share slots: a step writes the same slot of every row. Which slots of a row hold its tokens, rather than padding,
//! is recorded beside the cache, and rotary positions are counted by row, so a row does not notice the others.

#![forbid(unsafe_code)]

mod engine;
mod error;
mod load;
mod logits;
mod options;
mod plan;
mod program;
mod sampler;
#[cfg(test)]
mod tests;

pub use engine::{Engine, Session};
pub use error::EngineError;
pub use load::{Loaded, LoadedModel, check_checkpoint, encode_prompt, load, load_model, load_tokenizer};
pub use logits::{Scores, score};
pub use options::{
    EngineOptions, FinishReason, GeneratedToken, Generation, GenerationEvent, Limits, Request, Row,
    SamplingOptions, Timing,
};
pub use plan::DecodePlan;
