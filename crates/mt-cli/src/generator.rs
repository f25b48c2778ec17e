//! The engine that answers prompts with the parameters of a run in training.

use std::ops::ControlFlow;

use mt_engine::{Engine, EngineOptions, GenerationEvent, Limits, PromptBounds, Request, SamplingOptions};
use mt_runtime::Array;
use mt_train::{AnswerRequest, AnswerSampling, GenerationError, Generator, GivenAnswer, StopRule, Trainer};

/// The most prompts that are answered at once, unless the configuration says.
const MAX_BATCH: usize = 64;

/// An engine without parameters of its own.
struct BorrowingEngine {
    engine: Engine,
}

/// The engine of a trainer, which borrows its parameters.
pub fn generator(trainer: &Trainer) -> Box<dyn Generator> {
    let plan = trainer.plan();
    let model = plan.model().clone();
    let (vocab_size, length) = (plan.settings().model.vocab_size, plan.batch_dims()[1] + 1);
    let prompts =
        PromptBounds { source: None, vocab_size, max_target_length: length, max_prefill_length: length };
    let options = EngineOptions {
        prompts,
        num_choices: vocab_size,
        max_batch: plan.settings().rollouts.max_num_seqs.unwrap_or(MAX_BATCH),
        compile: plan.compile_settings(),
    };
    let types = model.parameters().iter().map(|(_, spec)| spec.dtype).collect();
    let engine =
        Engine::new(trainer.runtime().clone(), plan.sampler_placement().clone(), model, types, options);
    Box::new(BorrowingEngine { engine })
}

impl Generator for BorrowingEngine {
    fn answers(
        &self,
        parameters: &[Array],
        given: &[AnswerRequest],
        sampling: &AnswerSampling,
    ) -> Result<Vec<GivenAnswer>, GenerationError> {
        let fits = |request: &AnswerRequest| (1..sampling.max_length).contains(&request.prompt.len());
        let asked: Vec<usize> = (0..given.len()).filter(|row| fits(&given[*row])).collect();
        let request =
            |row: &usize| Request { prompt: given[*row].prompt.clone(), sample: given[*row].sample };
        let requests: Vec<Request> = asked.iter().map(request).collect();
        let options = SamplingOptions {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            seed: sampling.seed,
        };
        let limits = Limits { max_new_tokens: Some(sampling.max_tokens), stop: Vec::new() };
        let session = self.engine.with(parameters)?;
        let mut made: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
        let generation = session.generate(&requests, &options, &limits, |event| {
            let GenerationEvent::Token(token) = event else { return ControlFlow::Continue(()) };
            let answer = &mut made[token.row];
            answer.push(token.token);
            let is_over = sampling.ends.contains(&token.token)
                || answer.len() >= given[asked[token.row]].max_tokens
                || sampling.stop.as_ref().is_some_and(|StopRule(stops)| stops(answer));
            if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let mut answers = vec![GivenAnswer::default(); given.len()];
        for (row, answer) in asked.into_iter().zip(generation.rows) {
            let (tokens, log_probabilities) = (answer.tokens, answer.log_probabilities);
            answers[row] = GivenAnswer { tokens, log_probabilities };
        }
        Ok(answers)
    }
}
