//! Tiles and panels with the instructions of x86 processors.

use std::arch::x86_64::*;

use super::Arithmetic;
use super::kernel::{Kernel, Out, Tile};
use super::pack::{self, Format, Panel};

/// The kernels that this processor can run, the fastest first.
pub(super) fn available(arithmetic: Arithmetic) -> &'static [Kernel] {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    match arithmetic {
        Arithmetic::F32 if avx512 => &F32,
        Arithmetic::F32 if avx2 => &F32[1..],
        Arithmetic::Bf16 if avx512 && is_x86_feature_detected!("avx512bf16") => &BF16,
        Arithmetic::Bf16 if avx512 => &BF16[1..],
        Arithmetic::Bf16 if avx2 => &BF16[2..],
        _ => &[],
    }
}

static F32: [Kernel; 2] = [AVX512_F32, AVX2_F32];

static BF16: [Kernel; 3] = [
    Kernel { format: Format::Pairs, depth: 512, multiply: multiply_avx512_bf16, ..AVX512_F32 },
    Kernel { format: Format::RoundedF32, ..AVX512_F32 },
    Kernel { format: Format::RoundedF32, ..AVX2_F32 },
];

const AVX512_F32: Kernel = Kernel {
    rows: 14,
    columns: 32,
    lanes: 16,
    depth: 256,
    format: Format::F32,
    multiply: multiply_avx512,
    pack: pack_avx512,
};

const AVX2_F32: Kernel = Kernel {
    rows: 6,
    columns: 16,
    lanes: 8,
    depth: 256,
    format: Format::F32,
    multiply: multiply_avx2,
    pack: pack_avx2,
};

/// Calls the instance of a function for the tile's rows and vectors.
macro_rules! dispatch {
    ($function:ident, $tile:ident, $lanes:literal, $($rows:literal)*) => {
        match ($tile.rows, $tile.columns > $lanes) {
            // SAFETY: what the caller promises.
            $(($rows, false) => unsafe { $function::<$rows, 1>($tile) },
            // SAFETY: what the caller promises.
            ($rows, true) => unsafe { $function::<$rows, 2>($tile) },)*
            _ => unreachable!("a kernel's tiles have at most its rows"),
        }
    };
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn multiply_avx512_bf16(tile: &Tile) {
    dispatch!(tile_avx512_bf16, tile, 16, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn multiply_avx512(tile: &Tile) {
    dispatch!(tile_avx512, tile, 16, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_avx2(tile: &Tile) {
    dispatch!(tile_avx2, tile, 8, 1 2 3 4 5 6)
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tile_avx512_bf16<const ROWS: usize, const VECTORS: usize>(tile: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let (mut lhs, mut rhs) = (tile.lhs, tile.rhs);
    for _ in 0..tile.steps {
        // SAFETY: the panels have as many steps, of so many rows and whole vectors of columns.
        unsafe {
            let mut columns = [_mm512_setzero_si512(); VECTORS];
            for (vector, columns) in columns.iter_mut().enumerate() {
                *columns = _mm512_loadu_si512(rhs.add(16 * vector).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = as_bf16(_mm512_set1_epi32(*lhs.add(row) as i32));
                for (sum, columns) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_dpbf16_ps(*sum, factor, as_bf16(columns));
                }
            }
            lhs = lhs.add(ROWS);
            rhs = rhs.add(16 * VECTORS);
        }
    }
    // SAFETY: the tile has these rows and vectors.
    unsafe { finish_avx512(tile, &sums) };
}

#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn tile_avx512<const ROWS: usize, const VECTORS: usize>(tile: &Tile) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    let (mut lhs, mut rhs) = (tile.lhs.cast::<f32>(), tile.rhs.cast::<f32>());
    for _ in 0..tile.steps {
        // SAFETY: the panels have as many steps, of so many rows and whole vectors of columns.
        unsafe {
            let mut columns = [_mm512_setzero_ps(); VECTORS];
            for (vector, columns) in columns.iter_mut().enumerate() {
                *columns = _mm512_loadu_ps(rhs.add(16 * vector));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = _mm512_set1_ps(*lhs.add(row));
                for (sum, columns) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_fmadd_ps(factor, columns, *sum);
                }
            }
            lhs = lhs.add(ROWS);
            rhs = rhs.add(16 * VECTORS);
        }
    }
    // SAFETY: the tile has these rows and vectors.
    unsafe { finish_avx512(tile, &sums) };
}

/// Adds what the sums start from and writes them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn finish_avx512<const ROWS: usize, const VECTORS: usize>(
    tile: &Tile,
    sums: &[[__m512; VECTORS]; ROWS],
) {
    for (row, sums) in sums.iter().enumerate() {
        for (vector, &sum) in sums.iter().enumerate() {
            let column = 16 * vector;
            let count = (tile.columns - column).min(16);
            let mask = (u32::MAX >> (32 - count)) as __mmask16;
            // SAFETY: the columns of the mask lie in the tile.
            unsafe {
                let sum = match tile.initial {
                    Some(initial) => {
                        let initial = initial.add(row * tile.initial_stride + column);
                        _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, initial))
                    }
                    None => sum,
                };
                match tile.out.add(row * tile.out_stride + column) {
                    Out::F32(out) => _mm512_mask_storeu_ps(out, mask, sum),
                    Out::Bf16(out) => {
                        let narrow = _mm512_cvtepi32_epi16(round_avx512(sum));
                        let narrow = _mm512_castsi256_si512(narrow);
                        _mm512_mask_storeu_epi16(out.cast(), u32::from(mask), narrow);
                    }
                }
            }
        }
    }
}

/// Rounds to `bf16`, in the lower halves; unlike the instruction for this, without losing subnormal numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn round_avx512(numbers: __m512) -> __m512i {
    let bits = _mm512_castps_si512(numbers);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(numbers, numbers);
    _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, is_nan, quiet))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn as_bf16(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { std::mem::transmute(words) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2<const ROWS: usize, const VECTORS: usize>(tile: &Tile) {
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; ROWS];
    let (mut lhs, mut rhs) = (tile.lhs.cast::<f32>(), tile.rhs.cast::<f32>());
    for _ in 0..tile.steps {
        // SAFETY: the panels have as many steps, of so many rows and whole vectors of columns.
        unsafe {
            let mut columns = [_mm256_setzero_ps(); VECTORS];
            for (vector, columns) in columns.iter_mut().enumerate() {
                *columns = _mm256_loadu_ps(rhs.add(8 * vector));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = _mm256_set1_ps(*lhs.add(row));
                for (sum, columns) in sums.iter_mut().zip(columns) {
                    *sum = _mm256_fmadd_ps(factor, columns, *sum);
                }
            }
            lhs = lhs.add(ROWS);
            rhs = rhs.add(8 * VECTORS);
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        let mut all = [0f32; 16];
        for (vector, &sum) in sums.iter().enumerate() {
            // SAFETY: there are at most two vectors.
            unsafe { _mm256_storeu_ps(all.as_mut_ptr().add(8 * vector), sum) };
        }
        // SAFETY: the tile has this row and no more columns.
        unsafe { super::kernel::finish_row(tile, row, &all) };
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_avx512(panel: &Panel) {
    // SAFETY: what the caller promises.
    unsafe { pack::portable(panel) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn pack_avx2(panel: &Panel) {
    // SAFETY: what the caller promises.
    unsafe { pack::portable(panel) }
}
