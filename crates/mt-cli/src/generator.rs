//! The engine that answers prompts with the parameters of a run in training.

use std::ops::ControlFlow;

use mt_engine::{Engine, EngineOptions, GenerationEvent, Limits, PromptBounds, Request, SamplingOptions};
use mt_runtime::Array;
use mt_train::{AnswerSampling, GenerationError, Generator, Trainer};

/// The most prompts that are answered at once.
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
        max_batch: MAX_BATCH,
        compile: plan.compile_settings(),
    };
    let types = model.parameters().iter().map(|(_, spec)| spec.dtype).collect();
    let engine = Engine::new(trainer.runtime().clone(), plan.placement().clone(), model, types, options);
    Box::new(BorrowingEngine { engine })
}

impl Generator for BorrowingEngine {
    fn answers(
        &self,
        parameters: &[Array],
        prompts: &[Vec<u32>],
        sampling: &AnswerSampling,
    ) -> Result<Vec<Vec<u32>>, GenerationError> {
        let fits = |prompt: &Vec<u32>| !prompt.is_empty() && prompt.len() < sampling.max_length;
        let asked: Vec<usize> = (0..prompts.len()).filter(|row| fits(&prompts[*row])).collect();
        let requests: Vec<Request> =
            asked.iter().map(|row| Request { prompt: prompts[*row].clone(), sample: *row as u64 }).collect();
        let options = SamplingOptions {
            temperature: sampling.temperature,
            top_k: None,
            top_p: None,
            seed: sampling.seed,
        };
        let limits = Limits { max_new_tokens: Some(sampling.max_tokens), stop: Vec::new() };
        let session = self.engine.with(parameters)?;
        let generation = session.generate(&requests, &options, &limits, |event| match event {
            GenerationEvent::Token(token) if sampling.ends.contains(&token.token) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })?;
        let mut answers = vec![Vec::new(); prompts.len()];
        for (row, answer) in asked.into_iter().zip(generation.rows) {
            answers[row] = answer.tokens;
        }
        Ok(answers)
    }
}
