//! Support for measurements of the work around a model.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use super::{
    EngineHandle, Prepared, ServeOptions, ServedModel, TokenChoice, TokenLogProbability,
    host_pages::PageMove,
    pages::PageId,
    scheduler::{PoolOptions, Scheduler, SchedulerOptions, StateCopy},
    steps::{DeviceSteps, Drafts, StepChoice, StepRow, Steps},
};
use crate::EngineError;

/// The mean time of `count` steps of `num_rows` rows, the first of which has `before` tokens before it, without a scheduler
/// and clients: if the host waits for each step before it starts the next one, and if it starts that one before. All layers
/// of the model have to see all tokens.
///
/// # Errors
/// The model cannot be served, or a step fails.
pub fn time_of_steps(
    served: ServedModel,
    options: ServeOptions,
    num_rows: usize,
    before: usize,
    count: usize,
) -> Result<[Duration; 2], EngineError> {
    let sizes = options.step_sizes();
    let Prepared { mut steps, options, .. } = served.prepare(options, &sizes)?;
    let of_row = (before + count + 1).div_ceil(options.page_size);
    let table = |row: usize| (0..of_row).map(|page| (1 + row * of_row + page) as PageId).collect();
    let tables: Vec<[Vec<PageId>; 1]> = (0..num_rows).map(|row| [table(row)]).collect();
    let texts: Vec<Vec<u32>> =
        (0..num_rows as u32).map(|row| (row..row + before as u32).map(|t| t % 50).collect()).collect();
    let row = |index: usize, tokens, before| StepRow {
        tokens,
        from: None,
        before,
        tables: &tables[index][..],
        entry: index as u32 + 1,
        adapter: 0,
    };
    for (index, text) in texts.iter().enumerate() {
        let pieces = text.chunks(options.prefill_chunk_size).enumerate();
        for (number, piece) in pieces {
            steps.read(&[row(index, piece, number * options.prefill_chunk_size)], &[&[]], None)?;
        }
    }
    let choice = TokenChoice::GREEDY;
    let choices: Vec<StepChoice<'_>> = (0..num_rows as u64)
        .map(|answer| StepChoice { choice: &choice, seed: 0, answer, num_top: 0, adjustment: None })
        .collect();
    let start = |steps: &mut DeviceSteps, place: usize| {
        let from = |index| (place > before).then_some(index);
        let rows: Vec<StepRow<'_>> =
            (0..num_rows).map(|index| StepRow { from: from(index), ..row(index, &[1], place) }).collect();
        steps.start(&rows, &choices)
    };
    // Programs are compiled when they are first used.
    let pending = start(&mut steps, before)?;
    steps.finish(pending)?;
    let places = before + 1..=before + count;
    let mean = |started: Instant| started.elapsed() / u32::try_from(count).unwrap_or(u32::MAX);
    let started = Instant::now();
    for place in places.clone() {
        let pending = start(&mut steps, place)?;
        steps.finish(pending)?;
    }
    let waiting = mean(started);
    let mut last = start(&mut steps, before)?;
    let started = Instant::now();
    for place in places {
        let next = start(&mut steps, place)?;
        steps.finish(std::mem::replace(&mut last, next))?;
    }
    steps.finish(last)?;
    Ok([waiting, mean(started)])
}

/// An engine with a model that costs nothing: it chooses `tokens` one after the other, without looking at the text. Its
/// cache has room for all sequences.
pub fn blind_engine(options: ServeOptions, tokens: Range<u32>) -> EngineHandle {
    let ServeOptions { page_size, max_sequences, prefill_chunk_size, .. } = options;
    let of_sequence = options.prompts.max_target_length.div_ceil(page_size);
    let scheduler = Scheduler::new(SchedulerOptions {
        page_size,
        pools: vec![PoolOptions { reach: None, num_pages: 1 + max_sequences * of_sequence }],
        num_sequences: max_sequences,
        piece: prefill_chunk_size,
        keeps_prefixes: options.enable_prefix_caching,
        num_snapshots: None,
    });
    let sizes = options.step_sizes();
    EngineHandle::run(Blind { tokens }, scheduler, options, &sizes)
}

struct Blind {
    tokens: Range<u32>,
}

impl Steps for Blind {
    type Pending = Vec<u32>;

    fn copy(&mut self, _copy: &StateCopy) -> Result<(), EngineError> {
        Ok(())
    }

    fn read(
        &mut self,
        rows: &[StepRow<'_>],
        _targets: &[&[u32]],
        _scores: Option<usize>,
    ) -> Result<Vec<Vec<TokenLogProbability>>, EngineError> {
        Ok(rows.iter().map(|_| Vec::new()).collect())
    }

    fn start(&mut self, rows: &[StepRow<'_>], _choices: &[StepChoice<'_>]) -> Result<Vec<u32>, EngineError> {
        let count = self.tokens.len().max(1);
        Ok(rows.iter().map(|row| self.tokens.start + (row.before % count) as u32).collect())
    }

    fn finish(&mut self, pending: Vec<u32>) -> Result<Vec<TokenLogProbability>, EngineError> {
        let scored = |token| TokenLogProbability { token, log_probability: -1.0, top: Vec::new() };
        Ok(pending.into_iter().map(scored).collect())
    }

    fn pool(&mut self, rows: &[StepRow<'_>], _weights: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, EngineError> {
        Ok(rows.iter().map(|_| Vec::new()).collect())
    }

    fn verify(
        &mut self,
        _rows: &[StepRow<'_>],
        _drafts: &[Drafts<'_>],
        _choices: &[StepChoice<'_>],
    ) -> Result<Vec<Vec<TokenLogProbability>>, EngineError> {
        unreachable!("the engine speculates on nothing")
    }

    fn save(&mut self, _forgotten: &[u64], _saved: &[PageMove]) -> Result<(), EngineError> {
        Ok(())
    }

    fn restore(&mut self, _restored: &[PageMove]) -> Result<(), EngineError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}
