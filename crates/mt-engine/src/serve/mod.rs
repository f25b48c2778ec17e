//! The interface between a running engine and the programs that put requests to it.

mod request;

pub use request::{
    AnswerEvent, AnswerLimits, EngineMetrics, GenerationRequest, SubmitError, TokenChoice, TokenFilter,
    TokenLogProbability,
};
