//! The inference engine: continues token sequences with a model and a KV cache.
//!
//! Phase: trace, compile and run. An [`Engine`] traces a model of `mt-models` as two programs, prefill and step,
//! compiles them for a few sizes with `mt-runtime`, and loops. [`load()`] creates one from a configuration and a
//! checkpoint. `mt-cli` and `mt-plan` are above; this crate knows neither arguments nor HTTP.
//!
//! Prefill processes the prompts of a batch together, padded on the right and without their last tokens, and only fills
//! the cache. Each step then takes one token of every row, beginning with the prompt's last one, and yields the next
//! token. Rows share slots: a step writes the same slot of every row. A mask beside the cache records which slots of a
//! row hold tokens rather than padding, and each row counts its own positions, so the content of a row does not depend
//! on the others. The module [`serve`] runs requests that join and leave between steps.

#![forbid(unsafe_code)]
// An error ends a request or the start of an engine, so its size does not matter.
#![allow(clippy::result_large_err)]

mod adapters;
mod engine;
mod error;
mod load;
mod logits;
mod options;
mod plan;
mod program;
mod sampler;
pub mod serve;
#[cfg(test)]
mod tests;

pub use adapters::{LoadedAdapters, MERGE_PROGRAM, load_adapters};
pub use engine::{Engine, Session};
pub use error::EngineError;
pub use load::{Loaded, LoadedModel, check_checkpoint, encode_prompt, load, load_model};
pub use logits::{LOGITS_PROGRAM, ScoredRows, ScoredSizes, Scorer, Scores, score};
pub use options::{
    EngineOptions, FinishReason, GeneratedToken, Generation, GenerationEvent, Limits, PromptBounds, Request,
    Row, SamplingOptions, SourceBounds, Timing,
};
pub use plan::DecodePlan;
