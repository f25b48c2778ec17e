//! Requests, options and results of an engine.

use std::time::Duration;

use mt_config::{DecodeConfig, DecodeGroup, ModelGroup, SamplingStrategy};
use mt_models::Model;
use mt_runtime::CompileSettings;

use crate::{EngineError, sampler::Sampler};

/// The limits of an engine, and its compilation settings.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub prompts: PromptBounds,
    /// The number of tokens that can be sampled: those that the tokenizer knows, which come first.
    pub num_choices: usize,
    /// The maximum number of rows that run at once; more requests wait until others end.
    pub max_batch: usize,
    pub compile: CompileSettings,
}

/// The bounds of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptBounds {
    /// The number of tokens in the model's vocabulary.
    pub vocab_size: usize,
    /// The maximum length of a prompt and its answer together, in tokens.
    pub max_target_length: usize,
    /// The maximum length of a prompt in tokens.
    pub max_prefill_length: usize,
    /// Set if the model has an encoder. The prompt is then the source, and `max_target_length` bounds the answer alone.
    pub source: Option<SourceBounds>,
}

/// The bounds of an encoder's source, and the beginning of the decoder's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceBounds {
    /// The maximum length of a source in tokens.
    pub max_length: usize,
    /// The token before the first one of an answer.
    pub start_token: u32,
}

impl SourceBounds {
    /// The bounds that a configuration sets for its model, if it has an encoder.
    pub fn of(config: &ModelGroup, model: &dyn Model) -> Option<Self> {
        let keys = &config.encoder;
        let start_token = keys.decoder_start_token_id as u32;
        model.reads_source().then_some(Self { max_length: keys.max_source_length, start_token })
    }
}

impl PromptBounds {
    /// The bounds that a configuration sets for its model.
    pub fn of(config: &DecodeConfig, model: &dyn Model) -> Self {
        let bounds = Self {
            vocab_size: config.model.vocab_size,
            max_target_length: config.decode.max_target_length,
            max_prefill_length: config.decode.max_prefill_predict_length,
            source: SourceBounds::of(&config.model, model),
        };
        bounds.within(model)
    }

    /// These bounds, with sequences no longer than the positions that the model has learned.
    pub(crate) fn within(self, model: &dyn Model) -> Self {
        let positions = model.num_learned_positions().unwrap_or(usize::MAX);
        Self { max_target_length: self.max_target_length.min(positions), ..self }
    }

    /// The maximum length of the answer to a prompt of this length, in tokens.
    pub(crate) fn room(&self, prompt: usize) -> usize {
        match self.source {
            // The last token of an answer is not read, and the start token is.
            Some(_) => self.max_target_length,
            None => self.max_target_length - prompt,
        }
    }

    /// Checks a prompt. Error messages call it by `number`, which counts from 1.
    ///
    /// # Errors
    /// The prompt is empty or too long, or a token is outside the vocabulary.
    pub fn check(&self, number: usize, prompt: &[u32]) -> Result<(), EngineError> {
        let &Self { vocab_size, max_target_length, max_prefill_length, source } = self;
        let length = prompt.len();
        if length == 0 {
            return Err(EngineError::EmptyPrompt { number });
        }
        let limits: &[_] = match source {
            Some(source) => &[(length, source.max_length, "max_source_length")],
            None => &[
                (length + 1, max_target_length, "max_target_length"),
                (length, max_prefill_length, "max_prefill_predict_length"),
            ],
        };
        for &(taken, limit, key) in limits {
            if taken > limit {
                return Err(EngineError::PromptTooLong { number, length, limit, key });
            }
        }
        match prompt.iter().find(|token| **token as usize >= vocab_size) {
            Some(&token) => Err(EngineError::UnknownToken { number, token, vocab_size }),
            None => Ok(()),
        }
    }
}

/// A sequence to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// Distinguishes answers to the same prompt: each number gives different samples from the same seed.
    pub sample: u64,
}

/// How the next token is chosen.
///
/// The logits are divided by the temperature, then restricted to the `top_k` most probable tokens, then to the most
/// probable of those that reach the mass `top_p`. One of the remaining tokens is drawn by its probability. The draw
/// depends only on the seed, the request's sample number and the token's position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingOptions {
    /// 0 selects the most probable token.
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub seed: u64,
}

/// A lower temperature counts as 0, because even logits that differ by a rounding error would then be infinitely far
/// apart.
const LOWEST_TEMPERATURE: f64 = 1e-6;

impl SamplingOptions {
    /// Selects the most probable token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 };

    /// The sampling that the configuration describes.
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

    /// The sampler, on which programs depend.
    pub(crate) fn sampler(&self, num_choices: usize) -> Result<Sampler, EngineError> {
        let wrong = |message: String| Err(EngineError::Sampling(message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return wrong(format!(
                "the temperature is `{}`, but it has to be a number of at least 0",
                self.temperature
            ));
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
        // Sizes are rounded up, so that few programs serve all values of `top_k`.
        let candidates = self.top_k.map_or(num_choices, |k| k.min(num_choices).next_power_of_two().max(8));
        match (self.top_k, self.top_p.filter(|mass| *mass < 1.0)) {
            (None, None) => Ok(Sampler::Weighted),
            _ => Ok(Sampler::Truncated { candidates: candidates.min(num_choices) }),
        }
    }
}

/// The limits of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The maximum length of an answer in tokens; `None` for as many as `max_target_length` allows.
    pub max_new_tokens: Option<usize>,
    /// Tokens that end an answer and do not belong to it.
    pub stop: Vec<u32>,
}

/// A generated token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeneratedToken {
    /// The index of the request.
    pub row: usize,
    pub token: u32,
    /// The natural logarithm of the token's probability under the model, regardless of temperature and restrictions.
    pub log_probability: f32,
}

/// An event of generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GenerationEvent {
    Token(GeneratedToken),
    /// The answer has ended.
    Finished {
        /// The index of the request.
        row: usize,
        reason: FinishReason,
    },
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose a stop token.
    Stop,
    /// The answer has reached its maximum length.
    Length,
    /// The receiver of events ended the answer.
    Cancelled,
}

impl FinishReason {
    /// The reason in JSON output.
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
    /// The log-probability of each token; see [`GeneratedToken::log_probability`].
    pub log_probabilities: Vec<f32>,
    pub finish: FinishReason,
}

/// The answers to all requests, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    pub rows: Vec<Row>,
    pub timing: Timing,
}

/// The duration of generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// The time for tracing and compiling programs that were not cached.
    pub compile: Duration,
    /// The time from the start, without compilation, until the first token could be read.
    pub first_token: Duration,
    /// The time from start to end, without compilation.
    pub total: Duration,
    /// The number of tokens of all answers.
    pub num_tokens: usize,
    /// The number of times that drafted tokens of an answer were verified, and of those that were accepted.
    pub drafts: usize,
    pub accepted_drafts: usize,
}

impl Timing {
    /// Tokens per second over all rows.
    pub fn tokens_per_second(&self) -> f64 {
        self.num_tokens as f64 / self.total.as_secs_f64().max(1e-9)
    }

    /// The mean number of tokens that a verification of drafts adds to an answer, if tokens were drafted.
    pub fn tokens_per_verification(&self) -> Option<f64> {
        (self.drafts > 0).then(|| 1.0 + self.accepted_drafts as f64 / self.drafts as f64)
    }
}
