//! A generator that answers one request after another.
//!
//! Requests that only set temperature, `top_k`, `top_p` and seed run in the engine's programs with a cache. For others,
//! each token reads the logits of the whole text, and the host chooses it.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasher, Hasher, RandomState},
    ops::ControlFlow,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    task::{Context, Poll},
    thread::JoinHandle,
};

use mt_engine::{
    Engine, EngineError, EngineOptions, FinishReason, GenerationEvent, Limits, LoadedModel, PromptBounds,
    Request, SamplingOptions, ScoredSizes, Scorer, Session,
    serve::{
        AnswerEvent, EngineMetrics, GenerationRequest, SubmitError, TokenChoice, TokenFilter,
        TokenLogProbability,
    },
};
use mt_runtime::{Array, CompileSettings};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{
    choice::{Chooser, Excluded, log_probability},
    generator::{AnswerStream, Generator},
};

/// The requests that may wait.
const QUEUE: usize = 4096;

/// An engine that answers one request after another, in the order of their arrival.
pub struct SingleGenerator {
    /// `None` when the generator is drained.
    jobs: Mutex<Option<SyncSender<Job>>>,
    worker: Mutex<Option<JoinHandle<()>>>,
    counts: Arc<Counts>,
    bounds: PromptBounds,
}

struct Job {
    request: GenerationRequest,
    events: UnboundedSender<AnswerEvent>,
}

#[derive(Default)]
struct Counts {
    running: AtomicUsize,
    waiting: AtomicUsize,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
}

impl SingleGenerator {
    /// Starts the thread that answers.
    ///
    /// # Errors
    /// The model cannot generate.
    pub fn start(loaded: LoadedModel, options: EngineOptions) -> Result<Self, EngineError> {
        if !loaded.model.is_causal() {
            return Err(EngineError::NotCausal);
        }
        if loaded.model.reads_source() {
            return Err(EngineError::NoSource { command: "serve" });
        }
        let types = loaded.parameters.iter().map(Array::dtype).collect();
        let (runtime, placement, model) =
            (loaded.runtime.clone(), loaded.placement.clone(), loaded.model.clone());
        let compile = options.compile.clone();
        let num_choices = options.num_choices.min(loaded.vocab_size);
        let engine = Engine::new(runtime, placement, model, types, options);
        let bounds = engine.options().prompts;
        // The first request must not find that the weights do not match.
        engine.with(&loaded.parameters)?;
        let (jobs, received) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let worker = std::thread::spawn({
            let counts = counts.clone();
            move || work(&loaded, &engine, &compile, num_choices, &received, &counts)
        });
        Ok(Self { jobs: Mutex::new(Some(jobs)), worker: Mutex::new(Some(worker)), counts, bounds })
    }
}

impl Generator for SingleGenerator {
    fn submit(&self, request: GenerationRequest) -> Result<Box<dyn AnswerStream>, SubmitError> {
        self.bounds.check(1, &request.prompt)?;
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = self.counts.waiting.load(Ordering::SeqCst);
        let jobs = jobs.as_ref().ok_or(SubmitError::ShuttingDown)?;
        let (events, receiver) = unbounded_channel();
        // The worker may take the job before this thread goes on.
        self.counts.waiting.fetch_add(1, Ordering::SeqCst);
        jobs.try_send(Job { request, events }).map_err(|error| {
            self.counts.waiting.fetch_sub(1, Ordering::SeqCst);
            match error {
                TrySendError::Full(_) => SubmitError::QueueFull { waiting },
                TrySendError::Disconnected(_) => SubmitError::ShuttingDown,
            }
        })?;
        Ok(Box::new(Events { receiver }))
    }

    fn metrics(&self) -> EngineMetrics {
        let counts = &self.counts;
        EngineMetrics {
            running: counts.running.load(Ordering::SeqCst),
            waiting: counts.waiting.load(Ordering::SeqCst),
            prompt_tokens: counts.prompt_tokens.load(Ordering::SeqCst),
            generated_tokens: counts.generated_tokens.load(Ordering::SeqCst),
            ..EngineMetrics::default()
        }
    }

    fn drain(&self) {
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(worker) = worker {
            // A panic of the worker has already ended its requests.
            let _ = worker.join();
        }
    }
}

struct Events {
    receiver: UnboundedReceiver<AnswerEvent>,
}

impl AnswerStream for Events {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<AnswerEvent>> {
        self.receiver.poll_recv(context)
    }
}

/// Answers requests until the generator is drained.
fn work(
    loaded: &LoadedModel,
    engine: &Engine,
    compile: &CompileSettings,
    num_choices: usize,
    jobs: &Receiver<Job>,
    counts: &Counts,
) {
    let mut scorers = HashMap::new();
    while let Ok(job) = jobs.recv() {
        counts.waiting.fetch_sub(1, Ordering::SeqCst);
        if job.events.is_closed() {
            continue;
        }
        counts.running.store(1, Ordering::SeqCst);
        counts.prompt_tokens.fetch_add(job.request.prompt.len() as u64, Ordering::SeqCst);
        let Job { request, events } = job;
        let answered = if is_plain(&request) {
            engine.with(&loaded.parameters).and_then(|session| plain(session, &request, &events, counts))
        } else {
            let host = OnHost { loaded, compile, num_choices, bounds: engine.options().prompts };
            host.answer(request, &events, &mut scorers, counts)
        };
        if let Err(error) = answered {
            // The client may have gone.
            let _ = events.send(AnswerEvent::Failed(error));
        }
        counts.running.store(0, Ordering::SeqCst);
    }
}

/// Whether the engine's programs can choose the tokens of a request.
fn is_plain(request: &GenerationRequest) -> bool {
    let choice = &request.choice;
    let others = TokenChoice {
        temperature: choice.temperature,
        top_k: choice.top_k,
        top_p: choice.top_p,
        seed: choice.seed,
        ..TokenChoice::GREEDY
    };
    *choice == others
        && request.filters.is_empty()
        && request.limits.min_tokens == 0
        && request.log_probabilities.unwrap_or(0) == 0
        && request.prompt_log_probabilities.is_none()
        && request.limits.max_new_tokens != Some(0)
}

/// Answers with the engine's programs.
fn plain(
    session: Session<'_>,
    request: &GenerationRequest,
    events: &UnboundedSender<AnswerEvent>,
    counts: &Counts,
) -> Result<(), EngineError> {
    let choice = &request.choice;
    let sampling = SamplingOptions {
        temperature: choice.temperature,
        top_k: choice.top_k,
        top_p: (choice.top_p < 1.0).then_some(choice.top_p),
        seed: choice.seed.unwrap_or_else(random),
    };
    let requests: Vec<Request> = (0..request.num_answers as u64)
        .map(|sample| Request { prompt: request.prompt.clone(), sample })
        .collect();
    let limits =
        Limits { max_new_tokens: request.limits.max_new_tokens, stop: request.limits.stop_tokens.clone() };
    let mut is_read = false;
    let send = |event| match events.send(event) {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(()),
    };
    session.generate(&requests, &sampling, &limits, |event| {
        if !std::mem::replace(&mut is_read, true) {
            let prompt = AnswerEvent::Prompt { cached: 0, log_probabilities: Vec::new() };
            if send(prompt).is_break() {
                return ControlFlow::Break(());
            }
        }
        send(match event {
            GenerationEvent::Token(token) => {
                counts.generated_tokens.fetch_add(1, Ordering::SeqCst);
                let log_probability = token.log_probability;
                let probability =
                    TokenLogProbability { token: token.token, log_probability, top: Vec::new() };
                AnswerEvent::Token { answer: token.row, token: probability }
            }
            GenerationEvent::Finished { row, reason } => AnswerEvent::Finished { answer: row, reason },
        })
    })?;
    Ok(())
}

/// Answers with the logits of whole texts.
struct OnHost<'a> {
    loaded: &'a LoadedModel,
    compile: &'a CompileSettings,
    num_choices: usize,
    bounds: PromptBounds,
}

/// An answer in progress.
struct Answer<'a> {
    row: Vec<u32>,
    chooser: Chooser<'a>,
    filter: Option<Box<dyn TokenFilter>>,
    num_tokens: usize,
    is_open: bool,
}

impl<'a> OnHost<'a> {
    fn answer(
        &self,
        mut request: GenerationRequest,
        events: &UnboundedSender<AnswerEvent>,
        scorers: &mut HashMap<[usize; 2], Scorer<'a>>,
        counts: &Counts,
    ) -> Result<(), EngineError> {
        let room = self.bounds.max_target_length.saturating_sub(request.prompt.len());
        let most = request.limits.max_new_tokens.unwrap_or(room).min(room);
        let seed = request.choice.seed.unwrap_or_else(random);
        let mut filters = std::mem::take(&mut request.filters).into_iter();
        let mut answers: Vec<Answer<'_>> = (0..request.num_answers)
            .map(|index| Answer {
                row: request.prompt.clone(),
                chooser: Chooser::new(&request.choice, &request.prompt, seed, index),
                filter: filters.next(),
                num_tokens: 0,
                is_open: true,
            })
            .collect();
        let mut is_read = false;
        while answers.iter().any(|answer| answer.is_open) {
            let logits = self.logits(&answers, scorers)?;
            let vocab = self.loaded.vocab_size;
            if !std::mem::replace(&mut is_read, true) {
                let log_probabilities = prompt_log_probabilities(&request, &logits.values, vocab);
                let _ = events.send(AnswerEvent::Prompt { cached: 0, log_probabilities });
            }
            for (index, answer) in answers.iter_mut().enumerate().filter(|(_, answer)| answer.is_open) {
                if events.is_closed() {
                    return Ok(());
                }
                let at = (index * logits.length + answer.row.len() - 1) * vocab;
                let logits = &logits.values[at..][..vocab];
                if logits.iter().any(|logit| logit.is_nan()) {
                    return Err(EngineError::NotANumber { position: answer.row.len() });
                }
                let reason = if answer.num_tokens >= most {
                    Some(FinishReason::Length)
                } else {
                    self.step(index, answer, logits, &request, events, counts)
                        .or((answer.num_tokens >= most).then_some(FinishReason::Length))
                };
                if let Some(reason) = reason {
                    answer.is_open = false;
                    let _ = events.send(AnswerEvent::Finished { answer: index, reason });
                }
            }
        }
        Ok(())
    }

    /// Chooses a token. Returns the reason if it ends the answer.
    fn step(
        &self,
        index: usize,
        answer: &mut Answer<'_>,
        logits: &[f32],
        request: &GenerationRequest,
        events: &UnboundedSender<AnswerEvent>,
        counts: &Counts,
    ) -> Option<FinishReason> {
        let mask = answer.filter.as_mut().map(|filter| {
            let mut mask = vec![0_u32; self.num_choices.div_ceil(32)];
            filter.allowed(&mut mask);
            mask
        });
        let limits = &request.limits;
        let is_early = answer.num_tokens < limits.min_tokens;
        let banned = if is_early { &limits.stop_tokens[..] } else { &[] };
        let excluded = Excluded { allowed: mask.as_deref(), banned };
        // Without a token that may come, the answer ends.
        let Some(token) = answer.chooser.choose(&logits[..self.num_choices], excluded) else {
            return Some(FinishReason::Stop);
        };
        if limits.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        answer.num_tokens += 1;
        answer.row.push(token);
        counts.generated_tokens.fetch_add(1, Ordering::SeqCst);
        let token_log_probability = log_probability(logits, token, request.log_probabilities.unwrap_or(0));
        let _ = events.send(AnswerEvent::Token { answer: index, token: token_log_probability });
        match answer.filter.as_mut().is_none_or(|filter| filter.accept(token)) {
            true => None,
            false => Some(FinishReason::Stop),
        }
    }

    fn logits(
        &self,
        answers: &[Answer<'_>],
        scorers: &mut HashMap<[usize; 2], Scorer<'a>>,
    ) -> Result<Logits, EngineError> {
        let longest = answers.iter().map(|answer| answer.row.len()).max().unwrap_or(1);
        let length = longest.next_power_of_two().max(16).min(self.bounds.max_target_length);
        let key = [answers.len(), length];
        let scorer = match scorers.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let sizes = ScoredSizes { rows: answers.len(), length, source: 0 };
                entry.insert(Scorer::new(self.loaded, sizes, false, self.compile)?)
            }
        };
        let rows: Vec<Vec<u32>> = answers.iter().map(|answer| answer.row.clone()).collect();
        let scores = scorer.score(rows.as_slice().into())?;
        let values = scores.logits.as_slice::<f32>().expect("logits have 32 bits").to_vec();
        Ok(Logits { values, length })
    }
}

/// The logits of the rows of all answers, each with `length` positions.
struct Logits {
    values: Vec<f32>,
    length: usize,
}

/// The log-probabilities of a prompt's tokens from the second on.
fn prompt_log_probabilities(
    request: &GenerationRequest,
    logits: &[f32],
    vocab: usize,
) -> Vec<Option<TokenLogProbability>> {
    let Some(top) = request.prompt_log_probabilities else { return Vec::new() };
    let later = request.prompt.iter().skip(1).zip(logits.chunks(vocab));
    let found = later.map(|(token, logits)| Some(log_probability(logits, *token, top)));
    [None].into_iter().chain(found).collect()
}

/// A seed for a request without one.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
