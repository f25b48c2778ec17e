//! Products whose tiles a matrix unit computes.
//!
//! The unit is fast, so packing and storing dominate. A task therefore packs its lines for the whole depth of a chunk,
//! and a tile's sums stay in the L1 and L2 caches until they are complete. The loop over blocks along the depth runs
//! inside the loop over panels of the shared operand; one block of a panel stays in the L1 cache.

use std::cell::Cell;
use std::ops::Range;

use super::ahead::Ahead;
use super::blocks::Sums;
use super::buffer::Buffer;
use super::driver::{self, Call, Chunk, chunks};
use super::kernel::{Kernel, Tile, UnitKernel};

/// The bytes of a task's own lines, which stay in the L2 cache.
const OWN_BYTES: usize = 1024 << 10;

/// The fewest lines of a task. Each task reads every panel of the shared operand again.
const FEWEST_LINES: usize = 128;

/// The fewest tasks for each thread, if there are enough lines. A task with few lines waits for the shared operand.
pub(super) const TASKS_PER_THREAD: usize = 2;

/// The number of lines of a task, unless there would be too few tasks.
pub(super) fn task_lines(kernel: &Kernel, depth: usize) -> usize {
    (OWN_BYTES / (4 * kernel.format.steps(depth))).max(FEWEST_LINES)
}

impl Call<'_> {
    /// Packs and multiplies some lines of the task's own operand, the first of which begins a panel.
    pub fn multiply_depth_first(
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
        let depth = chunk.depth.len();
        let packs_own = rows_are_shared || self.row_stride.is_none();
        let own_lines = self.padded(!rows_are_shared, lines.len());
        let own = Buffer::take(if packs_own { own_lines * kernel.format.steps(depth) } else { 0 });
        if packs_own {
            for block in chunks(0..depth, kernel.depth) {
                let out = own.words().wrapping_add(kernel.format.steps(block.start) * own_lines);
                self.pack(chunk, !rows_are_shared, lines.clone(), block, out);
            }
        }
        let num_shared = if rows_are_shared { chunk.rows.len() } else { chunk.columns.len() };
        let shared_lines = self.padded(rows_are_shared, num_shared);
        let (shared_width, own_width) = match rows_are_shared {
            true => (kernel.rows, kernel.columns),
            false => (kernel.columns, kernel.rows),
        };
        // Sums of one panel of the shared operand and all own lines. They are kept apart from the result, whose rows
        // are often so far apart that few of them fit the L1 cache at once.
        let keeps_sums = depth > kernel.depth && chunk.sums.is_none();
        let sums = Buffer::take(if keeps_sums { shared_width * own_lines } else { 0 });
        let ahead = Cell::new(match later {
            Some(later) => self.ahead(chunk, !rows_are_shared, later, 0..depth),
            None => Ahead::nothing(),
        });
        let mut pipeline = Pipeline { sums: [Sums::new(), Sums::new()], next: 0, unfinished: None };
        for shared_line in (0..num_shared).step_by(shared_width) {
            // Rows and columns are counted from the chunk's first ones.
            let stride = if rows_are_shared { own_lines } else { shared_width };
            let before =
                if rows_are_shared { [shared_line, lines.start] } else { [lines.start, shared_line] };
            let start = sums.words().cast::<f32>().wrapping_sub(before[0] * stride + before[1]);
            let own_sums = driver::Sums { start, stride, depth: chunk.depth.clone() };
            let sums = if keeps_sums { Some(&own_sums) } else { chunk.sums.as_ref() };
            for block in chunks(0..depth, kernel.depth) {
                let (steps, before) = (kernel.format.steps(block.len()), kernel.format.steps(block.start));
                for own_line in lines.clone().step_by(own_width) {
                    // Rows that are read in place have no panel, and their panel pointer is not used.
                    let panels = [
                        chunk.shared.wrapping_add(before * shared_lines + shared_line * steps),
                        own.words().wrapping_add(before * own_lines + (own_line - lines.start) * steps),
                    ];
                    let tile = self.tile(chunk, panels, [shared_line, own_line], &block, sums, &ahead);
                    // SAFETY: the panels were packed, and the tile lies in the result and in the sums.
                    unsafe { pipeline.multiply(unit, tile, block.end == depth) };
                }
            }
        }
        // SAFETY: as above.
        unsafe { pipeline.finish(unit) };
    }
}

/// A pipeline of tiles: each tile is computed before the previous one is finished.
struct Pipeline<'a> {
    sums: [Sums; 2],
    /// The index of the next tile's sums. The other sums belong to the unfinished tile.
    next: usize,
    unfinished: Option<Tile<'a>>,
}

impl<'a> Pipeline<'a> {
    /// Computes a tile. Only a tile with complete sums may be finished later, because no other tile reads its sums.
    ///
    /// # Safety
    /// See [`UnitKernel::sum`].
    unsafe fn multiply(&mut self, unit: &UnitKernel, tile: Tile<'a>, is_complete: bool) {
        // SAFETY: what the caller promises.
        unsafe {
            let is_unfinished = (unit.sum)(&tile, unit.multiplication, &mut self.sums[self.next]);
            self.finish(unit);
            if is_unfinished && is_complete {
                self.unfinished = Some(tile);
                self.next = 1 - self.next;
            } else if is_unfinished {
                (unit.finish)(&tile, &mut self.sums[self.next]);
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
