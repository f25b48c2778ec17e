//! Tiles of a product whose sums a matrix unit computes.

use std::mem::MaybeUninit;

use super::kernel::Tile;
use crate::amx::{BLOCK, Block, Extent, Multiplication, TILE, Unit};

/// A block of sums: `[rows, columns]`.
#[repr(align(64))]
pub(super) struct Sums(MaybeUninit<[[f32; BLOCK]; BLOCK]>);

impl Sums {
    /// Some sums of a row, from a column on.
    #[inline(always)]
    pub fn row(&self, row: usize) -> *const f32 {
        self.0.as_ptr().cast::<[f32; BLOCK]>().wrapping_add(row).cast()
    }
}

/// Computes the sums of a tile. Those beyond its rows and columns are meaningless.
///
/// # Safety
/// See [`super::Kernel::multiply`]; the thread is in a session of the unit.
#[inline(always)]
pub(super) unsafe fn sums<U: Unit>(tile: &Tile, multiplication: Multiplication) -> Sums {
    let mut sums = Sums(MaybeUninit::uninit());
    let count = tile.steps / (multiplication.halves() * TILE);
    let extent = Extent { two_rows: tile.rows > TILE, two_columns: tile.columns > TILE };
    let block = Block {
        multiplication,
        extent,
        count,
        left: tile.lhs.cast(),
        left_stride: tile.lhs_stride.unwrap_or(4 * tile.steps),
        right: tile.rhs.cast(),
        right_stride: if extent.two_columns { 4 * BLOCK } else { 4 * TILE },
        sums: sums.0.as_mut_ptr().cast(),
        sums_stride: 4 * BLOCK,
    };
    // SAFETY: panels hold whole tiles, as do rows that are read in place; the sums have room for two by two tiles.
    unsafe { U::multiply(&block) };
    sums
}
