//! How a product is divided into tasks, blocks and tiles.

use std::ops::Range;

use super::buffer::Buffer;
use super::kernel::{Kernel, Out, Tile};
use super::pack::{Panel, Source};
use super::shape::{Problem, Side, offsets};
use super::{Elements, ElementsMut};
use crate::Team;

/// Below this many multiplications a second thread costs more than it gains.
const SMALL: usize = 1 << 17;

/// The most rows and columns of a task: its packed rows stay in the second cache.
const TASK_ROWS: usize = 512;
const TASK_COLUMNS: usize = 512;

/// The widest panel of any kernel.
const MAXIMUM_WIDTH: usize = 64;

/// Computes a product that has at least one element and a contraction of at least one.
pub(super) fn run(team: &dyn Team, kernel: &Kernel, problem: &Problem, mut result: ElementsMut) {
    let out = match &mut result {
        ElementsMut::F32(elements) => Out::F32(elements.as_mut_ptr()),
        ElementsMut::Bf16(elements) => Out::Bf16(elements.as_mut_ptr()),
    };
    let call = Call { kernel, problem, out };
    let row_blocks = problem.rows.div_ceil(TASK_ROWS);
    let column_blocks = problem.columns.div_ceil(TASK_COLUMNS);
    let count = problem.batch_len() * row_blocks * column_blocks;
    let task = |index: usize| {
        let (rest, columns) = (index / column_blocks, index % column_blocks);
        let (batch, rows) = (rest / row_blocks, rest % row_blocks);
        call.block(
            batch,
            block(rows, TASK_ROWS, problem.rows),
            block(columns, TASK_COLUMNS, problem.columns),
        );
    };
    if problem.batch_len() * problem.rows * problem.columns * problem.depth <= SMALL {
        (0..count).for_each(task);
    } else {
        team.for_each(count, &task);
    }
}

fn block(index: usize, size: usize, end: usize) -> Range<usize> {
    index * size..((index + 1) * size).min(end)
}

/// What all tasks of a call share.
struct Call<'a> {
    kernel: &'a Kernel,
    problem: &'a Problem<'a>,
    out: Out,
}

// SAFETY: tasks write to parts of the result that do not overlap.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    /// Computes a block of a batch element's result.
    fn block(&self, batch: usize, rows: Range<usize>, columns: Range<usize>) {
        let Self { kernel, problem, .. } = *self;
        let (lhs_base, rhs_base) = problem.batch_offsets(batch);
        let block_depth = kernel.depth.min(problem.depth);
        let block_steps = kernel.format.steps(block_depth);
        let lhs_panels = Buffer::take(rows.len() * block_steps);
        let rhs_panel = Buffer::take(kernel.columns * block_steps);
        let depth_blocks = problem.depth.div_ceil(kernel.depth);
        // Sums of several blocks are not rounded in between.
        let sums = match self.out {
            Out::Bf16(_) if depth_blocks > 1 => Some(Buffer::take(rows.len() * columns.len())),
            _ => None,
        };
        for depth_block in 0..depth_blocks {
            let range = block(depth_block, kernel.depth, problem.depth);
            let steps = kernel.format.steps(range.len());
            for (index, panel) in panels(&rows, kernel.rows).enumerate() {
                // SAFETY: the buffer has room for all rows, and all panels before this one are full.
                let out = unsafe { lhs_panels.words().add(index * kernel.rows * steps) };
                let width = panel.len();
                self.pack(&problem.lhs, lhs_base, panel, range.clone(), out, width);
            }
            for column_panel in panels(&columns, kernel.columns) {
                let width = column_panel.len().next_multiple_of(kernel.lanes);
                self.pack(
                    &problem.rhs,
                    rhs_base,
                    column_panel.clone(),
                    range.clone(),
                    rhs_panel.words(),
                    width,
                );
                for (index, row_panel) in panels(&rows, kernel.rows).enumerate() {
                    let first =
                        (batch * problem.rows + row_panel.start) * problem.columns + column_panel.start;
                    // SAFETY: the tile lies in the result.
                    let out = unsafe { self.out.add(first) };
                    let sums = sums.as_ref().map(|sums| {
                        let first = (row_panel.start - rows.start) * columns.len() + column_panel.start
                            - columns.start;
                        // SAFETY: the tile lies in the block.
                        unsafe { sums.words().cast::<f32>().add(first) }
                    });
                    let initial = match (sums, out) {
                        _ if depth_block == 0 => None,
                        (Some(sums), _) => Some((sums.cast_const(), columns.len())),
                        (None, Out::F32(out)) => Some((out.cast_const(), problem.columns)),
                        (None, Out::Bf16(_)) => None,
                    };
                    let (out, out_stride) = match sums {
                        Some(sums) if depth_block + 1 < depth_blocks => (Out::F32(sums), columns.len()),
                        _ => (out, problem.columns),
                    };
                    let tile = Tile {
                        steps,
                        // SAFETY: the buffer has room for all rows, and all panels before this one are full.
                        lhs: unsafe { lhs_panels.words().add(index * kernel.rows * steps) },
                        rhs: rhs_panel.words(),
                        rows: row_panel.len(),
                        columns: column_panel.len(),
                        initial: initial.map(|initial| initial.0),
                        initial_stride: initial.map_or(0, |initial| initial.1),
                        out,
                        out_stride,
                    };
                    // SAFETY: both panels were packed for this tile, which lies in the result and in the sums.
                    unsafe { (kernel.multiply)(&tile) };
                }
            }
        }
    }

    fn pack(
        &self,
        side: &Side,
        base: usize,
        lines: Range<usize>,
        depth: Range<usize>,
        out: *mut u32,
        width: usize,
    ) {
        let mut line_offsets = [0; MAXIMUM_WIDTH];
        let line_offsets = &mut line_offsets[..lines.len()];
        offsets(&side.free, base, lines.start, line_offsets);
        let mut depth_offsets = vec![0; depth.len()];
        offsets(&side.contract, 0, depth.start, &mut depth_offsets);
        let panel = Panel {
            source: match side.elements {
                Elements::F32(elements) => Source::F32(elements.as_ptr()),
                Elements::Bf16(elements) => Source::Bf16(elements.as_ptr()),
            },
            lines: line_offsets,
            depth: &depth_offsets,
            format: self.kernel.format,
            out,
            width,
        };
        // SAFETY: all offsets lie in the operand, as was checked, and the buffers have room for the panel.
        unsafe { (self.kernel.pack)(&panel) };
    }
}

fn panels(lines: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = lines.end;
    lines.clone().step_by(size).map(move |start| start..(start + size).min(end))
}
