//! Products of few lines with many. Reading the many lines from memory limits their speed.
//!
//! The many lines are read once and in place; the few lines are packed. Either side may be the rows.

use std::ops::Range;

use mt_shape::kernels::thresholds;

use super::Elements;
use super::buffer::{Buffer, Pooled};
use super::kernel::{Kernel, Out};
use super::pack::{Depth, Format, Order, Panels, Source};
use super::shape::{Problem, Side, offsets};
use crate::{Alone, Team};

/// The most lines of the smaller side.
pub(super) const FEW: usize = thresholds::MOST_FEW_ROWS;

/// With fewer elements of the larger side than this, a second thread costs more than it gains.
const SMALL: usize = 1 << 17;

/// The most lines of a task; their sums stay in the L1 and L2 caches.
const TASK_LINES: usize = 2048;

/// The fewest contiguous lines that are divided among tasks. If there are fewer, each task reads all lines for a
/// stretch of the contraction, because memory is read fastest in order.
const LONG_RUN: usize = 8192;

/// The elements of such a stretch, unless there would be one stretch or very many.
const STRETCH: usize = 1 << 18;

const MOST_STRETCHES: usize = 16;

/// The fewest lines of a task, if the product has as many. Shorter runs of memory are read more slowly.
const SHORTEST_TASK: usize = 256;

/// With this number of few lines or more, sums are reread from memory too often, and tasks have fewer of the many
/// lines.
const FEW_REREAD: usize = 8;

/// The multiple to which the lines of a task are rounded. Kernels process it without a remainder.
const LINES: usize = 128;

const TASKS_PER_THREAD: usize = 2;

/// Consecutive words of a line in the factors, if the elements of lines are contiguous.
const VECTOR: usize = 16;

/// The functions of a kernel for such products.
#[derive(Clone, Copy)]
pub(super) struct Streams {
    /// For lines that are neighbors in memory.
    ///
    /// # Safety
    /// The processor has the instructions, and the strip's pointers reach as far as [`Strip`] says.
    pub across: unsafe fn(&Strip),
    /// For lines whose elements are contiguous along the contraction.
    ///
    /// # Safety
    /// As for `across`.
    pub along: unsafe fn(&Strip),
}

/// A range of the many lines.
pub(super) struct Strip<'a> {
    pub source: Source,
    /// The offset of each line's first element; of neighboring lines, only the first line's.
    pub lines: &'a [usize],
    pub num_lines: usize,
    /// The offsets of the contracted elements, relative to a line's first element.
    pub offsets: &'a [usize],
    /// The few lines: words `[steps, few]` if the many lines are neighbors, otherwise `[steps / 16, few, 16]`, padded
    /// with zeros.
    pub factors: *const u32,
    /// The number of lines in `factors`: a power of two, at most [`FEW`].
    pub few: usize,
    /// `[few, lines]`
    pub sums: *mut f32,
}

/// A product that can be streamed.
pub(super) struct Streamed<'a> {
    pub problem: Problem<'a>,
    pub form: Form,
    pub out: Out,
    /// The contracted elements that are summed apart, in the order of which their sums are added, if the order of sums
    /// must be that of products with many rows.
    pub block: Option<usize>,
}

/// Computes products concurrently: threads synchronize once, at the end.
pub(super) fn run(team: &dyn Team, kernel: &Kernel, products: &[Streamed]) {
    let Some(streams) = &kernel.streams else { return };
    let threads = team.num_threads();
    let sizes = products.iter().map(|Streamed { problem, form, .. }| {
        let (_, many) = form.sides(problem.rows, problem.columns);
        problem.batch_len() * many * problem.depth
    });
    let alone = threads == 1 || sizes.sum::<usize>() <= SMALL;
    let team: &dyn Team = if alone { &Alone } else { team };
    let tasks = if alone { 1 } else { TASKS_PER_THREAD * threads };
    let calls: Vec<Call> =
        products.iter().map(|product| Call::new(kernel, streams, product, tasks)).collect();
    let tasks: Vec<(&Call, usize)> =
        calls.iter().flat_map(|call| (0..call.num_tasks()).map(move |task| (call, task))).collect();
    team.for_each(tasks.len(), &|index| {
        let (call, task) = tasks[index];
        call.run(task);
    });
    calls.iter().for_each(Call::finish);
}

/// The side that has the few lines, and the memory layout of the many lines.
#[derive(Clone, Copy)]
pub(super) struct Form {
    rows_are_few: bool,
    /// Whether the many lines are neighbors in memory; otherwise the elements of each line are contiguous.
    across: bool,
}

impl Form {
    /// The form of a product; `None` if the kernel cannot stream it.
    pub fn of(kernel: &Kernel, problem: &Problem) -> Option<Self> {
        kernel.streams.as_ref()?;
        if matches!(problem.lhs.elements, Elements::I8(_)) {
            return None;
        }
        let form = Self { rows_are_few: problem.rows <= problem.columns, across: false };
        let (few, many) = form.sides(problem.rows, problem.columns);
        let (_, side) = form.sides(&problem.lhs, &problem.rhs);
        let across = matches!(*side.free, [dim] if dim.stride == 1);
        let along = matches!(*side.contract, [dim] if dim.stride == 1);
        (few <= FEW && few * 4 <= many && (across || along)).then_some(Self { across, ..form })
    }

    /// The form of a product that is summed as products with many rows are: in blocks of the kernel's depth, element
    /// after element. Only lines that are neighbors in memory are summed so.
    pub fn in_order(kernel: &Kernel, problem: &Problem) -> Option<Self> {
        let form = Self::of(kernel, problem)?;
        (form.rows_are_few && form.across).then_some(form)
    }

    /// The value of the few lines, then that of the many lines.
    fn sides<T>(self, of_rows: T, of_columns: T) -> (T, T) {
        if self.rows_are_few { (of_rows, of_columns) } else { (of_columns, of_rows) }
    }
}

/// The words of a batch element's few lines.
fn factor_words(kernel: &Kernel, problem: &Problem, few: usize) -> usize {
    kernel.format.steps(problem.depth).next_multiple_of(VECTOR) * few
}

/// The values that all tasks of a product share.
struct Call<'a> {
    kernel: &'a Kernel,
    problem: &'a Problem<'a>,
    out: Out,
    streams: &'a Streams,
    form: Form,
    many_side: &'a Side<'a>,
    depth: Vec<usize>,
    /// `[batch, …]`; see [`Strip::factors`].
    factors: Pooled,
    batch: usize,
    few: usize,
    padded: usize,
    many: usize,
    /// As [`Streamed::block`].
    block: Option<usize>,
    division: Division,
}

/// The division of a product into tasks.
enum Division {
    /// Each task has this number of the many lines of a batch element.
    Lines(usize),
    /// Each task has all lines, for a stretch of contracted elements. The sums of the stretches are added at the end.
    Stretches { stretch: usize, partial: Pooled },
}

impl Division {
    fn of(
        form: Form,
        block: Option<usize>,
        depth: usize,
        [batch, padded, many]: [usize; 3],
        tasks: usize,
    ) -> Self {
        let is_cut = block.is_none_or(|block| depth > block);
        if is_cut && form.across && padded < FEW_REREAD && many < LONG_RUN && many * depth > SMALL {
            // The stretches, and so the sums, do not depend on the number of threads.
            let stretches = (depth * many / STRETCH).clamp(2, MOST_STRETCHES);
            let stretch = block.unwrap_or(depth.div_ceil(stretches).next_multiple_of(VECTOR));
            Self::Stretches {
                stretch,
                partial: Buffer::take(depth.div_ceil(stretch) * batch * padded * many),
            }
        } else {
            let lines = many.div_ceil(tasks.div_ceil(batch)).next_multiple_of(LINES);
            Self::Lines(lines.clamp(SHORTEST_TASK, TASK_LINES))
        }
    }
}

// SAFETY: tasks write to disjoint ranges of the result and of the sums of stretches. They only read the factors. The
// sums are read after all tasks have ended.
unsafe impl Sync for Call<'_> {}

impl<'a> Call<'a> {
    /// Packs the few lines. Divides the many lines among `tasks`, if there are enough.
    fn new(kernel: &'a Kernel, streams: &'a Streams, product: &'a Streamed<'a>, tasks: usize) -> Self {
        let Streamed { problem, form, out, block } = product;
        let (few, many) = form.sides(problem.rows, problem.columns);
        let (few_side, many_side) = form.sides(&problem.lhs, &problem.rhs);
        let mut depth = vec![0; problem.depth];
        offsets(&many_side.contract, 0, 0, &mut depth);
        let (batch, padded) = (problem.batch_len(), few.next_power_of_two());
        let call = Self {
            kernel,
            problem,
            out: *out,
            streams,
            form: *form,
            many_side,
            depth,
            factors: Buffer::take(batch * factor_words(kernel, problem, padded)),
            batch,
            few,
            padded,
            many,
            block: *block,
            division: Division::of(*form, *block, problem.depth, [batch, padded, many], tasks),
        };
        call.pack(few_side);
        call
    }

    fn num_tasks(&self) -> usize {
        self.batch
            * match &self.division {
                Division::Lines(lines) => self.many.div_ceil(*lines),
                Division::Stretches { stretch, .. } => self.problem.depth.div_ceil(*stretch),
            }
    }

    fn run(&self, task: usize) {
        match &self.division {
            Division::Lines(lines) => {
                let strips = self.many.div_ceil(*lines);
                let start = task % strips * lines;
                self.strip(task / strips, start..(start + lines).min(self.many));
            }
            Division::Stretches { stretch, partial } => {
                let start = task / self.batch * stretch;
                let sums = self.partial(partial, task);
                let range = start..(start + stretch).min(self.problem.depth);
                self.sum(task % self.batch, 0..self.many, range, sums);
            }
        }
    }

    /// Adds the sums of stretches after all tasks have ended.
    fn finish(&self) {
        let Division::Stretches { stretch, partial } = &self.division else { return };
        let stretches = self.problem.depth.div_ceil(*stretch);
        for index in 0..self.batch {
            // SAFETY: all tasks have ended, and each slice covers the sums of another stretch.
            let [sums, others @ ..] = &mut *Vec::from_iter((0..stretches).map(|stretch| unsafe {
                let start = self.partial(partial, stretch * self.batch + index);
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

    /// The sums of a task: `[padded, many]`.
    fn partial(&self, partial: &Pooled, task: usize) -> *mut f32 {
        // SAFETY: the buffer has room for the sums of all tasks.
        unsafe { partial.words().cast::<f32>().add(task * self.padded * self.many) }
    }

    fn bases(&self, batch: usize) -> (usize, usize) {
        let (lhs, rhs) = self.problem.batch_offsets(batch);
        self.form.sides(lhs, rhs)
    }

    fn factors(&self, batch: usize) -> *mut u32 {
        // SAFETY: the buffer has room for all batch elements.
        unsafe { self.factors.words().add(batch * self.factor_words()) }
    }

    fn factor_words(&self) -> usize {
        factor_words(self.kernel, self.problem, self.padded)
    }

    fn pack(&self, side: &Side) {
        if let Some(line) = self.ready_line(side) {
            // SAFETY: the buffer has room for the factors, and no task has started.
            let factors = unsafe { std::slice::from_raw_parts_mut(self.factors(0), self.factor_words()) };
            let (words, rest) = factors.split_at_mut(line.len());
            words.copy_from_slice(line);
            rest.fill(0);
            return;
        }
        let mut depth = Depth::default();
        depth.fill(&side.contract, 0..self.problem.depth);
        (0..self.batch).for_each(|index| self.pack_lines(side, &depth, index));
    }

    /// The words of the only line, if memory already holds them in the kernel's format.
    fn ready_line<'b>(&self, side: &Side<'b>) -> Option<&'b [u32]> {
        let is_only = self.few * self.batch == 1 && matches!(*side.contract, [dim] if dim.stride == 1);
        let elements = match (side.elements, self.kernel.format) {
            (Elements::F32(elements), Format::F32) => elements.as_ptr().cast::<u32>(),
            (Elements::Bf16(elements), Format::Pairs) if self.problem.depth.is_multiple_of(2) => {
                elements.as_ptr().cast()
            }
            _ => return None,
        };
        let steps = self.kernel.format.steps(self.problem.depth);
        // SAFETY: the line has this number of words, and any bits are a valid `u32`.
        (is_only && elements.is_aligned()).then(|| unsafe { std::slice::from_raw_parts(elements, steps) })
    }

    /// Packs the few lines of a batch element.
    fn pack_lines(&self, side: &Side, depth: &Depth, batch: usize) {
        let factors = self.factors(batch);
        let steps = self.kernel.format.steps(self.problem.depth);
        let mut lines = [0; FEW];
        let lines = &mut lines[..self.few];
        offsets(&side.free, self.bases(batch).0, 0, lines);
        let lines_in_order = (!self.form.across).then(|| Buffer::take(self.few * steps));
        let panels = Panels {
            source: side.source(),
            lines,
            offsets: &depth.offsets,
            runs: &depth.runs,
            format: self.kernel.format,
            order: Order::BySteps,
            out: lines_in_order.as_ref().map_or(factors, |lines| lines.words()),
            width: if self.form.across { self.padded } else { 1 },
        };
        // SAFETY: `Problem::new` has checked that all offsets lie in the operand, and the buffers have room for the
        // panels.
        unsafe { (self.kernel.pack)(&panels) };
        if let Some(lines) = lines_in_order {
            // SAFETY: the buffers have these sizes, and the panels have been written.
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
        let depth = self.problem.depth;
        let block = self.block.unwrap_or(depth).min(depth);
        let sums = Buffer::take(self.padded * range.len());
        let sums = sums.words().cast();
        self.sum(batch, range.clone(), 0..block, sums);
        // SAFETY: the sums have been written.
        let sums = unsafe { std::slice::from_raw_parts_mut(sums, self.few * range.len()) };
        let others = Buffer::take(if block < depth { self.padded * range.len() } else { 0 });
        for start in (block..depth).step_by(block) {
            let others = others.words().cast();
            self.sum(batch, range.clone(), start..(start + block).min(depth), others);
            // SAFETY: the sums of this block have been written.
            let others = unsafe { std::slice::from_raw_parts(others, sums.len()) };
            sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
        }
        self.write(sums, batch, range);
    }

    /// Sums the products of some of the many lines into `sums`, `[padded, lines]`.
    fn sum(&self, batch: usize, range: Range<usize>, depth: Range<usize>, sums: *mut f32) {
        let mut lines = vec![0; if self.form.across { 1 } else { range.len() }];
        offsets(&self.many_side.free, self.bases(batch).1, range.start, &mut lines);
        let steps_before = self.kernel.format.steps(depth.start);
        let strip = Strip {
            source: self.many_side.source(),
            lines: &lines,
            num_lines: range.len(),
            offsets: &self.depth[depth],
            // SAFETY: the buffer has factors for all steps.
            factors: unsafe { self.factors(batch).add(steps_before * self.padded) },
            few: self.padded,
            sums,
        };
        // SAFETY: `Problem::new` has checked that all offsets lie in the operand, and the factors and sums have room.
        unsafe { (if self.form.across { self.streams.across } else { self.streams.along })(&strip) };
    }

    fn write(&self, sums: &mut [f32], batch: usize, lines: Range<usize>) {
        if self.block.is_some() && matches!(self.out, Out::Bf16(_)) && self.kernel.format == Format::Pairs {
            // The instruction that rounds the sums of products with many rows takes subnormal numbers for zeros.
            for sum in &mut *sums {
                *sum = if sum.abs() < f32::MIN_POSITIVE { 0f32.copysign(*sum) } else { *sum };
            }
        }
        let first = batch * self.few * self.many;
        let (few_stride, many_stride) = if self.form.rows_are_few { (self.many, 1) } else { (1, self.few) };
        for (index, sums) in sums.chunks_exact(lines.len()).enumerate() {
            let first = first + index * few_stride + lines.start * many_stride;
            // SAFETY: the elements lie in the result, and only this task writes these lines.
            unsafe { self.out.add(first).write_all(sums, many_stride) };
        }
    }
}
