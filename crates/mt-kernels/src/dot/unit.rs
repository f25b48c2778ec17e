//! Products whose tiles a matrix unit computes.
//!
//! The unit is fast, so loading, packing and storing dominate. A task therefore packs its lines for the whole depth of a
//! chunk and keeps them in the L2 cache while the panels of the shared operand pass. The next panel is prefetched
//! meanwhile. If there are enough columns, the rows are shared: consecutive tiles then write adjacent memory.

use std::cell::Cell;
use std::ops::Range;

use super::ahead::Ahead;
use super::blocks::Sums;
use super::buffer::Buffer;
use super::driver::{Call, Chunk};
use super::kernel::{Kernel, Tile, UnitKernel};
use super::shape::Problem;
use crate::amx::{BLOCK, Fetch, TILE};

/// The bytes of a task's own lines, which stay in the L2 cache.
const OWN_BYTES: usize = 768 << 10;

/// The fewest lines of a task. Each task reads every panel of the shared operand again.
const FEWEST_LINES: usize = 128;

/// The fewest columns with which rows are the shared operand.
const FEWEST_COLUMNS: usize = 256;

/// The fewest tasks for each thread, if there are enough lines. A task with few lines waits for the shared operand.
pub(super) const TASKS_PER_THREAD: usize = 2;

/// The number of lines of a task, unless there would be too few tasks.
pub(super) fn task_lines(kernel: &Kernel, depth: usize) -> usize {
    (OWN_BYTES / (4 * kernel.format.steps(depth))).max(FEWEST_LINES)
}

/// Whether the rows, instead of the columns, are the shared operand. There must be columns for all threads.
pub(super) fn rows_are_shared(problem: &Problem, num_threads: usize) -> bool {
    let fewest = FEWEST_COLUMNS.max(BLOCK * TASKS_PER_THREAD * num_threads);
    problem.columns >= fewest || problem.rows < problem.columns
}

impl Call<'_> {
    /// Packs and multiplies some lines of the task's own operand, the first of which begins a panel.
    pub fn multiply_by_unit(
        &self,
        unit: &UnitKernel,
        chunk: &Chunk,
        lines: Range<usize>,
        later: Option<Range<usize>>,
    ) {
        let Self { kernel, rows_are_shared, .. } = *self;
        // SAFETY: kernels come from a `Candidate`, so the processor has the instructions. A task begins only this
        // session.
        let _session = unsafe { (unit.session)() };
        let depth = 0..chunk.depth.len();
        let steps = kernel.format.steps(depth.len());
        let packs_own = rows_are_shared || self.row_stride.is_none();
        let own_lines = self.padded(!rows_are_shared, lines.len());
        let own = Buffer::take(if packs_own { own_lines * steps } else { 0 });
        if packs_own {
            self.pack(chunk, !rows_are_shared, lines.clone(), depth.clone(), own.words());
        }
        let (num_shared, shared_width) = self.lines_and_width(chunk, rows_are_shared);
        let (_, own_width) = self.lines_and_width(chunk, !rows_are_shared);
        let ahead = Cell::new(match later {
            Some(later) => self.ahead(chunk, !rows_are_shared, later, depth.clone()),
            None => Ahead::nothing(),
        });
        let mut pipeline = Pipeline { sums: [Sums::new(), Sums::new()], next: 0, unfinished: None };
        for shared_line in (0..num_shared).step_by(shared_width) {
            let later_lines = shared_line + shared_width..(shared_line + 2 * shared_width).min(num_shared);
            let mut next_panel = self.panel_bytes(chunk, later_lines);
            for own_line in lines.clone().step_by(own_width) {
                // Rows that are read in place have no panel, and their panel pointer is not used.
                let panels = [
                    chunk.shared.wrapping_add(shared_line * steps),
                    own.words().wrapping_add((own_line - lines.start) * steps),
                ];
                let sums = chunk.sums.as_ref();
                let count = steps / (TILE * kernel.format.halves());
                let fetch = next_range(&mut next_panel, count * Fetch::BYTES);
                let tile = self.tile(chunk, panels, [shared_line, own_line], &depth, sums, &ahead);
                let tile = Tile { fetch, ..tile };
                // SAFETY: the panels were packed, and the tile lies in the result and in the sums.
                unsafe { pipeline.multiply(unit, tile) };
            }
        }
        // SAFETY: as above.
        unsafe { pipeline.finish(unit) };
    }

    /// The memory of lines of the shared operand, for prefetching: an address and a number of bytes. Empty if the memory
    /// is not contiguous.
    fn panel_bytes(&self, chunk: &Chunk, lines: Range<usize>) -> (*const u8, usize) {
        let depth = chunk.depth.len();
        match self.row_stride.filter(|_| self.rows_are_shared) {
            _ if lines.is_empty() => (std::ptr::null(), 0),
            None => {
                let steps = self.kernel.format.steps(depth);
                let start = chunk.shared.wrapping_add(lines.start * steps);
                (start.cast_const().cast(), 4 * steps * self.padded(self.rows_are_shared, lines.len()))
            }
            Some(stride) => {
                let is_contiguous = stride == depth * self.problem.lhs.source().bytes();
                let bytes = if is_contiguous { stride * lines.len() } else { 0 };
                (self.row(chunk, lines.start, 0).cast(), bytes)
            }
        }
    }
}

/// Takes the next bytes of a panel, of which a task with few tiles leaves some.
fn next_range((start, bytes): &mut (*const u8, usize), count: usize) -> Fetch {
    if *bytes == 0 {
        return Fetch::nothing();
    }
    let range = Fetch::from(*start);
    *start = start.wrapping_add(count);
    *bytes = bytes.saturating_sub(count);
    range
}

/// A pipeline of tiles: each tile is computed before the previous one is finished.
struct Pipeline<'a> {
    sums: [Sums; 2],
    /// The index of the next tile's sums. The other sums belong to the unfinished tile.
    next: usize,
    unfinished: Option<Tile<'a>>,
}

impl<'a> Pipeline<'a> {
    /// Computes a tile.
    ///
    /// # Safety
    /// See [`UnitKernel::sum`].
    unsafe fn multiply(&mut self, unit: &UnitKernel, tile: Tile<'a>) {
        // SAFETY: what the caller promises.
        unsafe {
            let is_unfinished = (unit.sum)(&tile, unit.multiplication, &mut self.sums[self.next]);
            self.finish(unit);
            if is_unfinished {
                self.unfinished = Some(tile);
                self.next = 1 - self.next;
            }
        }
    }

    /// Finishes the unfinished tile, if there is one.
    ///
    /// # Safety
    /// As for [`Self::multiply`].
    unsafe fn finish(&mut self, unit: &UnitKernel) {
        if let Some(last) = self.unfinished.take() {
            // SAFETY: what the caller promises.
            unsafe { (unit.finish)(&last, &mut self.sums[1 - self.next]) };
        }
    }
}
