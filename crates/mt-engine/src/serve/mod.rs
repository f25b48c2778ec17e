//! Serving: requests join and leave between steps, over a cache of pages.

mod request;

pub use request::{
    AnswerEvent, AnswerLimits, EngineMetrics, GenerationRequest, SubmitError, TokenChoice, TokenFilter,
    TokenLogProbability,
};
