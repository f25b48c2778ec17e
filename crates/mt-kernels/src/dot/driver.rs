//! How a product is divided into chunks, tasks, blocks and tiles.
//!
//! A chunk's operands are packed whole, once, by all threads together; then they compute the chunk's tiles. Sums grow
//! along the contraction in an order that depends on its size alone, so that results do not depend on the threads.

use std::ops::Range;

use super::buffer::Buffer;
use super::kernel::{Kernel, Out, Tile};
use super::pack::{Depth, Panels};
use super::shape::{Problem, Side, offsets};
use crate::{Alone, Team};

/// Below this many multiplications a second thread costs more than it gains.
const SMALL: usize = 1 << 17;

/// The most contracted elements of a chunk.
const CHUNK_DEPTH: usize = 4096;

/// The most words of each packed operand and of the sums of a chunk, unless a single panel has more.
const CHUNK_WORDS: usize = 4 << 20;

/// How many panels are packed together: what lies next to each other in memory is read together.
const PACKED_PANELS: usize = 8;

/// The widest panel of any kernel.
const MAXIMUM_WIDTH: usize = 32;

/// The most panels of rows of a task: together they stay in the second cache.
const TASK_ROW_PANELS: usize = 18;

/// The most panels of columns of a task.
const TASK_COLUMN_PANELS: usize = 8;

/// With fewer tasks for each thread, the last ones leave threads idle for long.
const TASKS_PER_THREAD: usize = 8;

/// Computes a product that has at least one element and a contraction of at least one, or adds it to a result of `f32`.
pub(super) fn run(team: &dyn Team, kernel: &Kernel, problem: &Problem, out: Out, adds: bool) {
    let call = Call { kernel, problem, out, adds };
    let batch = problem.batch_len();
    let threads = team.num_threads();
    if threads == 1 || batch * problem.rows * problem.columns * problem.depth <= SMALL {
        (0..batch).for_each(|index| call.product(&Alone, index));
    } else if batch >= TASKS_PER_THREAD * threads || batch.is_multiple_of(threads) {
        team.for_each(batch, &|index| call.product(&Alone, index));
    } else {
        (0..batch).for_each(|index| call.product(team, index));
    }
}

/// What all tasks of a call share.
struct Call<'a> {
    kernel: &'a Kernel,
    problem: &'a Problem<'a>,
    out: Out,
    adds: bool,
}

// SAFETY: tasks write to parts of the result that do not overlap.
unsafe impl Sync for Call<'_> {}

/// A part of a product, whose operands are packed.
struct Chunk {
    batch: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    depth: Range<usize>,
    lhs: *mut u32,
    rhs: *mut u32,
    /// Where sums are kept that become a result of fewer bits: `[rows, columns]`.
    sums: Option<*mut f32>,
}

// SAFETY: tasks write to parts of the buffers that do not overlap, and read what an earlier round has written.
unsafe impl Sync for Chunk {}

impl Call<'_> {
    /// Computes a batch element.
    fn product(&self, team: &dyn Team, batch: usize) {
        let Self { kernel, problem, .. } = *self;
        let needs_sums = matches!(self.out, Out::Bf16(_)) && problem.depth > kernel.depth;
        let depth = problem.depth.min(CHUNK_DEPTH);
        let lines = |panel: usize| (CHUNK_WORDS / kernel.format.steps(depth) / panel).max(1) * panel;
        let rows = lines(kernel.rows).min(problem.rows);
        let mut columns = lines(kernel.columns);
        if needs_sums {
            columns = columns.min((CHUNK_WORDS / rows / kernel.columns).max(1) * kernel.columns);
        }
        let columns = columns.min(problem.columns);
        let words = kernel.format.steps(depth);
        let lhs = Buffer::take(rows * words);
        let rhs = Buffer::take(columns.next_multiple_of(kernel.lanes) * words);
        let sums = needs_sums.then(|| Buffer::take(rows * columns));
        let (lhs_base, rhs_base) = problem.batch_offsets(batch);
        let (mut lhs_depth, mut rhs_depth) = (Depth::default(), Depth::default());
        let (mut lhs_packed, mut rhs_packed) = (None, None);
        for column_chunk in chunks(0..problem.columns, columns) {
            for row_chunk in chunks(0..problem.rows, rows) {
                for depth_chunk in chunks(0..problem.depth, depth) {
                    let chunk = Chunk {
                        batch,
                        rows: row_chunk.clone(),
                        columns: column_chunk.clone(),
                        depth: depth_chunk.clone(),
                        lhs: lhs.words(),
                        rhs: rhs.words(),
                        sums: sums.as_ref().map(|sums| sums.words().cast()),
                    };
                    let lhs_wanted = Some((row_chunk.start, depth_chunk.start));
                    let rhs_wanted = Some((column_chunk.start, depth_chunk.start));
                    let (pack_lhs, pack_rhs) = (lhs_packed != lhs_wanted, rhs_packed != rhs_wanted);
                    if pack_lhs {
                        lhs_depth.fill(&problem.lhs.contract, depth_chunk.clone());
                    }
                    if pack_rhs {
                        rhs_depth.fill(&problem.rhs.contract, depth_chunk);
                    }
                    let lhs_groups = if pack_lhs { self.groups(row_chunk.len(), kernel.rows) } else { 0 };
                    let rhs_groups =
                        if pack_rhs { self.groups(column_chunk.len(), kernel.columns) } else { 0 };
                    team.for_each(lhs_groups + rhs_groups, &|index| match index.checked_sub(lhs_groups) {
                        None => self.pack_rows(&chunk, lhs_base, &lhs_depth, index),
                        Some(index) => self.pack_columns(&chunk, rhs_base, &rhs_depth, index),
                    });
                    (lhs_packed, rhs_packed) = (lhs_wanted, rhs_wanted);
                    self.multiply(team, &chunk);
                }
            }
        }
    }

    /// How many tasks pack so many lines.
    fn groups(&self, lines: usize, width: usize) -> usize {
        lines.div_ceil(width * PACKED_PANELS)
    }

    fn pack_rows(&self, chunk: &Chunk, base: usize, depth: &Depth, group: usize) {
        let rows = self.kernel.rows;
        let side = &self.problem.lhs;
        let group = self.group(group, rows, chunk.rows.len());
        let full = group.start + group.len() / rows * rows;
        for (lines, width) in [(group.start..full, rows), (full..group.end, group.end - full)] {
            self.pack(side, base, depth, chunk.rows.start, lines, width, chunk.rows.len(), chunk.lhs);
        }
    }

    fn pack_columns(&self, chunk: &Chunk, base: usize, depth: &Depth, group: usize) {
        let Kernel { columns, lanes, .. } = *self.kernel;
        let side = &self.problem.rhs;
        let group = self.group(group, columns, chunk.columns.len());
        let full = group.start + group.len() / columns * columns;
        let width = (group.end - full).next_multiple_of(lanes);
        let all = chunk.columns.len().next_multiple_of(lanes);
        for (lines, width) in [(group.start..full, columns), (full..group.end, width)] {
            self.pack(side, base, depth, chunk.columns.start, lines, width, all, chunk.rhs);
        }
    }

    fn group(&self, index: usize, width: usize, end: usize) -> Range<usize> {
        let lines = width * PACKED_PANELS;
        index * lines..((index + 1) * lines).min(end)
    }

    /// Packs some lines of a chunk, which has `all` lines, for all of its depth.
    fn pack(
        &self,
        side: &Side,
        base: usize,
        depth: &Depth,
        first_line: usize,
        lines: Range<usize>,
        width: usize,
        all: usize,
        out: *mut u32,
    ) {
        if lines.is_empty() {
            return;
        }
        let mut line_offsets = [0; MAXIMUM_WIDTH * PACKED_PANELS];
        let line_offsets = &mut line_offsets[..lines.len()];
        offsets(&side.free, base, first_line + lines.start, line_offsets);
        for block in chunks(0..depth.offsets.len(), self.kernel.depth) {
            let steps = self.kernel.format.steps(block.len());
            let before = self.kernel.format.steps(block.start) * all + lines.start * steps;
            let panels = Panels {
                source: side.source(),
                lines: line_offsets,
                offsets: &depth.offsets[block.clone()],
                runs: &depth.runs[block],
                format: self.kernel.format,
                // SAFETY: the buffer has a word for each step of each line.
                out: unsafe { out.add(before) },
                width,
            };
            // SAFETY: all offsets lie in the operand, as was checked, and the buffer has room for the panels.
            unsafe { (self.kernel.pack)(&panels) };
        }
    }

    /// Computes a chunk's tiles.
    fn multiply(&self, team: &dyn Team, chunk: &Chunk) {
        let row_panels = chunk.rows.len().div_ceil(self.kernel.rows);
        let column_panels = chunk.columns.len().div_ceil(self.kernel.columns);
        let mut row_tasks = row_panels.div_ceil(TASK_ROW_PANELS);
        let mut column_tasks = column_panels.div_ceil(TASK_COLUMN_PANELS);
        let threads = team.num_threads();
        if threads > 1 {
            let wanted = TASKS_PER_THREAD * threads;
            column_tasks = column_tasks.max(wanted.div_ceil(row_tasks)).min(column_panels);
            row_tasks = row_tasks.max(wanted.div_ceil(column_tasks)).min(row_panels);
        }
        team.for_each(row_tasks * column_tasks, &|index| {
            let rows = part(row_panels, row_tasks, index / column_tasks);
            let columns = part(column_panels, column_tasks, index % column_tasks);
            self.multiply_panels(chunk, rows, columns);
        });
    }

    /// Computes the tiles of some panels.
    fn multiply_panels(&self, chunk: &Chunk, row_panels: Range<usize>, column_panels: Range<usize>) {
        let Self { kernel, problem, .. } = *self;
        let all_rows = chunk.rows.len();
        let all_columns = chunk.columns.len();
        let padded_columns = all_columns.next_multiple_of(kernel.lanes);
        for block in chunks(chunk.depth.clone(), kernel.depth) {
            let steps = kernel.format.steps(block.len());
            let steps_before = kernel.format.steps(block.start - chunk.depth.start);
            let (is_first, is_last) = (block.start == 0, block.end == problem.depth);
            for column_panel in column_panels.clone() {
                let column = column_panel * kernel.columns;
                for row_panel in row_panels.clone() {
                    let row = row_panel * kernel.rows;
                    let first = (chunk.batch * problem.rows + chunk.rows.start + row) * problem.columns
                        + chunk.columns.start
                        + column;
                    // SAFETY: the tile lies in the result.
                    let out = unsafe { self.out.add(first) };
                    // SAFETY: the tile lies in the chunk.
                    let sums = chunk.sums.map(|sums| unsafe { sums.add(row * all_columns + column) });
                    let initial = match (sums, out) {
                        _ if is_first && !self.adds => None,
                        (Some(sums), _) => Some((sums.cast_const(), all_columns)),
                        (None, Out::F32(out)) => Some((out.cast_const(), problem.columns)),
                        (None, Out::Bf16(_)) => None,
                    };
                    let (out, out_stride) = match sums {
                        Some(sums) if !is_last => (Out::F32(sums), all_columns),
                        _ => (out, problem.columns),
                    };
                    let tile = Tile {
                        steps,
                        // SAFETY: the buffer has a word for each step of each row.
                        lhs: unsafe { chunk.lhs.add(steps_before * all_rows + row * steps) },
                        // SAFETY: the buffer has a word for each step of each column.
                        rhs: unsafe { chunk.rhs.add(steps_before * padded_columns + column * steps) },
                        rows: kernel.rows.min(all_rows - row),
                        columns: kernel.columns.min(all_columns - column),
                        initial: initial.map(|initial| initial.0),
                        initial_stride: initial.map_or(0, |initial| initial.1),
                        out,
                        out_stride,
                    };
                    // SAFETY: the panels were packed, and the tile lies in the result and in the sums.
                    unsafe { (kernel.multiply)(&tile) };
                }
            }
        }
    }
}

fn chunks(all: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = all.end;
    all.step_by(size).map(move |start| start..(start + size).min(end))
}

/// One of `parts` nearly equal parts.
fn part(count: usize, parts: usize, index: usize) -> Range<usize> {
    count * index / parts..count * (index + 1) / parts
}
