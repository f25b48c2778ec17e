//! Requests to a running engine, and the events of their answers.

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
    /// Restricts the tokens of each answer (grammars, schemas); one filter for each answer.
    pub filters: Vec<Box<dyn TokenFilter>>,
    /// The adapter by its served name; `None` for the base model.
    pub adapter: Option<String>,
}

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenChoice {
    /// 0 selects the most probable token.
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: f64,
    /// The lowest probability of a token, relative to that of the most probable one.
    pub min_p: f64,
    pub repetition_penalty: f64,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    pub logit_bias: Vec<(u32, f32)>,
    pub allowed_tokens: Option<Vec<u32>>,
    pub banned_tokens: Vec<u32>,
    pub seed: Option<u64>,
}

impl Default for TokenChoice {
    fn default() -> Self {
        Self {
            temperature: 1.0,
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
        }
    }
}

/// The limits of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerLimits {
    pub max_new_tokens: Option<usize>,
    pub min_tokens: usize,
    /// Tokens that end an answer and do not belong to it.
    pub stop_tokens: Vec<u32>,
    /// Whether the model's own end-of-sequence tokens do not end an answer.
    pub ignore_eos: bool,
}

/// Restricts the tokens of one answer.
pub trait TokenFilter: Send {
    /// Sets bit t of `allowed` (32 a word) for every token t that may come next.
    fn allowed(&mut self, allowed: &mut [u32]);
    /// Takes note of the chosen token. `false` if the answer ends here.
    fn accept(&mut self, token: u32) -> bool;
}

/// A token with its log-probability under the model, and the most probable tokens in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogProbability {
    pub token: u32,
    pub log_probability: f32,
    pub top: Vec<(u32, f32)>,
}

/// An event of a request.
pub enum AnswerEvent {
    /// The prompt has been read. `cached` of its tokens came from the prefix cache.
    Prompt { cached: usize, log_probabilities: Vec<Option<TokenLogProbability>> },
    Token { answer: usize, token: TokenLogProbability },
    Finished { answer: usize, reason: FinishReason },
    Failed(EngineError),
}

/// The reason why a request is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Invalid(#[from] EngineError),
    #[error("the queue is full")]
    QueueFull,
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// Counts of a running engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineMetrics {
    pub running: usize,
    pub waiting: usize,
    pub pages_used: usize,
    pub pages_total: usize,
    /// The prompt tokens that were looked up in the prefix cache, and those that were found.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub preemptions: u64,
}
