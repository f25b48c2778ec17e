//! Requests to a running engine, and the events of their answers.

use std::{collections::BTreeSet, fmt, time::Duration};

use super::BeamSearch;
use crate::{EngineError, FinishReason};

/// A request for `num_answers` continuations of one prompt.
pub struct GenerationRequest {
    pub prompt: Vec<u32>,
    pub num_answers: usize,
    pub choice: TokenChoice,
    pub limits: AnswerLimits,
    /// The number of most probable tokens to report beside each chosen one; `None` for no log-probabilities.
    pub log_probabilities: Option<usize>,
    /// As `log_probabilities`, of the prompt's tokens from the second on.
    pub prompt_log_probabilities: Option<usize>,
    /// Restricts the tokens of each answer (grammars, schemas); one filter for each answer, or none.
    pub filters: Vec<Box<dyn TokenFilter>>,
    /// The adapter by its served name; `None` for the base model.
    pub adapter: Option<String>,
    /// Set if the prompt's pooled hidden states are wanted instead of an answer.
    pub pooling: Option<Pooling>,
}

/// How hidden states of the tokens of a text, after the final norm, become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of the last token.
    Last,
    /// The mean over all tokens.
    Mean,
}

impl Pooling {
    /// The weights of the tokens `first..first + count` of a text of `length` tokens.
    pub(crate) fn weights(self, first: usize, count: usize, length: usize) -> Vec<f32> {
        let weight = |place: usize| match self {
            Self::Mean => (1.0 / length as f64) as f32,
            Self::Last => f32::from(u8::from(place + 1 == length)),
        };
        (first..first + count).map(weight).collect()
    }
}

impl GenerationRequest {
    /// One greedy answer to a prompt, as long as the engine allows.
    pub fn greedy(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            num_answers: 1,
            choice: TokenChoice::GREEDY,
            limits: AnswerLimits::default(),
            log_probabilities: None,
            prompt_log_probabilities: None,
            filters: Vec::new(),
            adapter: None,
            pooling: None,
        }
    }

    /// The pooled hidden states of a text.
    pub fn pooled(text: Vec<u32>, pooling: Pooling) -> Self {
        Self { pooling: Some(pooling), ..Self::greedy(text) }
    }
}

/// How each token of an answer is chosen.
///
/// The bias is added to the model's logits, then penalties apply, and tokens that are not allowed drop out. The rest is
/// divided by the temperature, then restricted by `min_p`, by `top_k` and by `top_p`, in this order. One of the remaining
/// tokens is drawn by its probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenChoice {
    /// 0 selects the most probable token.
    pub temperature: f64,
    pub top_k: Option<usize>,
    /// 1 for no restriction.
    pub top_p: f64,
    /// The least probability of a token, as a fraction of that of the most probable one; 0 for no restriction.
    pub min_p: f64,
    /// Divides positive logits of tokens of the prompt and of the answer, and multiplies negative ones; 1 for none.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of the answer's tokens; 0 for none.
    pub presence_penalty: f64,
    /// Subtracted from a token's logit once for each time that the answer has it; 0 for none.
    pub frequency_penalty: f64,
    pub logit_bias: Vec<(u32, f32)>,
    /// The only tokens that may be chosen; `None` for all.
    pub allowed_tokens: Option<Vec<u32>>,
    pub banned_tokens: Vec<u32>,
    /// Determines the random numbers, together with the number of the answer and the index of the token; `None` for a
    /// seed of the engine's own.
    pub seed: Option<u64>,
    /// The most probable texts instead of tokens that are drawn one by one. The answers are the best ones, in descending
    /// order, and are known at the end of the search. It goes with a temperature of 0 and without other rules.
    pub beams: Option<BeamSearch>,
}

impl TokenChoice {
    /// The most probable token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        allowed_tokens: None,
        banned_tokens: Vec::new(),
        seed: None,
        beams: None,
    };
}

/// Where an answer ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerLimits {
    /// The maximum length of an answer in tokens; `None` for as many as the engine's bounds allow.
    pub max_new_tokens: Option<usize>,
    /// The number of tokens before which no stop token and no EOS is chosen.
    pub min_tokens: usize,
    /// Tokens that end an answer and do not belong to it, in addition to the model's EOS tokens.
    pub stop_tokens: Vec<u32>,
    /// Whether the model's EOS tokens are tokens like others.
    pub ignore_eos: bool,
}

/// Restricts the tokens of an answer one by one, such as to those that a grammar allows.
pub trait TokenFilter: Send {
    /// Sets bit `t` of `allowed` (32 a word) for every token `t` that may come next.
    fn allowed(&mut self, allowed: &mut [u32]);

    /// Takes note of the chosen token. `false` if the answer ends here.
    fn accept(&mut self, token: u32) -> bool;
}

/// A token with its log-probability under the model, regardless of temperature, penalties and restrictions.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbability {
    pub token: u32,
    /// The natural logarithm.
    pub log_probability: f32,
    /// The most probable tokens with their log-probabilities, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// An event of a request.
#[derive(Debug)]
pub enum AnswerEvent {
    /// The prompt has been read.
    Prompt {
        /// The number of its tokens that came from the prefix cache.
        cached: usize,
        /// The time until its first tokens were read or found in the cache.
        waited: Duration,
        /// One entry for each token, if requested; none for the first.
        log_probabilities: Vec<Option<TokenLogProbability>>,
    },
    Token {
        answer: usize,
        token: TokenLogProbability,
    },
    /// The pooled hidden states of the prompt, without normalization.
    Pooled {
        values: Vec<f32>,
    },
    Finished {
        answer: usize,
        reason: FinishReason,
        /// The token at which the answer stopped. It does not belong to the answer.
        stop_token: Option<u32>,
    },
    /// The request has failed. No event follows.
    Failed(EngineError),
}

/// Why a request is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The request is wrong.
    #[error(transparent)]
    Invalid(#[from] EngineError),
    #[error("{waiting} requests are waiting, and more are not accepted\nhint: try again later")]
    QueueFull { waiting: usize },
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// Counts of a running engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// Answers whose prompts have been read or are being read.
    pub running: usize,
    /// Answers that wait for pages.
    pub waiting: usize,
    /// Pages in use, without those that only the prefix cache holds.
    pub used_pages: usize,
    pub total_pages: usize,
    /// Tokens of prompts, and those of them that came from the prefix cache.
    pub prompt_tokens: u64,
    pub cached_prompt_tokens: u64,
    pub generated_tokens: u64,
    /// The number of times that an answer was put back for want of pages.
    pub preemptions: u64,
    /// Answers that have ended.
    pub finished: u64,
    /// The bytes of pages in host memory.
    pub host_bytes: u64,
    /// The number of pages that were saved in host memory, and that came back from it.
    pub saved_pages: u64,
    pub restored_pages: u64,
    /// Verifications of drafted tokens, the drafted tokens, and those of them that were accepted.
    pub drafts: u64,
    pub drafted_tokens: u64,
    pub accepted_tokens: u64,
    /// The number of accepted tokens by their place among the drafted ones; empty if the engine does not speculate.
    pub accepted_by_place: Vec<u64>,
    /// The number of steps by the tokens that they read, in the ranges that [`STEP_TOKENS`] bounds, and the sum of these
    /// tokens.
    pub steps: [u64; STEP_TOKENS.len() + 1],
    pub step_tokens: u64,
    /// The number of adapters.
    pub max_adapters: usize,
    /// The adapters of requests that are being answered, and of others that wait, by name.
    pub running_adapters: BTreeSet<String>,
    pub waiting_adapters: BTreeSet<String>,
}

/// The upper bounds of ranges of tokens that a step reads. The last range has none.
pub const STEP_TOKENS: [u64; 14] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

impl EngineMetrics {
    /// Counts a verification of drafted tokens.
    pub(super) fn count_drafts(&mut self, num_drafted: usize, num_accepted: usize) {
        self.drafts += 1;
        self.drafted_tokens += num_drafted as u64;
        self.accepted_tokens += num_accepted as u64;
        self.accepted_by_place.iter_mut().take(num_accepted).for_each(|count| *count += 1);
    }

    /// Counts a step that reads this number of tokens.
    pub(super) fn count_step(&mut self, num_tokens: usize) {
        let num_tokens = num_tokens as u64;
        self.steps[STEP_TOKENS.partition_point(|bound| *bound < num_tokens)] += 1;
        self.step_tokens += num_tokens;
    }
}

impl fmt::Debug for GenerationRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GenerationRequest")
            .field("prompt", &self.prompt.len())
            .field("num_answers", &self.num_answers)
            .field("choice", &self.choice)
            .field("limits", &self.limits)
            .field("num_filters", &self.filters.len())
            .finish_non_exhaustive()
    }
}
