//! Tiles whose sums come from AMX.

use std::arch::x86_64::*;

use super::super::blocks::{self, Sums};
use super::super::kernel::{Out, Tile};
use super::tiles::{fetch, round_avx512};
use crate::amx::{Multiplication, Processor};

/// How many lines are fetched ahead for each tile.
const LINES_FETCHED: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_bf16(tile: &Tile) {
    // SAFETY: what the caller promises.
    unsafe { multiply(tile, Multiplication::Bf16) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_bf16_x3(tile: &Tile) {
    // SAFETY: what the caller promises.
    unsafe { multiply(tile, Multiplication::SplitF32) };
}

/// # Safety
/// See [`super::Kernel::multiply`].
#[inline(always)]
unsafe fn multiply(tile: &Tile, multiplication: Multiplication) {
    let mut ahead = tile.ahead.get();
    for _ in 0..LINES_FETCHED {
        fetch(&mut ahead);
    }
    tile.ahead.set(ahead);
    // SAFETY: what the caller promises; the unit has written the tile's rows and columns.
    unsafe {
        let sums = blocks::sums::<Processor>(tile, multiplication);
        if tile.columns > 16 { finish::<2>(tile, &sums) } else { finish::<1>(tile, &sums) }
    }
}

/// Adds what the sums start from and writes them.
///
/// # Safety
/// The tile has so many vectors of columns, and its sums have been computed. The caller has AVX-512F and BW enabled, and
/// this is inlined there.
#[inline(always)]
unsafe fn finish<const VECTORS: usize>(tile: &Tile, sums: &Sums) {
    let last = u16::MAX >> (16 * VECTORS - tile.columns);
    let mask = |vector: usize| if vector + 1 == VECTORS { last } else { __mmask16::MAX };
    for row in 0..tile.rows {
        let own = sums.row(row);
        // SAFETY: the columns of the masks lie in the tile.
        unsafe {
            for vector in 0..VECTORS {
                let mut sum = _mm512_load_ps(own.add(16 * vector));
                if let Some(initial) = tile.initial {
                    let initial = initial.add(row * tile.initial_stride + 16 * vector);
                    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask(vector), initial));
                }
                match tile.out {
                    Out::F32(out) => {
                        let out = out.add(row * tile.out_stride + 16 * vector);
                        _mm512_mask_storeu_ps(out, mask(vector), sum);
                    }
                    Out::Bf16(out) => {
                        let out = out.add(row * tile.out_stride + 16 * vector);
                        let narrow = _mm512_cvtepi32_epi16(round_avx512(sum));
                        _mm256_mask_storeu_epi16(out.cast(), mask(vector), narrow);
                    }
                }
            }
        }
    }
}
