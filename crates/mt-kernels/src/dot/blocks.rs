//! Tiles of a product whose sums a matrix unit computes.

use std::mem::MaybeUninit;

use super::kernel::{Out, Tile};
use crate::amx::{BLOCK, Block, Extent, Multiplication, OperandTiles, Streamed, TILE, Unit};

/// A block of sums: `[rows, columns]`.
#[repr(align(64))]
pub(super) struct Sums(MaybeUninit<[[f32; BLOCK]; BLOCK]>);

impl Sums {
    pub fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    #[inline(always)]
    pub fn row(&mut self, row: usize) -> *mut f32 {
        self.0.as_mut_ptr().cast::<[f32; BLOCK]>().wrapping_add(row).cast()
    }
}

/// The address of a tile's result if the unit can write sums there: whole tiles of `f32` or `i32`. Integers are written
/// as bits of `f32`.
#[inline(always)]
pub(super) fn in_place(tile: &Tile) -> Option<*mut f32> {
    match tile.out {
        Out::F32(out)
            if tile.rows.is_multiple_of(TILE)
                && tile.columns.is_multiple_of(TILE)
                && !tile.bypasses_caches =>
        {
            Some(out)
        }
        Out::I32(out) if tile.rows.is_multiple_of(TILE) && tile.columns.is_multiple_of(TILE) => {
            Some(out.cast())
        }
        _ => None,
    }
}

/// Computes the sums of a tile from initial sums, `[rows, columns]` with a stride in numbers, or from zero.
///
/// # Safety
/// See [`super::kernel::Compute::Vectors`]. The thread is in a session of the unit. Whole tiles of the initial and of
/// the final sums lie in valid memory.
#[inline(always)]
pub(super) unsafe fn multiply<U: Unit>(
    tile: &Tile,
    multiplication: Multiplication,
    initial: Option<(*const f32, usize)>,
    sums: *mut f32,
    sums_stride: usize,
) {
    let extent = Extent { two_rows: tile.rows > TILE, two_columns: tile.columns > TILE };
    let (initial, initial_stride) =
        initial.map_or((std::ptr::null(), 0), |(initial, stride)| (initial.cast(), 4 * stride));
    let block = Block {
        multiplication,
        extent,
        streamed: if tile.shares_lhs { Streamed::Right } else { Streamed::Left },
        count: tile.steps / (multiplication.halves() * TILE),
        left: match tile.lhs_stride {
            None => packed(tile.lhs, extent.two_rows),
            Some(stride) => {
                OperandTiles { start: tile.lhs.cast(), stride, second: stride * TILE, step: LINE }
            }
        },
        right: packed(tile.rhs, extent.two_columns),
        initial,
        initial_stride,
        sums: sums.cast(),
        sums_stride: 4 * sums_stride,
        fetch: tile.fetch,
    };
    // SAFETY: panels, and rows that are read in place, consist of whole tiles; the caller promises the rest.
    unsafe { U::multiply(&block) };
}

/// The bytes of a row of a tile.
const LINE: usize = 4 * TILE;

/// The tiles of a panel, each of which is contiguous.
fn packed(start: *const u32, has_two: bool) -> OperandTiles {
    let tile = LINE * TILE;
    OperandTiles {
        start: start.cast(),
        stride: LINE,
        second: tile,
        step: if has_two { 2 * tile } else { tile },
    }
}
