//! Tiles whose sums AMX computes.

use std::arch::x86_64::*;

use super::super::blocks::{self, Sums};
use super::super::kernel::{Out, Tile};
use super::tiles::fetch;
use crate::amx::{BLOCK, Multiplication, Processor, TILE};

/// The bytes of a cache line.
const LINE: usize = 64;

/// The lines that are prefetched for each tile.
const LINES_FETCHED: usize = 16;

/// # Safety
/// See [`super::super::kernel::UnitKernel::finish`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn finish(tile: &Tile, sums: &mut Sums) {
    // SAFETY: what the caller promises.
    unsafe { if tile.columns > 16 { write::<2>(tile, sums) } else { write::<1>(tile, sums) } }
}

/// # Safety
/// See [`super::super::kernel::UnitKernel::sum`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn sum(tile: &Tile, multiplication: Multiplication, sums: &mut Sums) -> bool {
    let mut ahead = tile.ahead.get();
    for _ in 0..LINES_FETCHED {
        fetch(&mut ahead);
    }
    tile.ahead.set(ahead);
    let initial = tile.initial.map(|initial| (initial, tile.initial_stride));
    // SAFETY: what the caller promises. Sums that do not fill whole tiles go to a buffer.
    unsafe {
        if let Some(out) = blocks::in_place(tile) {
            blocks::multiply::<Processor>(tile, multiplication, initial, out, tile.out_stride);
            return false;
        }
        // One pointer serves all accesses, because a second one would end the first one's borrow.
        let start = sums.row(0);
        let initial = match initial {
            Some(initial) if tile.rows.is_multiple_of(TILE) && tile.columns.is_multiple_of(TILE) => {
                Some(initial)
            }
            Some(_) => {
                if tile.columns > 16 {
                    begin::<2>(tile, start)
                } else {
                    begin::<1>(tile, start)
                }
                Some((start.cast_const(), BLOCK))
            }
            None => None,
        };
        blocks::multiply::<Processor>(tile, multiplication, initial, start, BLOCK);
    }
    true
}

/// The mask of the tile's columns in a vector.
#[inline(always)]
fn mask<const VECTORS: usize>(tile: &Tile, vector: usize) -> __mmask16 {
    if vector + 1 == VECTORS { u16::MAX >> (16 * VECTORS - tile.columns) } else { __mmask16::MAX }
}

/// Copies the initial sums to `sums` and fills the rest with zeros.
///
/// # Safety
/// The tile has this number of vectors of columns. The caller has AVX-512F and BW enabled, and this function is inlined
/// there.
#[inline(always)]
unsafe fn begin<const VECTORS: usize>(tile: &Tile, sums: *mut f32) {
    let Some(initial) = tile.initial else { return };
    for row in 0..BLOCK {
        let own = sums.wrapping_add(row * BLOCK);
        // SAFETY: the columns of the masks lie in the tile.
        unsafe {
            for vector in 0..VECTORS {
                let numbers = if row < tile.rows {
                    let initial = initial.add(row * tile.initial_stride + 16 * vector);
                    _mm512_maskz_loadu_ps(mask::<VECTORS>(tile, vector), initial)
                } else {
                    _mm512_setzero_ps()
                };
                _mm512_store_ps(own.add(16 * vector), numbers);
            }
        }
    }
}

/// Writes the sums to the result.
///
/// # Safety
/// The tile has this number of vectors of columns, and its sums have been computed. The caller has AVX-512F and BW
/// enabled, and this function is inlined there.
#[inline(always)]
unsafe fn write<const VECTORS: usize>(tile: &Tile, sums: &mut Sums) {
    // Only whole cache lines are written past the caches.
    let bypasses_caches = tile.bypasses_caches
        && tile.columns == BLOCK
        && (tile.out_stride * tile.out.bytes()).is_multiple_of(LINE)
        && tile.out.address().is_multiple_of(LINE);
    // SAFETY: the columns of the masks lie in the tile.
    unsafe {
        match tile.out {
            // Sums for `i32` are bits of integers, which are copied unchanged.
            Out::F32(_) | Out::I32(_) => {
                let out = match tile.out {
                    Out::I32(out) => out.cast::<f32>(),
                    Out::F32(out) => out,
                    Out::Bf16(_) => unreachable!("another type"),
                };
                for row in 0..tile.rows {
                    let (own, out) = (sums.row(row), out.add(row * tile.out_stride));
                    for vector in 0..VECTORS {
                        let sum = _mm512_load_ps(own.add(16 * vector));
                        if bypasses_caches {
                            _mm512_stream_ps(out.add(16 * vector), sum);
                        } else {
                            _mm512_mask_storeu_ps(out.add(16 * vector), mask::<VECTORS>(tile, vector), sum);
                        }
                    }
                }
            }
            Out::Bf16(out) => {
                let mask = u32::MAX >> (32 - tile.columns);
                for row in 0..tile.rows {
                    let (own, out) = (sums.row(row), out.add(row * tile.out_stride));
                    let low = _mm512_load_ps(own);
                    let high = if VECTORS == 2 { _mm512_load_ps(own.add(16)) } else { _mm512_setzero_ps() };
                    let narrow: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                    if bypasses_caches {
                        _mm512_stream_si512(out.cast(), narrow);
                    } else {
                        _mm512_mask_storeu_epi16(out.cast(), mask, narrow);
                    }
                }
            }
        }
    }
}
