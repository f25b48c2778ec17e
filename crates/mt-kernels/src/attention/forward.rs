//! The forward pass of self-attention.

use std::ops::Range;

use super::{
    Inputs, MASKED, Options, Outcome,
    format::Format,
    operands::Row,
    product::{Product, Rows, Start},
    scratch::{floats, with_scratch, words},
    sequence::{Columns, NUM_QUERIES, Sequence, Visit, Widths},
    simd::{Simd, Work, transpose},
};
use crate::Team;

/// Keys in a block: its scores with a block of queries fill half of an L1 cache of 32 KiB.
const NUM_KEYS: usize = 64;

/// The arrays that the forward pass writes.
pub struct Results<'a, E> {
    pub context: Outcome<'a, E>,
    /// The logarithm of the sum of each query's exponentiated scores.
    pub log_sums: Outcome<'a, f32>,
    /// Each query's largest score, before the soft cap and without its sink; `None` if the caller does not need it.
    pub largest_scores: Option<Outcome<'a, f32>>,
}

pub(super) fn run<F: Format>(
    team: &dyn Team,
    format: F,
    options: &Options,
    inputs: &Inputs<'_, F::Element>,
    results: &Results<'_, F::Element>,
) {
    let shape = options.shape;
    let num_sequences = shape.batch * shape.kv_heads;
    let sequence = |index: usize| Sequence::new(options, inputs, index, NUM_KEYS);
    let shares = sequence(0).shares(num_shares(team, num_sequences));
    team.for_each(num_sequences * shares.len(), &|task| {
        let sequence = sequence(task / shares.len());
        // The last queries see the most keys, and the longest tasks begin first.
        let query_blocks = shares[shares.len() - 1 - task % shares.len()].clone();
        let key_blocks = sequence.key_blocks(query_blocks.clone());
        let widths = Widths::new(shape.head_dim, F::STEP);
        let key_words = key_blocks.len() * NUM_KEYS * widths.row;
        let value_words = key_blocks.len() * widths.columns * (NUM_KEYS / F::STEP);
        let sizes = [
            key_words,
            value_words,
            NUM_QUERIES.max(NUM_KEYS) * widths.row,
            NUM_KEYS / F::STEP * widths.columns,
            widths.row * NUM_QUERIES,
            NUM_KEYS * NUM_QUERIES,
            NUM_KEYS / F::STEP * NUM_QUERIES,
            widths.columns * NUM_QUERIES,
            widths.columns * NUM_QUERIES,
        ];
        with_scratch(sizes, |[keys, values, rows, zipped, query, scores, weights, total, context]| {
            let [scores, total, context] = [scores, total, context].map(floats);
            let scratch = Scratch { keys, values, rows, zipped, query, scores, weights, total, context };
            let task = Task { format, sequence, widths, query_blocks, key_blocks, inputs, results, scratch };
            format.run(task);
        });
    });
}

/// The number of shares of each sequence that gives all threads work.
pub(super) fn num_shares(team: &dyn Team, num_sequences: usize) -> usize {
    match team.num_threads() {
        1 => 1,
        num_threads => (4 * num_threads).div_ceil(num_sequences).min(4 * num_threads),
    }
}

struct Scratch<'a> {
    /// `[block][key][word]`
    keys: &'a mut [u32],
    /// `[block][head_dim][words of keys]`
    values: &'a mut [u32],
    rows: &'a mut [u32],
    zipped: &'a mut [u32],
    /// `[word][query]`
    query: &'a mut [u32],
    /// `[key][query]`
    scores: &'a mut [f32],
    /// `[words of keys][query]`
    weights: &'a mut [u32],
    /// `[head_dim][query]`
    total: &'a mut [f32],
    /// `[query][head_dim]`
    context: &'a mut [f32],
}

/// Blocks of queries that share one KV head.
struct Task<'a, F: Format> {
    format: F,
    sequence: Sequence<'a>,
    widths: Widths,
    query_blocks: Range<usize>,
    key_blocks: Range<usize>,
    inputs: &'a Inputs<'a, F::Element>,
    results: &'a Results<'a, F::Element>,
    scratch: Scratch<'a>,
}

/// The running softmax of each query of a block.
struct Running {
    /// The largest score so far, initially the sink.
    largest: [f32; NUM_QUERIES],
    /// The sum of exponentials relative to `largest`.
    sum: [f32; NUM_QUERIES],
    largest_scores: [f32; NUM_QUERIES],
}

impl<F: Format> Work for Task<'_, F> {
    #[inline(always)]
    fn run(mut self) {
        self.pack();
        let bounds = self.sequence.segment_bounds(self.key_blocks.clone());
        for block in self.query_blocks.clone() {
            let columns = self.sequence.columns(block);
            let mut running = self.begin(&columns);
            let mut is_first = true;
            for key_block in self.key_blocks.clone() {
                let index = key_block - self.key_blocks.start;
                if let Some(visit) = self.sequence.visit(&columns, key_block, bounds[index]) {
                    self.visit(&columns, index, &visit, &mut running, is_first);
                    is_first = false;
                }
            }
            self.end(&columns, &running);
        }
    }
}

impl<F: Format> Task<'_, F> {
    /// Stores keys and values in the layouts that the products read.
    #[inline(always)]
    fn pack(&mut self) {
        let Scratch { keys, values, rows, zipped, .. } = &mut self.scratch;
        let keys = keys.chunks_exact_mut(NUM_KEYS * self.widths.row);
        let values = values.chunks_exact_mut(self.widths.columns * (NUM_KEYS / F::STEP));
        let rows = &mut rows[..NUM_KEYS * self.widths.row];
        for (block, (keys, values)) in self.key_blocks.clone().zip(keys.zip(values)) {
            self.sequence.copy_keys(self.format, self.widths, block, &self.inputs.key, keys);
            self.sequence.copy_keys(self.format, self.widths, block, &self.inputs.value, rows);
            self.sequence.transpose_keys(self.format, self.widths, rows, zipped, values);
        }
    }

    #[inline(always)]
    fn begin(&mut self, columns: &Columns) -> Running {
        let Scratch { rows, query, .. } = &mut self.scratch;
        let rows = &mut rows[..NUM_QUERIES * self.widths.row];
        columns.copy_rows(self.format, self.widths, &self.inputs.query, rows);
        let sizes = [NUM_QUERIES, self.widths.row];
        transpose(self.format.simd(), sizes, rows, self.widths.row, query, NUM_QUERIES);
        // Each sink is the first score of its query. Relative to itself, its exponential is 1; its value is 0.
        let mut largest = [MASKED; NUM_QUERIES];
        if let Some(sinks) = self.inputs.sinks {
            for (largest, row) in largest.iter_mut().zip(columns.rows()) {
                *largest = sinks[row.kv_head * self.sequence.options.shape.group + row.group];
            }
        }
        Running { largest, sum: [1.0; NUM_QUERIES], largest_scores: [MASKED; NUM_QUERIES] }
    }

    #[inline(always)]
    fn visit(
        &mut self,
        columns: &Columns,
        index: usize,
        visit: &Visit,
        running: &mut Running,
        is_first: bool,
    ) {
        let Self { format, widths, .. } = *self;
        let simd = format.simd();
        let Scratch { keys, values, query, scores, weights, total, .. } = &mut self.scratch;
        format.multiply(Product {
            format,
            num_rows: visit.count,
            num_columns: NUM_QUERIES,
            num_words: widths.words,
            left: Rows { words: &keys[index * NUM_KEYS * widths.row..], apart: widths.row },
            right: Rows { words: query, apart: NUM_QUERIES },
            start: Start::Zero,
            to: scores,
            to_apart: NUM_QUERIES,
        });
        let soft_cap = self.sequence.options.soft_cap;
        let key_segments = &self.sequence.segments[visit.start..][..visit.count];
        let with_scores = self.results.largest_scores.is_some();
        let mut fades = [0.0; NUM_QUERIES];
        for column in (0..NUM_QUERIES).step_by(F::Simd::WIDTH) {
            if with_scores {
                let mut next = simd.load(&running.largest_scores[column..]);
                for (key, segment) in key_segments.iter().enumerate() {
                    let seen = columns.see(simd, column, visit.start + key, *segment);
                    let score = simd.load(&scores[key * NUM_QUERIES + column..]);
                    next = simd.max(next, simd.select(seen, score, simd.splat(MASKED)));
                }
                simd.store(next, &mut running.largest_scores[column..]);
            }
            let largest = simd.load(&running.largest[column..]);
            let mut next = largest;
            if soft_cap.is_none() && !visit.is_masked {
                for row in scores.chunks_exact(NUM_QUERIES).take(visit.count) {
                    next = simd.max(next, simd.load(&row[column..]));
                }
            } else {
                for (key, row) in scores.chunks_exact_mut(NUM_QUERIES).take(visit.count).enumerate() {
                    let mut score = capped(simd, simd.load(&row[column..]), soft_cap);
                    if visit.is_masked {
                        let seen = columns.see(simd, column, visit.start + key, key_segments[key]);
                        score = simd.select(seen, score, simd.splat(MASKED));
                    }
                    simd.store(score, &mut row[column..]);
                    next = simd.max(next, score);
                }
            }
            let mut sums = [simd.splat(0.0); 2];
            let weight_rows = weights.chunks_exact_mut(2 / F::STEP * NUM_QUERIES);
            for (pair, to) in scores.chunks_exact(2 * NUM_QUERIES).zip(weight_rows).take(visit.count / 2) {
                let first = simd.exp(simd.sub(simd.load(&pair[column..]), next));
                let second = simd.exp(simd.sub(simd.load(&pair[NUM_QUERIES + column..]), next));
                sums = [simd.add(sums[0], first), simd.add(sums[1], second)];
                format.store_rows(first, second, &mut to[column..], NUM_QUERIES);
            }
            if visit.count % 2 == 1 {
                let last = simd.load(&scores[(visit.count - 1) * NUM_QUERIES + column..]);
                let last = simd.exp(simd.sub(last, next));
                sums[0] = simd.add(sums[0], last);
                let to = &mut weights[(visit.count - 1) / F::STEP * NUM_QUERIES + column..];
                format.store_rows(last, simd.splat(0.0), to, NUM_QUERIES);
            }
            let fade = simd.exp(simd.sub(largest, next));
            let sum = simd.load(&running.sum[column..]);
            let sum = simd.mul_add(sum, fade, simd.add(sums[0], sums[1]));
            simd.store(next, &mut running.largest[column..]);
            simd.store(sum, &mut running.sum[column..]);
            simd.store(fade, &mut fades[column..]);
        }
        let value_words = NUM_KEYS / F::STEP;
        format.multiply(Product {
            format,
            num_rows: widths.head_dim,
            num_columns: NUM_QUERIES,
            num_words: cleared_words::<F>(weights, visit.count),
            left: Rows { words: &values[index * widths.columns * value_words..], apart: value_words },
            right: Rows { words: weights, apart: NUM_QUERIES },
            start: if is_first { Start::Zero } else { Start::Scaled(&fades) },
            to: total,
            to_apart: NUM_QUERIES,
        });
    }

    #[inline(always)]
    fn end(&mut self, columns: &Columns, running: &Running) {
        let simd = self.format.simd();
        let Scratch { total, context, .. } = &mut self.scratch;
        let mut shares = running.sum;
        for share in &mut shares {
            *share = 1.0 / *share;
        }
        for row in total.chunks_exact_mut(NUM_QUERIES).take(self.widths.head_dim) {
            for column in (0..NUM_QUERIES).step_by(F::Simd::WIDTH) {
                let mean = simd.mul(simd.load(&row[column..]), simd.load(&shares[column..]));
                simd.store(mean, &mut row[column..]);
            }
        }
        let sizes = [self.widths.columns, NUM_QUERIES];
        transpose(simd, sizes, words(total), NUM_QUERIES, words(context), self.widths.columns);
        for (column, row) in columns.rows().iter().enumerate() {
            // SAFETY: only this task writes the context of these queries.
            unsafe { self.results.context.write(*row, &context[column * self.widths.columns..]) };
            let log_sum = running.largest[column] + running.sum[column].ln();
            write_number(&self.results.log_sums, *row, log_sum);
            if let Some(largest_scores) = &self.results.largest_scores {
                write_number(largest_scores, *row, running.largest_scores[column]);
            }
        }
    }
}

/// The number of words that hold the weights of visited keys. Clears the words after them that products may read.
#[inline(always)]
fn cleared_words<F: Format>(weights: &mut [u32], num_keys: usize) -> usize {
    let num_words = num_keys.div_ceil(F::STEP);
    weights[num_words * NUM_QUERIES..num_words.next_multiple_of(F::WHOLE) * NUM_QUERIES].fill(0);
    num_words
}

fn write_number(to: &Outcome<'_, f32>, row: Row, number: f32) {
    // SAFETY: only one task writes the numbers of a query.
    unsafe { to.write(row, &[number]) };
}

#[inline(always)]
pub(super) fn capped<S: Simd>(simd: S, scores: S::Floats, soft_cap: Option<f32>) -> S::Floats {
    match soft_cap {
        Some(cap) => simd.mul(simd.tanh(simd.mul(scores, simd.splat(1.0 / cap))), simd.splat(cap)),
        None => scores,
    }
}
