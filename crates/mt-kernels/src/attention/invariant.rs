//! Attention whose result for a query does not depend on what is computed beside it.
//!
//! A query's keys are counted in the order of its text, and blocks of them begin at multiples of [`KEYS`] in that order.
//! So a query visits the same blocks, and sums in the same order, whether it is read alone or with others, and whether its
//! keys are those of the call, of slots or of pages. Threads divide queries and heads, never the keys of a query.

use std::ops::Range;

use super::{
    Cache, Element, MASKED, Mask, Options,
    operands::{Operand, Outcome, Row, Shape},
    scratch::{floats, with_scratch, words},
};
use crate::{
    Team,
    simd::{Simd, Work, transpose, with_simd},
};

/// Keys of a block.
const KEYS: usize = 64;

/// Positions of a task. Their queries share the block of keys that a task prepares.
const POSITIONS: usize = 16;

/// Rows whose sums are in registers together, and vectors of each.
const ROWS: usize = 4;
const VECTORS: usize = 2;

/// The arrays of the call. Queries are already scaled.
#[derive(Clone, Copy)]
pub struct InvariantInputs<'a, E> {
    pub query: Operand<'a, E>,
    pub key: Operand<'a, E>,
    pub value: Operand<'a, E>,
    pub keys: InvariantKeys<'a, E>,
    /// `[kv_heads, group]`: for each query head, the score of an additional key whose value is zero.
    pub sinks: &'a [f32],
    /// The width of values, which may differ from that of keys.
    pub value_dim: usize,
}

/// The keys that queries see.
#[derive(Clone, Copy)]
pub enum InvariantKeys<'a, E> {
    /// Those of the call. `segments` are `[batch, length]`: a query sees only keys with its own segment number.
    Own { segments: &'a [i32] },
    /// Those of a cache, and behind them the keys of the call.
    Cached { key: Operand<'a, E>, value: Operand<'a, E>, cache: Cache<'a> },
}

/// The results, in the shape of the queries.
pub struct InvariantResults<'a, E> {
    /// The last dimension is that of values.
    pub context: Outcome<'a, E>,
    /// The logarithm of the sum of each query's exponentiated scores.
    pub log_sums: Option<Outcome<'a, f32>>,
    /// Each query's largest score, before soft-capping.
    pub largest_scores: Option<Outcome<'a, f32>>,
}

/// Computes the context of all queries.
///
/// # Panics
/// The sizes of the arrays do not match.
pub fn attend_invariantly<E: Element>(
    team: &dyn Team,
    options: &Options,
    inputs: &InvariantInputs<'_, E>,
    results: &InvariantResults<'_, E>,
) {
    with_simd!(options.instructions, simd => run(team, simd, options, inputs, results));
}

fn run<S: Simd, E: Element>(
    team: &dyn Team,
    simd: S,
    options: &Options,
    inputs: &InvariantInputs<'_, E>,
    results: &InvariantResults<'_, E>,
) {
    let Shape { batch, length, kv_heads, group, head_dim } = options.shape;
    assert!(inputs.sinks.len() == kv_heads * group, "there is a sink of each head");
    let texts = match inputs.keys {
        InvariantKeys::Own { segments } => {
            assert!(segments.len() == batch * length, "each position has a segment");
            texts_of_segments(segments, length)
        }
        InvariantKeys::Cached { cache, .. } => texts_of_cache(cache, batch, length),
    };
    let mut tasks: Vec<(usize, Range<usize>, usize)> = Vec::new();
    for (text, Text { queries, .. }) in texts.iter().enumerate() {
        for first in (0..queries.len()).step_by(POSITIONS) {
            let range = first..(first + POSITIONS).min(queries.len());
            tasks.extend((0..kv_heads).map(|kv_head| (text, range.clone(), kv_head)));
        }
    }
    let key_width = head_dim.next_multiple_of(S::WIDTH);
    let value_width = inputs.value_dim.next_multiple_of(VECTORS * S::WIDTH);
    team.for_each(tasks.len(), &|index| {
        let (text, range, kv_head) = tasks[index].clone();
        let text = &texts[text];
        let queries = &text.queries[range];
        let rows = queries.len() * group;
        let sizes = [
            rows * head_dim,
            KEYS * key_width,
            key_width * KEYS,
            KEYS * value_width,
            rows * KEYS,
            rows * value_width,
            rows * S::WIDTH,
            2 * rows,
        ];
        with_scratch(sizes, |words| {
            let [queries_of, keys, columns, values, scores, totals, sums, largest] = words.map(floats);
            let (largest, uncapped) = largest.split_at_mut(rows);
            let scratch = Scratch {
                queries: queries_of,
                keys,
                columns,
                values,
                scores,
                totals,
                sums,
                largest,
                uncapped,
            };
            let widths = [key_width, value_width];
            let task = Task { simd, options, inputs, results, text, queries, kv_head, widths };
            simd.run(Prepared { task, scratch });
        });
    });
}

/// A position of the call's queries, and its number in the text.
#[derive(Clone, Copy)]
struct Place {
    position: usize,
    number: usize,
}

/// A text: the keys that its queries may see, in order.
struct Text<'a> {
    batch: usize,
    keys: TextKeys<'a>,
    queries: Vec<Place>,
}

enum TextKeys<'a> {
    /// Positions of the call, in ascending order.
    Positions(Vec<usize>),
    /// Slots of the row, in ascending order. `own` is that of the call's token.
    Slots { slots: Vec<usize>, own: usize },
    /// The first `before` keys lie in pages, the others are those of the call.
    Pages { table: &'a [i32], page_size: usize, before: usize, length: usize },
}

/// The place of a key in memory.
enum Location {
    Own { position: usize },
    Cached { batch: usize, position: usize },
}

/// The texts of rows whose queries attend to the keys of the call.
fn texts_of_segments(segments: &[i32], length: usize) -> Vec<Text<'static>> {
    let mut texts = Vec::new();
    for (batch, segments) in segments.chunks_exact(length.max(1)).enumerate() {
        // A row has few segments, and most often each is one stretch.
        let mut known: Vec<(i32, Vec<usize>)> = Vec::new();
        for (position, segment) in segments.iter().enumerate() {
            match known.iter_mut().rev().find(|(other, _)| other == segment) {
                Some((_, positions)) => positions.push(position),
                None => known.push((*segment, vec![position])),
            }
        }
        texts.extend(known.into_iter().map(|(_, positions)| {
            let places = positions.iter().enumerate();
            let queries = places.map(|(number, position)| Place { position: *position, number }).collect();
            Text { batch, keys: TextKeys::Positions(positions), queries }
        }));
    }
    texts
}

/// The texts of rows whose queries attend to a cache: one for each row.
fn texts_of_cache(cache: Cache<'_>, batch: usize, length: usize) -> Vec<Text<'_>> {
    match cache {
        Cache::Slots { slot, segments, cached_segments } => {
            let num_slots = cached_segments.len() / batch.max(1);
            let is_right = length == 1 && segments.len() == batch && slot < num_slots;
            assert!(is_right, "each row has one token, and slots for those before");
            let rows = cached_segments.chunks_exact(num_slots).zip(segments).enumerate();
            rows.map(|(batch, (cached, segment))| {
                let slots: Vec<usize> = (0..=slot).filter(|slot| cached[*slot] == *segment).collect();
                let number = slots.len().saturating_sub(1);
                let queries = vec![Place { position: 0, number }];
                Text { batch, keys: TextKeys::Slots { slots, own: slot }, queries }
            })
            .collect()
        }
        Cache::Pages { page_size, before, table } => {
            let width = table.len() / batch.max(1);
            let fits = |before: &i32| *before as usize <= width * page_size;
            assert!(before.len() == batch && before.iter().all(fits), "pages hold the tokens before");
            let rows = before.iter().enumerate();
            rows.map(|(batch, before)| {
                let before = (*before).max(0) as usize;
                let table = &table[batch * width..][..width];
                let place = |position| Place { position, number: before + position };
                let queries = (0..length).map(place).collect();
                Text { batch, keys: TextKeys::Pages { table, page_size, before, length }, queries }
            })
            .collect()
        }
    }
}

impl Text<'_> {
    fn len(&self) -> usize {
        match &self.keys {
            TextKeys::Positions(keys) => keys.len(),
            TextKeys::Slots { slots, .. } => slots.len(),
            TextKeys::Pages { before, length, .. } => before + length,
        }
    }

    /// The position of a key by which masks count. Masks of packed rows count the positions of the row.
    fn counted(&self, number: usize) -> usize {
        match &self.keys {
            TextKeys::Positions(keys) => keys[number],
            _ => number,
        }
    }

    /// The number of the first key at a position or behind it.
    fn first_from(&self, position: usize) -> usize {
        match &self.keys {
            TextKeys::Positions(keys) => keys.partition_point(|key| *key < position),
            _ => position.min(self.len()),
        }
    }

    /// The keys that a query sees.
    fn visible(&self, mask: Mask, number: usize) -> Range<usize> {
        if self.len() == 0 {
            return 0..0;
        }
        let position = self.counted(number);
        let mut first = mask.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut end = if mask.causal { number + 1 } else { self.len() };
        if let Some(chunk) = mask.chunk {
            first = first.max(position / chunk * chunk);
            end = end.min(self.first_from((position / chunk + 1) * chunk));
        }
        self.first_from(first)..end
    }

    fn location(&self, number: usize) -> Location {
        match &self.keys {
            TextKeys::Positions(keys) => Location::Own { position: keys[number] },
            TextKeys::Slots { slots, own } if slots[number] == *own => Location::Own { position: 0 },
            TextKeys::Slots { slots, .. } => Location::Cached { batch: self.batch, position: slots[number] },
            TextKeys::Pages { before, .. } if number >= *before => {
                Location::Own { position: number - before }
            }
            TextKeys::Pages { table, page_size, .. } => {
                let page = table[number / page_size].max(0) as usize;
                Location::Cached { batch: page, position: number % page_size }
            }
        }
    }
}

/// Some queries of a text, for one head of keys.
struct Task<'a, S, E> {
    simd: S,
    options: &'a Options,
    inputs: &'a InvariantInputs<'a, E>,
    results: &'a InvariantResults<'a, E>,
    text: &'a Text<'a>,
    queries: &'a [Place],
    kv_head: usize,
    /// The padded widths of keys and of values.
    widths: [usize; 2],
}

/// A task with its memory.
struct Prepared<'a, 'b, S, E> {
    task: Task<'a, S, E>,
    scratch: Scratch<'b>,
}

impl<S: Simd, E: Element> Work for Prepared<'_, '_, S, E> {
    #[inline(always)]
    fn run(self) {
        self.task.attend(self.scratch);
    }
}

/// The memory of a task.
struct Scratch<'a> {
    /// `[rows, head_dim]`
    queries: &'a mut [f32],
    /// The keys of a block: `[keys, head_dim]`, padded.
    keys: &'a mut [f32],
    /// The keys of a block: `[head_dim, keys]`.
    columns: &'a mut [f32],
    /// The values of a block: `[keys, value_dim]`, padded.
    values: &'a mut [f32],
    /// `[rows, keys]`
    scores: &'a mut [f32],
    /// Sums of weighted values: `[rows, value_dim]`, padded.
    totals: &'a mut [f32],
    /// Sums of weights, a vector for each row.
    sums: &'a mut [f32],
    /// The largest scores so far, with and without the soft cap.
    largest: &'a mut [f32],
    uncapped: &'a mut [f32],
}

impl<S: Simd, E: Element> Task<'_, S, E> {
    #[inline(always)]
    fn attend(&self, mut scratch: Scratch<'_>) {
        let Self { simd, options, inputs, text, queries, kv_head, .. } = *self;
        let [key_width, value_width] = self.widths;
        let Shape { group, head_dim, .. } = options.shape;
        for (index, row) in scratch.queries.chunks_exact_mut(head_dim).enumerate() {
            let position = queries[index / group].position;
            let from = inputs.query.row(Row { batch: text.batch, position, kv_head, group: index % group });
            for (wide, number) in row.iter_mut().zip(from) {
                *wide = number.to_f32();
            }
        }
        scratch.totals.fill(0.0);
        scratch.sums.fill(0.0);
        scratch.largest.fill(MASKED);
        scratch.uncapped.fill(MASKED);
        let mut visible = [(0, 0); POSITIONS];
        // The keys that any query of the task sees.
        let mut all: Option<Range<usize>> = None;
        for (visible, place) in visible.iter_mut().zip(queries) {
            let range = text.visible(options.mask, place.number);
            if !range.is_empty() {
                let known = all.unwrap_or_else(|| range.clone());
                all = Some(known.start.min(range.start)..known.end.max(range.end));
            }
            *visible = (range.start, range.end);
        }
        let all = all.unwrap_or(0..0);
        let mut block = all.start / KEYS * KEYS;
        while block < all.end {
            self.prepare(&mut scratch, block, &all);
            transpose(simd, [KEYS, key_width], words(scratch.keys), key_width, words(scratch.columns), KEYS);
            self.block(&mut scratch, block, &visible, value_width);
            block += KEYS;
        }
        self.finish(&mut scratch, value_width);
    }

    /// Copies the keys and values of a block as `f32`. Those that no query of the task sees are zero.
    #[inline(always)]
    fn prepare(&self, scratch: &mut Scratch<'_>, block: usize, all: &Range<usize>) {
        let Self { inputs, text, kv_head, widths, .. } = *self;
        let keys = scratch.keys.chunks_exact_mut(widths[0]);
        let values = scratch.values.chunks_exact_mut(widths[1]);
        for (index, (key, value)) in keys.zip(values).enumerate() {
            let number = block + index;
            if !all.contains(&number) {
                key.fill(0.0);
                value.fill(0.0);
                continue;
            }
            let (own_key, own_value) = match (text.location(number), inputs.keys) {
                (Location::Cached { batch, position }, InvariantKeys::Cached { key, value, .. }) => {
                    let row = Row { batch, position, kv_head, group: 0 };
                    (key.row(row), value.row(row))
                }
                (Location::Own { position } | Location::Cached { position, .. }, _) => {
                    let row = Row { batch: text.batch, position, kv_head, group: 0 };
                    (inputs.key.row(row), inputs.value.row(row))
                }
            };
            widen(own_key, key);
            widen(own_value, value);
        }
    }

    /// Adds a block of keys to the sums of all rows.
    #[inline(always)]
    fn block(
        &self,
        scratch: &mut Scratch<'_>,
        block: usize,
        visible: &[(usize, usize); POSITIONS],
        value_width: usize,
    ) {
        let Self { simd, options, queries, .. } = *self;
        let Shape { group, head_dim, .. } = options.shape;
        let rows = queries.len() * group;
        let mut row = 0;
        while row < rows {
            let count = if rows - row >= ROWS { ROWS } else { 1 };
            // Rows of other positions see other keys, so some rows may see none of the block.
            let mut ranges = [0..0, 0..0, 0..0, 0..0];
            let mut sees = false;
            for (index, range) in ranges.iter_mut().enumerate().take(count) {
                let (start, end) = visible[(row + index) / group];
                let (start, end) = (start.max(block), end.min(block + KEYS));
                if start < end {
                    *range = start - block..end - block;
                    sees = true;
                }
            }
            if !sees {
                row += count;
                continue;
            }
            let query = &scratch.queries[row * head_dim..][..count * head_dim];
            let scores = &mut scratch.scores[row * KEYS..][..count * KEYS];
            match count {
                ROWS => products::<S, ROWS>(simd, query, scratch.columns, head_dim, scores),
                _ => products::<S, 1>(simd, query, scratch.columns, head_dim, scores),
            }
            let mut are_whole = count == ROWS;
            for (index, range) in ranges.iter().enumerate().take(count) {
                are_whole &= range.len() == KEYS;
                if !range.is_empty() {
                    self.weigh(scratch, row + index, range.clone(), value_width);
                }
            }
            if are_whole {
                let weights = &scratch.scores[row * KEYS..][..ROWS * KEYS];
                let totals = &mut scratch.totals[row * value_width..][..ROWS * value_width];
                add_values::<S, ROWS>(simd, weights, 0..KEYS, scratch.values, value_width, totals);
            } else {
                for (index, range) in ranges.into_iter().enumerate().take(count) {
                    let weights = &scratch.scores[(row + index) * KEYS..][..KEYS];
                    let totals = &mut scratch.totals[(row + index) * value_width..][..value_width];
                    add_values::<S, 1>(simd, weights, range, scratch.values, value_width, totals);
                }
            }
            row += count;
        }
    }

    /// Turns the scores of a row into weights, and rescales its sums.
    #[inline(always)]
    fn weigh(&self, scratch: &mut Scratch<'_>, row: usize, range: Range<usize>, value_width: usize) {
        let Self { simd, options, .. } = *self;
        let scores = &mut scratch.scores[row * KEYS..][..KEYS];
        if self.results.largest_scores.is_some() {
            let seen = scores[range.clone()].iter();
            scratch.uncapped[row] = seen.fold(scratch.uncapped[row], |largest, score| largest.max(*score));
        }
        if let Some(cap) = options.soft_cap {
            for scores in scores.chunks_exact_mut(S::WIDTH) {
                let capped = simd.tanh(simd.div(simd.load(scores), simd.splat(cap)));
                simd.store(simd.mul(capped, simd.splat(cap)), scores);
            }
        }
        scores[..range.start].fill(MASKED);
        scores[range.end..].fill(MASKED);
        let before = scratch.largest[row];
        let mut largest = before;
        for score in scores[range].iter() {
            largest = largest.max(*score);
        }
        let factor = (before - largest).exp();
        let lanes = &mut scratch.sums[row * S::WIDTH..][..S::WIDTH];
        let mut sums = simd.mul(simd.load(lanes), simd.splat(factor));
        for scores in scores.chunks_exact_mut(S::WIDTH) {
            let weights = simd.exp(simd.sub(simd.load(scores), simd.splat(largest)));
            sums = simd.add(sums, weights);
            simd.store(weights, scores);
        }
        simd.store(sums, lanes);
        scratch.largest[row] = largest;
        if factor != 1.0 {
            let totals = &mut scratch.totals[row * value_width..][..value_width];
            for totals in totals.chunks_exact_mut(S::WIDTH) {
                simd.store(simd.mul(simd.load(totals), simd.splat(factor)), totals);
            }
        }
    }

    /// Divides the sums of weighted values by those of weights, and writes the results.
    #[inline(always)]
    fn finish(&self, scratch: &mut Scratch<'_>, value_width: usize) {
        let Self { options, inputs, results, text, queries, kv_head, .. } = *self;
        let Shape { group, .. } = options.shape;
        let rows = scratch.totals.chunks_exact_mut(value_width).zip(scratch.sums.chunks_exact(S::WIDTH));
        for (index, (totals, lanes)) in rows.enumerate() {
            let sink = inputs.sinks[kv_head * group + index % group];
            let largest = scratch.largest[index].max(sink);
            let factor = (scratch.largest[index] - largest).exp();
            let sum = lanes.iter().sum::<f32>() * factor + (sink - largest).exp();
            for total in totals.iter_mut() {
                *total = *total * factor / sum;
            }
            let position = queries[index / group].position;
            let row = Row { batch: text.batch, position, kv_head, group: index % group };
            // SAFETY: each query belongs to one task.
            unsafe {
                results.context.write(row, totals);
                if let Some(log_sums) = &results.log_sums {
                    log_sums.write(row, &[largest + sum.ln()]);
                }
                if let Some(largest_scores) = &results.largest_scores {
                    largest_scores.write(row, &[scratch.uncapped[index]]);
                }
            }
        }
    }
}

/// Widens elements to `f32`, followed by zeros.
#[inline(always)]
fn widen<E: Element>(from: &[E], to: &mut [f32]) {
    let (own, rest) = to.split_at_mut(from.len());
    for (wide, number) in own.iter_mut().zip(from) {
        *wide = number.to_f32();
    }
    rest.fill(0.0);
}

/// The products of queries, `[R, head_dim]`, with all keys of a block, `[head_dim, keys]`. Each is summed in the order
/// of the head's dimensions.
#[inline(always)]
fn products<S: Simd, const R: usize>(
    simd: S,
    queries: &[f32],
    columns: &[f32],
    head_dim: usize,
    scores: &mut [f32],
) {
    assert!(queries.len() == R * head_dim && scores.len() == R * KEYS);
    let (columns, _) = columns.as_chunks::<KEYS>();
    for start in (0..KEYS).step_by(VECTORS * S::WIDTH) {
        let mut sums = [[simd.splat(0.0); VECTORS]; R];
        for (dimension, column) in columns.iter().enumerate().take(head_dim) {
            let mut keys = [simd.splat(0.0); VECTORS];
            for (vector, keys) in keys.iter_mut().enumerate() {
                *keys = simd.load(&column[start + vector * S::WIDTH..]);
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let query = simd.splat(queries[row * head_dim + dimension]);
                for (sum, keys) in sums.iter_mut().zip(keys) {
                    *sum = simd.mul_add(query, keys, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                simd.store(sum, &mut scores[row * KEYS + start + vector * S::WIDTH..]);
            }
        }
    }
}

/// Adds the values of some keys of a block, weighted, to the totals of rows, `[R, value_width]`, key after key.
#[inline(always)]
fn add_values<S: Simd, const R: usize>(
    simd: S,
    weights: &[f32],
    keys: Range<usize>,
    values: &[f32],
    value_width: usize,
    totals: &mut [f32],
) {
    assert!(weights.len() == R * KEYS && keys.end <= KEYS && totals.len() == R * value_width);
    for start in (0..value_width).step_by(VECTORS * S::WIDTH) {
        let mut sums = [[simd.splat(0.0); VECTORS]; R];
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                *sum = simd.load(&totals[row * value_width + start + vector * S::WIDTH..]);
            }
        }
        for key in keys.clone() {
            let value = &values[key * value_width..][..value_width];
            let mut vectors = [simd.splat(0.0); VECTORS];
            for (vector, own) in vectors.iter_mut().enumerate() {
                *own = simd.load(&value[start + vector * S::WIDTH..]);
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = simd.splat(weights[row * KEYS + key]);
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = simd.mul_add(weight, vector, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                simd.store(sum, &mut totals[row * value_width + start + vector * S::WIDTH..]);
            }
        }
    }
}
