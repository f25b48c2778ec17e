//! What an engine is asked for, and what it answers.

use std::time::Duration;

use mt_config::{DecodeGroup, SamplingStrategy};
use mt_runtime::CompileSettings;

use crate::{EngineError, sampler::Sampler};

/// The bounds of an engine, and how it compiles.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The number of tokens that the model knows.
    pub vocab_size: usize,
    /// The number of those that can be chosen: the first ones, which the tokenizer knows as well.
    pub num_choices: usize,
    /// Most tokens of a prompt and its answer together.
    pub max_target_length: usize,
    /// Most tokens of a prompt.
    pub max_prefill_length: usize,
    /// Most rows that run at once; more are taken one group after another.
    pub max_batch: usize,
    pub compile: CompileSettings,
}

/// A sequence to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Tells answers to the same prompt apart: each number draws differently from the same seed.
    pub sample: u64,
}

/// How the next token is chosen.
///
/// The scores are divided by the temperature, then cut to the `top_k` likeliest tokens, then to the likeliest of those
/// that make up the mass `top_p`; one of the rest is drawn by its probability. The draw depends on the seed, the
/// request's sample number and the token's position, and on nothing else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingOptions {
    /// 0 takes the likeliest token.
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub seed: u64,
}

/// Below this, a temperature is 0: scores that differ by a rounding error are as far apart as they can be.
const LOWEST_TEMPERATURE: f64 = 1e-6;

impl SamplingOptions {
    /// Always the likeliest token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 };

    /// What the configuration asks for.
    pub fn from_config(group: &DecodeGroup) -> Self {
        use SamplingStrategy::{Composite, Greedy, Nucleus, TopK};
        let strategy = group.decode_sampling_strategy;
        Self {
            temperature: if strategy == Greedy { 0.0 } else { group.decode_sampling_temperature },
            top_k: matches!(strategy, TopK | Composite).then_some(group.decode_sampling_top_k),
            top_p: matches!(strategy, Nucleus | Composite).then_some(group.decode_sampling_nucleus_p),
            seed: group.decode_seed,
        }
    }

    /// The part that programs depend on.
    pub(crate) fn sampler(&self, num_choices: usize) -> Result<Sampler, EngineError> {
        let wrong = |message: String| Err(EngineError::Sampling(message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong(format!("a temperature is a number from 0 on, not `{}`", self.temperature));
        }
        if self.top_k == Some(0) {
            return wrong("at least one token has to be left to draw from, but `top_k` is `0`".to_owned());
        }
        if let Some(mass) = self.top_p.filter(|mass| !(*mass > 0.0 && *mass <= 1.0)) {
            return wrong(format!("the mass to draw from is above 0 and at most 1, not `{mass}`"));
        }
        if self.temperature < LOWEST_TEMPERATURE {
            return Ok(Sampler::Greedy);
        }
        // A few sizes serve every number of candidates.
        let candidates = self.top_k.map_or(num_choices, |k| k.min(num_choices).next_power_of_two().max(8));
        match (self.top_k, self.top_p.filter(|mass| *mass < 1.0)) {
            (None, None) => Ok(Sampler::Weighted),
            _ => Ok(Sampler::Truncated { candidates: candidates.min(num_choices) }),
        }
    }
}

/// When a row ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of an answer; `None` for as many as `max_target_length` allows.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end an answer, and are not part of it.
    pub stop: Vec<u32>,
}

/// A token as it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeneratedToken {
    /// The request that it belongs to.
    pub row: usize,
    pub token: u32,
    /// Natural logarithm of the probability that the model gives it, whatever the temperature and the cuts.
    pub log_probability: f32,
}

/// What happens to the answers, as it happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GenerationEvent {
    Token(GeneratedToken),
    /// No token of this row follows.
    Finished {
        /// The request that was answered.
        row: usize,
        reason: FinishReason,
    },
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose a stop token.
    Stop,
    /// There is no room for another token.
    Length,
    /// The receiver wanted no more.
    Cancelled,
}

impl FinishReason {
    /// The reason as programs read it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The answer to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub tokens: Vec<u32>,
    /// One for each token; see [`GeneratedToken::log_probability`].
    pub log_probabilities: Vec<f32>,
    pub finish: FinishReason,
}

/// The answers to all requests, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    pub rows: Vec<Row>,
    pub timing: Timing,
}

/// How long generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Tracing and compiling programs that were not at hand.
    pub compile: Duration,
    /// From the start, compilation aside, until the first token could be read.
    pub first_token: Duration,
    /// From the start until the end, compilation aside.
    pub total: Duration,
    /// Tokens of all answers.
    pub num_tokens: usize,
}

impl Timing {
    /// Tokens of all rows in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.num_tokens as f64 / self.total.as_secs_f64().max(1e-9)
    }
}
