//! Generation with an encoder: prompts are sources, and answers begin with the start token.
//!
//! The encoder's results belong to one sequence as a whole, so rows run in groups to their end, in arrays of their own instead
//! of pools.

use std::{
    ops::ControlFlow,
    time::{Duration, Instant},
};

use mt_runtime::{Array, Executable, Input, PendingArray, RuntimeError};
use mt_shape::{DType, HostArray};

use crate::{
    EngineError, FinishReason, GeneratedToken, Generation, GenerationEvent, Limits, Request, Row,
    SamplingOptions, Session, Timing, engine::Engine, program::ProgramKey, sampler::Sampler,
};

impl Engine {
    /// The sampler's inputs of a step, in the program's order.
    fn controls(
        &self,
        requests: &[Request],
        sampling: &SamplingOptions,
        sizes: Sizes,
    ) -> Result<Vec<Array>, EngineError> {
        let num_choices = self.programs.num_choices;
        let top_k = sampling.top_k.unwrap_or(num_choices).min(num_choices) as i32;
        let mut samples: Vec<u64> = requests.iter().map(|request| request.sample).collect();
        samples.resize(sizes.batch, 0);
        Ok(vec![
            self.replicated(DType::F32, &[], &[sampling.temperature as f32])?,
            self.replicated(DType::I32, &[], &[top_k])?,
            self.replicated(DType::F32, &[], &[sampling.top_p.unwrap_or(1.0) as f32])?,
            self.replicated(DType::U64, &[], &[sampling.seed])?,
            self.replicated(DType::U64, &[sizes.batch], &samples)?,
        ])
    }
}

impl Session<'_> {
    /// Answers sources, as [`Session::generate`] does.
    pub(crate) fn answer_sources(
        &self,
        requests: &[Request],
        sampling: &SamplingOptions,
        limits: &Limits,
        on_event: &mut dyn FnMut(GenerationEvent) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        let sampler = sampling.sampler(self.engine.programs.num_choices)?;
        let mut generation = Generation::default();
        for group in requests.chunks(self.engine.options.max_batch.max(1)) {
            let first = generation.rows.len();
            let mut on_event = |event| {
                on_event(match event {
                    GenerationEvent::Token(token) => {
                        GenerationEvent::Token(GeneratedToken { row: first + token.row, ..token })
                    }
                    GenerationEvent::Finished { row, reason } => {
                        GenerationEvent::Finished { row: first + row, reason }
                    }
                })
            };
            let (rows, timing) = self.answer_group(group, sampling, sampler, limits, &mut on_event)?;
            let total = &mut generation.timing;
            if first == 0 {
                total.first_token = timing.first_token;
            }
            total.compile += timing.compile;
            total.total += timing.total;
            total.num_tokens += timing.num_tokens;
            generation.rows.extend(rows);
        }
        Ok(generation)
    }

    fn answer_group(
        &self,
        requests: &[Request],
        sampling: &SamplingOptions,
        sampler: Sampler,
        limits: &Limits,
        on_event: &mut dyn FnMut(GenerationEvent) -> ControlFlow<()>,
    ) -> Result<(Vec<Row>, Timing), EngineError> {
        let mut answers: Vec<Answer> = requests
            .iter()
            .map(|request| {
                let room = self.engine.options.prompts.room(request.prompt.len());
                Answer::new(limits.max_new_tokens.unwrap_or(room).min(room))
            })
            .collect();
        let num_steps = answers.iter().map(|answer| answer.limit).max().unwrap_or(0);
        let mut timing = Timing::default();
        for (row, answer) in answers.iter().enumerate() {
            answer.report_end(row, on_event);
        }
        if num_steps == 0 {
            return Ok((answers.into_iter().map(Answer::into_row).collect(), timing));
        }

        let sizes = Sizes::of(requests, num_steps);
        let compiling = Instant::now();
        let prefill = self.engine.executable(sizes.prefill())?;
        let step = self.engine.executable(sizes.step(sampler))?;
        timing.compile = compiling.elapsed();

        let started = Instant::now();
        let mut state = self.prefill(&prefill, requests, sizes)?;
        let controls = match sampler {
            Sampler::Greedy => Vec::new(),
            _ => self.engine.controls(requests, sampling, sizes)?,
        };
        let mut waiting: Option<Pending> = None;
        for index in 0..=num_steps {
            // The next step runs while the host reads the tokens of the previous one. These tokens stay on the device
            // as the next step's input.
            let next = if index < num_steps { Some(self.step(&step, &mut state, &controls)?) } else { None };
            if let Some(pending) = waiting.take() {
                let read = pending.read()?;
                if timing.first_token == Duration::ZERO {
                    timing.first_token = started.elapsed();
                }
                for (row, answer) in
                    answers.iter_mut().enumerate().filter(|(_, answer)| answer.finish.is_none())
                {
                    let (token, log_probability) = read.of(row);
                    if log_probability.is_nan() {
                        let position = requests[row].prompt.len() + answer.tokens.len();
                        return Err(EngineError::NotANumber { position });
                    }
                    answer.receive(GeneratedToken { row, token, log_probability }, &limits.stop, on_event);
                    answer.report_end(row, on_event);
                }
                if answers.iter().all(|answer| answer.finish.is_some()) {
                    break;
                }
            }
            waiting = next;
        }
        timing.total = started.elapsed();
        timing.num_tokens = answers.iter().map(|answer| answer.tokens.len()).sum();
        Ok((answers.into_iter().map(Answer::into_row).collect(), timing))
    }

    /// Encodes the sources. The decoder's first slot holds no token, and its first step processes the start token.
    fn prefill(
        &self,
        executable: &Executable,
        requests: &[Request],
        sizes: Sizes,
    ) -> Result<State, EngineError> {
        let bounds = self.engine.options.prompts.source.expect("the model reads sources");
        let Sizes { batch, source, .. } = sizes;
        let (mut tokens, mut lengths) = (vec![0_i32; batch * source], vec![0_i32; batch]);
        for (row, request) in requests.iter().enumerate() {
            lengths[row] = request.prompt.len() as i32;
            for (place, token) in request.prompt.iter().enumerate() {
                tokens[row * source + place] = *token as i32;
            }
        }
        let integers = |dims: &[usize], values: &[i32]| self.engine.replicated(DType::I32, dims, values);
        let empty = integers(&[batch], &vec![0; batch])?;
        let given = [
            integers(&[batch, 1], &vec![0; batch])?,
            integers(&[batch], &vec![0; batch])?,
            integers(&[batch, source], &tokens)?,
            integers(&[batch], &lengths)?,
        ];
        let inputs = self.parameters.iter().chain(&given).map(Input::from);
        let mut arrays = executable.run(inputs.collect())?;
        arrays.push(empty);
        arrays.push(integers(&[], &[1])?);
        let first = vec![bounds.start_token.cast_signed(); batch];
        Ok(State { donated: arrays, tokens: integers(&[batch], &first)? })
    }

    /// Starts a step, and the copy of its tokens to the host.
    fn step(
        &self,
        executable: &Executable,
        state: &mut State,
        controls: &[Array],
    ) -> Result<Pending, EngineError> {
        let mut outputs = self.run_step(executable, state, controls)?;
        // The outputs after the donated state are the tokens and their log-probabilities.
        let [tokens, log_probabilities] = [outputs.remove(0), outputs.remove(0)];
        let pending = Pending {
            tokens: tokens.to_host_async()?,
            log_probabilities: log_probabilities.to_host_async()?,
        };
        state.tokens = tokens;
        Ok(pending)
    }

    /// Runs a step, which replaces the state except its tokens. Returns the remaining outputs of the program.
    fn run_step(
        &self,
        executable: &Executable,
        state: &mut State,
        controls: &[Array],
    ) -> Result<Vec<Array>, RuntimeError> {
        let donated = std::mem::take(&mut state.donated);
        let inputs = self
            .parameters
            .iter()
            .map(Input::from)
            .chain(donated.into_iter().map(Input::Donate))
            .chain([Input::Borrow(&state.tokens)])
            .chain(controls.iter().map(Input::from));
        let mut outputs = executable.run(inputs.collect())?;
        let others = outputs.split_off(self.engine.programs.num_donated());
        state.donated = outputs;
        Ok(others)
    }
}

/// The state between steps, on the devices.
struct State {
    /// Keys and values, the mask of slots that hold tokens, the position of each row's next token, and the next slot.
    donated: Vec<Array>,
    /// The tokens that the next step processes.
    tokens: Array,
}

/// The sizes of a batch's programs. They are rounded up, so that few programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub batch: usize,
    pub slots: usize,
    /// The tokens of sources.
    pub source: usize,
}

/// The minimum number of slots; fewer would not justify a separate program.
const MIN_SLOTS: usize = 16;

impl Sizes {
    fn of(requests: &[Request], num_steps: usize) -> Self {
        let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
        Self::with(requests.len(), longest, num_steps)
    }

    /// The sizes for `rows` sources of up to `source` tokens, and answers of up to `tokens` tokens.
    pub fn with(rows: usize, source: usize, tokens: usize) -> Self {
        // The decoder's text has no prompt, and prefill needs a slot.
        let needed = 1 + tokens;
        // Every step attends to all slots, so their number is rounded less: to eighths of a power of two.
        let grain = (needed.next_power_of_two() / 8).max(MIN_SLOTS);
        Self {
            batch: rows.next_power_of_two(),
            slots: needed.next_multiple_of(grain),
            source: source.next_power_of_two().max(MIN_SLOTS),
        }
    }

    pub fn prefill(self) -> ProgramKey {
        let Self { batch, slots, source } = self;
        ProgramKey::Prefill { batch, slots, source }
    }

    pub fn step(self, sampler: Sampler) -> ProgramKey {
        let Self { batch, slots, source } = self;
        ProgramKey::Step { batch, slots, source, sampler }
    }
}

/// The outputs of a step during their copy to the host.
struct Pending {
    tokens: PendingArray,
    log_probabilities: PendingArray,
}

/// The outputs of a step on the host.
struct Chosen {
    tokens: HostArray,
    log_probabilities: HostArray,
}

impl Pending {
    fn read(self) -> Result<Chosen, RuntimeError> {
        Ok(Chosen { tokens: self.tokens.wait()?, log_probabilities: self.log_probabilities.wait()? })
    }
}

impl Chosen {
    fn of(&self, row: usize) -> (u32, f32) {
        let tokens = self.tokens.as_slice::<i32>().expect("tokens have 32 bits");
        let log_probabilities = self.log_probabilities.as_slice().expect("log-probabilities have 32 bits");
        (tokens[row].cast_unsigned(), log_probabilities[row])
    }
}

/// An answer in progress.
struct Answer {
    tokens: Vec<u32>,
    log_probabilities: Vec<f32>,
    limit: usize,
    finish: Option<FinishReason>,
}

impl Answer {
    fn new(limit: usize) -> Self {
        let finish = (limit == 0).then_some(FinishReason::Length);
        Self { tokens: Vec::new(), log_probabilities: Vec::new(), limit, finish }
    }

    fn receive(
        &mut self,
        next: GeneratedToken,
        stop: &[u32],
        on_event: &mut dyn FnMut(GenerationEvent) -> ControlFlow<()>,
    ) {
        if stop.contains(&next.token) {
            self.finish = Some(FinishReason::Stop);
            return;
        }
        self.tokens.push(next.token);
        self.log_probabilities.push(next.log_probability);
        if on_event(GenerationEvent::Token(next)).is_break() {
            self.finish = Some(FinishReason::Cancelled);
        } else if self.tokens.len() == self.limit {
            self.finish = Some(FinishReason::Length);
        }
    }

    /// Reports the end of the answer, if it has ended.
    fn report_end(&self, row: usize, on_event: &mut dyn FnMut(GenerationEvent) -> ControlFlow<()>) {
        if let Some(reason) = self.finish {
            // The row has ended, so the return value has no effect.
            let _ = on_event(GenerationEvent::Finished { row, reason });
        }
    }

    fn into_row(self) -> Row {
        let finish = self.finish.unwrap_or(FinishReason::Length);
        Row { tokens: self.tokens, log_probabilities: self.log_probabilities, finish }
    }
}
