//! The HTTP server: OpenAI's and Anthropic's interfaces in front of a running engine.
//!
//! Phase: run. Text, chat templates, stop strings, grammars and HTTP belong to this crate; the engine behind
//! [`Generator`] knows token ids alone. A request is read and checked field by field, becomes a
//! `GenerationRequest` of `mt-engine`, and its events become text again, which is sent whole or as server-sent events.
//! `mt-cli` is above: it loads the model, binds the address and prints the [`ServerEvent`]s.

#![forbid(unsafe_code)]
// The engine's errors are large; each ends a request or the start of the server, so their size does not matter.
#![allow(clippy::result_large_err)]

mod access;
mod app;
mod beams;
pub mod bench;
mod bodies;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod endpoint;
mod error;
mod fields;
mod generation;
mod generator;
mod grammar;
mod limits;
mod log_probabilities;
mod messages;
mod metrics;
mod models;
mod parameters;
mod responses;
mod server;
mod sse;
#[cfg(test)]
mod tests;
mod text;

pub use access::ApiKeys;
pub use embeddings::pooling_of;
pub use generator::{AnswerStream, Generator};
pub use limits::ServerLimits;
pub use server::{NamedAdapter, ServedModel, Server, ServerError, ServerEvent};
