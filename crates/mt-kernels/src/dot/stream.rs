//! Products of few lines with many, bounded by the rate at which memory delivers the many.
//!
//! The many lines are read once, where they lie; the few ones are packed. Which of them are the rows does not matter.

use std::ops::Range;

use super::buffer::{Buffer, Pooled};
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

/// The fewest lines next to each other of which a task takes some. Fewer are all read by each task, for a stretch of the
/// contraction, as memory is read fastest in order.
const LONG_RUN: usize = 8192;

/// How many elements such a stretch has, unless there would be one or very many.
const STRETCH: usize = 1 << 18;

const MOST_STRETCHES: usize = 16;

/// The fewest lines of a task, if there are as many: shorter stretches of memory are read more slowly.
const SHORTEST_TASK: usize = 256;

/// From so many of the few lines on, sums do not stay in registers for long enough, and tasks have fewer of the many.
const FEW_REREAD: usize = 8;

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
    /// Where each line begins; only the first of those that are next to each other.
    pub lines: &'a [usize],
    pub num_lines: usize,
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
    let alone = threads == 1 || batch * many * problem.depth <= SMALL;
    let team: &dyn Team = if alone { &Alone } else { team };
    if across && padded < FEW_REREAD && many < LONG_RUN && many * problem.depth > SMALL {
        call.in_stretches(team, batch);
    } else {
        let parts = if alone { 1 } else { (TASKS_PER_THREAD * threads).div_ceil(batch) };
        let lines = many.div_ceil(parts).next_multiple_of(LINES).clamp(SHORTEST_TASK, TASK_LINES);
        let strips = many.div_ceil(lines);
        team.for_each(batch * strips, &|index| {
            let start = index % strips * lines;
            call.strip(index / strips, start..(start + lines).min(many));
        });
    }
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

    /// Computes all lines in stretches of the contraction, whose sums are added up in the end.
    /// Where these begin does not depend on the number of threads, and so sums do not.
    fn in_stretches(&self, team: &dyn Team, batch: usize) {
        let depth = self.problem.depth;
        let parts = (depth * self.many / STRETCH).clamp(2, MOST_STRETCHES);
        let stretch = depth.div_ceil(parts).next_multiple_of(VECTOR);
        let stretches = depth.div_ceil(stretch);
        let partial = Sums(Buffer::take(stretches * batch * self.padded * self.many));
        team.for_each(stretches * batch, &|index| {
            let start = index / batch * stretch;
            let sums = partial.at(index * self.padded * self.many);
            self.sum(index % batch, 0..self.many, start..(start + stretch).min(depth), sums);
        });
        for index in 0..batch {
            // SAFETY: all sums have been written, and nobody else has them now.
            let [sums, others @ ..] = &mut *Vec::from_iter((0..stretches).map(|stretch| unsafe {
                let start = partial.at((stretch * batch + index) * self.padded * self.many);
                std::slice::from_raw_parts_mut(start, self.few * self.many)
            })) else {
                continue;
            };
            for others in others {
                sums.iter_mut().zip(&**others).for_each(|(sum, other)| *sum += other);
            }
            self.write(sums, index, 0..self.many);
        }
    }

    /// Computes some of the many lines of a batch element.
    fn strip(&self, batch: usize, range: Range<usize>) {
        let sums = Buffer::take(self.padded * range.len());
        let sums = sums.words().cast();
        self.sum(batch, range.clone(), 0..self.problem.depth, sums);
        // SAFETY: the sums have been written.
        let sums = unsafe { std::slice::from_raw_parts(sums, self.few * range.len()) };
        self.write(sums, batch, range);
    }

    /// Sums products of some of the many lines: `[padded, lines]`.
    fn sum(&self, batch: usize, range: Range<usize>, depth: Range<usize>, sums: *mut f32) {
        let mut lines = [0; TASK_LINES];
        let lines = &mut lines[..if self.across { 1 } else { range.len() }];
        offsets(&self.many_side.free, self.bases(batch).1, range.start, lines);
        let steps_before = self.kernel.format.steps(depth.start);
        let strip = Strip {
            source: self.many_side.source(),
            lines,
            num_lines: range.len(),
            offsets: &self.depth[depth],
            // SAFETY: there are factors for all steps.
            factors: unsafe { self.factors(batch).add(steps_before * self.padded) },
            few: self.padded,
            sums,
        };
        // SAFETY: all offsets lie in the operand, as was checked, and there is room for the factors and sums.
        unsafe { (if self.across { self.streams.across } else { self.streams.along })(&strip) };
    }

    fn write(&self, sums: &[f32], batch: usize, lines: Range<usize>) {
        let first = batch * self.few * self.many;
        let (few_stride, many_stride) = if self.rows_are_few { (self.many, 1) } else { (1, self.few) };
        for (index, sums) in sums.chunks_exact(lines.len()).enumerate() {
            let first = first + index * few_stride + lines.start * many_stride;
            // SAFETY: the elements lie in the result, and belong to these lines alone.
            unsafe { self.out.add(first).write_all(sums, many_stride) };
        }
    }
}

/// Sums to which tasks write each their own part.
struct Sums(Pooled);

// SAFETY: see above.
unsafe impl Sync for Sums {}

impl Sums {
    fn at(&self, index: usize) -> *mut f32 {
        // SAFETY: callers ask for sums that there are.
        unsafe { self.0.words().cast::<f32>().add(index) }
    }
}
