//! Products of few lines with many, bounded by the rate at which memory delivers the many.
//!
//! The many lines are read once, where they lie; the few ones are packed. Which of them are the rows does not matter.

use std::ops::Range;

use super::buffer::Buffer;
use super::kernel::{Kernel, Out};
use super::pack::{Depth, Panels, Source};
use super::shape::{Problem, Side, offsets};
use crate::{Alone, Team};

/// The most lines of the smaller side.
pub(super) const FEW: usize = 16;

/// Below this many elements of the larger side a second thread costs more than it gains.
const SMALL: usize = 1 << 17;

/// The most lines of a task; their sums stay in the first two caches.
const TASK_LINES: usize = 2048;

/// The fewest lines of a task, if there are as many: shorter stretches of memory are read more slowly.
const SHORTEST_TASK: usize = 256;

/// Lines in multiples of this are computed without a remainder.
const LINES: usize = 128;

const TASKS_PER_THREAD: usize = 2;

/// How many words of a line follow each other in factors, where lines are not next to each other.
const VECTOR: usize = 16;

/// How a processor computes such products.
#[derive(Clone, Copy)]
pub(super) struct Streams {
    /// For lines next to each other.
    ///
    /// # Safety
    /// The processor has the instructions, and the strip's pointers reach as far as [`Strip`] says.
    pub across: unsafe fn(&Strip),
    /// For lines whose elements are next to each other along the contraction.
    ///
    /// # Safety
    /// As for `across`.
    pub along: unsafe fn(&Strip),
}

/// A part of the many lines.
pub(super) struct Strip<'a> {
    pub source: Source,
    /// Where each line begins.
    pub lines: &'a [usize],
    /// Where the contracted elements lie, relative to a line's begin.
    pub offsets: &'a [usize],
    /// The few lines: words `[steps, few]` for lines that are next to each other, `[steps / 16, few, 16]` otherwise, with
    /// zeros at the end.
    pub factors: *const u32,
    /// How many lines the factors have: a power of two of at most [`FEW`].
    pub few: usize,
    /// `[few, lines]`
    pub sums: *mut f32,
}

/// Computes a product if its shape is a suitable one.
pub(super) fn run(team: &dyn Team, kernel: &Kernel, problem: &Problem, out: Out) -> bool {
    let Some(streams) = &kernel.streams else { return false };
    let rows_are_few = problem.rows <= problem.columns;
    let (few, many) = match rows_are_few {
        true => (problem.rows, problem.columns),
        false => (problem.columns, problem.rows),
    };
    let (few_side, many_side) = match rows_are_few {
        true => (&problem.lhs, &problem.rhs),
        false => (&problem.rhs, &problem.lhs),
    };
    let across = matches!(*many_side.free, [dim] if dim.stride == 1);
    let along = matches!(*many_side.contract, [dim] if dim.stride == 1);
    if few > FEW || few * 4 > many || !(across || along) {
        return false;
    }
    let mut few_depth = Depth::default();
    few_depth.fill(&few_side.contract, 0..problem.depth);
    let mut many_depth = vec![0; problem.depth];
    offsets(&many_side.contract, 0, 0, &mut many_depth);
    let padded = few.next_power_of_two();
    let batch = problem.batch_len();
    let factors = Buffer::take(batch * factor_words(kernel, problem, padded));
    let call = Call {
        kernel,
        problem,
        out,
        streams,
        many_side,
        across,
        depth: &many_depth,
        factors: factors.words(),
        few,
        padded,
        many,
        rows_are_few,
    };
    for index in 0..batch {
        call.pack(few_side, &few_depth, index);
    }
    let threads = team.num_threads();
    let parts = (TASKS_PER_THREAD * threads).div_ceil(batch);
    let lines = (many.div_ceil(parts)).next_multiple_of(LINES).clamp(SHORTEST_TASK, TASK_LINES);
    let strips = many.div_ceil(lines);
    let alone = threads == 1 || batch * many * problem.depth <= SMALL;
    let team: &dyn Team = if alone { &Alone } else { team };
    team.for_each(batch * strips, &|index| {
        let start = index % strips * lines;
        call.strip(index / strips, start..(start + lines).min(many));
    });
    true
}

/// How many words the few lines of a batch element have.
fn factor_words(kernel: &Kernel, problem: &Problem, few: usize) -> usize {
    kernel.format.steps(problem.depth).next_multiple_of(VECTOR) * few
}

/// What all tasks of a call share.
struct Call<'a> {
    kernel: &'a Kernel,
    problem: &'a Problem<'a>,
    out: Out,
    streams: &'a Streams,
    many_side: &'a Side<'a>,
    across: bool,
    depth: &'a [usize],
    /// `[batch, …]`, see [`Strip::factors`].
    factors: *mut u32,
    few: usize,
    padded: usize,
    many: usize,
    rows_are_few: bool,
}

// SAFETY: tasks write to parts of the result that do not overlap.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    fn bases(&self, batch: usize) -> (usize, usize) {
        let (lhs, rhs) = self.problem.batch_offsets(batch);
        if self.rows_are_few { (lhs, rhs) } else { (rhs, lhs) }
    }

    fn factors(&self, batch: usize) -> *mut u32 {
        // SAFETY: the buffer has room for all batch elements.
        unsafe { self.factors.add(batch * self.factor_words()) }
    }

    fn factor_words(&self) -> usize {
        factor_words(self.kernel, self.problem, self.padded)
    }

    /// Packs the few lines of a batch element.
    fn pack(&self, side: &Side, depth: &Depth, batch: usize) {
        let factors = self.factors(batch);
        let steps = self.kernel.format.steps(self.problem.depth);
        let mut lines = [0; FEW];
        let lines = &mut lines[..self.few];
        offsets(&side.free, self.bases(batch).0, 0, lines);
        let lines_in_order = (!self.across).then(|| Buffer::take(self.few * steps));
        let panels = Panels {
            source: side.source(),
            lines,
            offsets: &depth.offsets,
            runs: &depth.runs,
            format: self.kernel.format,
            out: lines_in_order.as_ref().map_or(factors, |lines| lines.words()),
            width: if self.across { self.padded } else { 1 },
        };
        // SAFETY: all offsets lie in the operand, as was checked, and the buffers have room for the panels.
        unsafe { (self.kernel.pack)(&panels) };
        if let Some(lines) = lines_in_order {
            // SAFETY: the buffers have been taken with these sizes; the panels have been written.
            let (lines, out) = unsafe {
                let factors = std::slice::from_raw_parts_mut(
                    factors.cast::<[u32; VECTOR]>(),
                    self.factor_words() / VECTOR,
                );
                (std::slice::from_raw_parts(lines.words(), self.few * steps), factors)
            };
            out.fill([0; VECTOR]);
            for (few, line) in lines.chunks_exact(steps).enumerate() {
                for (block, words) in line.chunks(VECTOR).enumerate() {
                    out[block * self.padded + few][..words.len()].copy_from_slice(words);
                }
            }
        }
    }

    /// Computes some of the many lines of a batch element.
    fn strip(&self, batch: usize, range: Range<usize>) {
        let mut lines = [0; TASK_LINES];
        let lines = &mut lines[..range.len()];
        offsets(&self.many_side.free, self.bases(batch).1, range.start, lines);
        let sums = Buffer::take(self.padded * range.len());
        let strip = Strip {
            source: self.many_side.source(),
            lines,
            offsets: self.depth,
            factors: self.factors(batch),
            few: self.padded,
            sums: sums.words().cast(),
        };
        // SAFETY: all offsets lie in the operand, as was checked, and the buffers have room for the factors and sums.
        let sums = unsafe {
            (if self.across { self.streams.across } else { self.streams.along })(&strip);
            std::slice::from_raw_parts(strip.sums, self.few * range.len())
        };
        let first = batch * self.few * self.many;
        let (few_stride, many_stride) = if self.rows_are_few { (self.many, 1) } else { (1, self.few) };
        for (index, sums) in sums.chunks_exact(range.len()).enumerate() {
            let first = first + index * few_stride + range.start * many_stride;
            // SAFETY: the elements lie in the result, and belong to this strip alone.
            unsafe { self.out.add(first).write_all(sums, many_stride) };
        }
    }
}
