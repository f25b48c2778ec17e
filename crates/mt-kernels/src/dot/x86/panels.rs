//! Copies of operands into panels, sixteen words at a time.

use std::arch::x86_64::*;

use half::bf16;

use super::super::pack::{Format, Panels, Source, copy_elements, portable};
use super::tiles::round_avx512;

/// Copies panels of pairs of `bf16`.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_avx512_bf16(panels: &Panels) {
    // SAFETY: what the caller promises; the processor has the instructions.
    unsafe {
        match panels.source {
            Source::F32(start) => copy(panels, PairsOfF32(start)),
            Source::Bf16(start) => copy(panels, PairsOfBf16(start)),
        }
    }
}

/// Copies panels of `f32`.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_avx512(panels: &Panels) {
    // SAFETY: what the caller promises; the processor has the instructions.
    unsafe {
        match panels.source {
            Source::F32(start) if panels.format == Format::F32 => copy(panels, Plain(start)),
            Source::F32(start) => copy(panels, Rounded(start)),
            Source::Bf16(start) => copy(panels, Widened(start)),
        }
    }
}

/// Copies panels of `f32`.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn pack_avx2(panels: &Panels) {
    // SAFETY: what the caller promises.
    unsafe { portable(panels) }
}

/// How words are made of an operand's elements. The functions must be inlined where the instructions are enabled.
trait Load: Copy {
    /// How many elements along the contraction a word has.
    const DEPTH: usize;

    /// A word of each of up to sixteen adjacent lines: of the elements from `first` on and, where words have two, those
    /// from `second` on, if any.
    ///
    /// # Safety
    /// The elements of the mask lie in the source.
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i;

    /// Up to sixteen words of a line: of `count` elements from `first` on.
    ///
    /// # Safety
    /// The elements lie in the source.
    unsafe fn along(self, first: usize, count: usize) -> __m512i;
}

#[derive(Clone, Copy)]
struct Plain(*const f32);

impl Load for Plain {
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, self.0.add(first))) }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { self.across(first, None, first_lanes(count)) }
    }
}

#[derive(Clone, Copy)]
struct Rounded(*const f32);

impl Load for Rounded {
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_slli_epi32::<16>(round_avx512(_mm512_maskz_loadu_ps(mask, self.0.add(first)))) }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { self.across(first, None, first_lanes(count)) }
    }
}

#[derive(Clone, Copy)]
struct Widened(*const bf16);

impl Load for Widened {
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_slli_epi32::<16>(load_halves(self.0.add(first), mask)) }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { self.across(first, None, first_lanes(count)) }
    }
}

#[derive(Clone, Copy)]
struct PairsOfBf16(*const bf16);

impl Load for PairsOfBf16 {
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe {
            let low = load_halves(self.0.add(first), mask);
            let Some(second) = second else { return low };
            let high = load_halves(self.0.add(second), mask);
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_maskz_loadu_epi16(u32::MAX >> (32 - count), self.0.add(first).cast()) }
    }
}

#[derive(Clone, Copy)]
struct PairsOfF32(*const f32);

impl Load for PairsOfF32 {
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises; both types are 64 bytes without invalid values.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask, self.0.add(first));
            let high =
                second.map_or(_mm512_setzero_ps(), |second| _mm512_maskz_loadu_ps(mask, self.0.add(second)));
            let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_permutexvar_epi16(INTERLEAVE.vector(), rounded)
        }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises; both types are 64 bytes without invalid values.
        unsafe {
            let low = _mm512_maskz_loadu_ps(first_lanes(count.min(16)), self.0.add(first));
            let high = match count {
                0..=16 => _mm512_setzero_ps(),
                _ => _mm512_maskz_loadu_ps(first_lanes(count - 16), self.0.add(first + 16)),
            };
            std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }
}

/// Sixteen halves, each in a word of its own.
///
/// # Safety
/// The elements of the mask lie in the source.
#[inline(always)]
unsafe fn load_halves(start: *const bf16, mask: __mmask16) -> __m512i {
    // SAFETY: what the caller promises.
    unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, start.cast())) }
}

/// A mask of the first lanes, of which there is at least one.
#[inline(always)]
fn first_lanes(count: usize) -> __mmask16 {
    u16::MAX >> (16 - count)
}

/// Brings the first half of a vector to the even positions and the second half to the odd ones.
static INTERLEAVE: Indices = Indices(interleave());

#[repr(align(64))]
struct Indices([u16; 32]);

impl Indices {
    #[inline(always)]
    fn vector(&self) -> __m512i {
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_loadu_si512(self.0.as_ptr().cast()) }
    }
}

const fn interleave() -> [u16; 32] {
    let mut indices = [0; 32];
    let mut index = 0;
    while index < 32 {
        indices[index] = (index / 2 + index % 2 * 16) as u16;
        index += 1;
    }
    indices
}

/// Fewer words than this along a line are not worth transposing.
const SHORT: usize = 4;

/// # Safety
/// See [`super::Kernel::pack`].
#[inline(always)]
unsafe fn copy<L: Load>(panels: &Panels, load: L) {
    // SAFETY: what the caller promises.
    unsafe {
        if panels.lines_are_adjacent() {
            copy_across(panels, load);
        } else {
            for panel in 0..panels.count() {
                copy_along(panels, panel, load);
            }
        }
    }
}

/// Copies panels whose lines are adjacent: a step has its words next to each other already.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[inline(always)]
unsafe fn copy_across<L: Load>(panels: &Panels, load: L) {
    let Panels { lines, offsets, width, .. } = *panels;
    for step in 0..panels.steps() {
        let first = lines[0] + offsets[step * L::DEPTH];
        let second =
            if L::DEPTH == 2 { offsets.get(2 * step + 1).map(|second| lines[0] + second) } else { None };
        for panel in 0..panels.count() {
            for lane in (0..width).step_by(16) {
                let line = panel * width + lane;
                let lanes = lines.len().saturating_sub(line).min(16).min(width - lane);
                // SAFETY: the lines' elements lie in the source, and the words in the panel.
                unsafe {
                    let words = match lanes {
                        0 => _mm512_setzero_si512(),
                        _ => {
                            load.across(first + line, second.map(|second| second + line), first_lanes(lanes))
                        }
                    };
                    let mask = first_lanes((width - lane).min(16));
                    _mm512_mask_storeu_epi32(panels.word(panel, step).add(lane).cast(), mask, words);
                }
            }
        }
    }
}

/// Copies a panel by transposing what is adjacent along its lines.
///
/// # Safety
/// See [`super::Kernel::pack`].
#[inline(always)]
unsafe fn copy_along<L: Load>(panels: &Panels, panel: usize, load: L) {
    let Panels { offsets, runs, width, .. } = *panels;
    let panel_lines = &panels.lines[panel * width..];
    let panel_lines = &panel_lines[..panel_lines.len().min(width)];
    let steps = panels.steps();
    let mut step = 0;
    while step < steps {
        let position = step * L::DEPTH;
        let run = runs[position].min(16 * L::DEPTH).min(offsets.len() - position);
        let is_end = position + run == offsets.len();
        let count = if is_end { run } else { run - run % L::DEPTH };
        let words = count.div_ceil(L::DEPTH);
        if words < SHORT {
            let words = words.max(1);
            // SAFETY: what the caller promises.
            unsafe { copy_elements(panels, panel, step..step + words) };
            step += words;
            continue;
        }
        for lane in (0..width).step_by(16) {
            // SAFETY: the lines' elements lie in the source, and the words in the panel.
            unsafe {
                let lines = panel_lines.get(lane..).unwrap_or_default();
                let start = offsets[position];
                let mut rows = [_mm512_setzero_si512(); 16];
                if let Some(lines) = lines.first_chunk::<16>() {
                    for line in 0..16 {
                        rows[line] = load.along(lines[line] + start, count);
                    }
                } else {
                    for (row, line) in rows.iter_mut().zip(lines) {
                        *row = load.along(line + start, count);
                    }
                }
                let columns = transpose(&rows);
                let out = panels.word(panel, step).add(lane);
                let mask = first_lanes((width - lane).min(16));
                if words == 16 {
                    for (step, column) in columns.iter().enumerate() {
                        _mm512_mask_storeu_epi32(out.add(step * width).cast(), mask, *column);
                    }
                } else {
                    for (step, column) in columns.iter().take(words).enumerate() {
                        _mm512_mask_storeu_epi32(out.add(step * width).cast(), mask, *column);
                    }
                }
            }
        }
        step += words;
    }
}

/// Makes rows of columns.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn transpose(rows: &[__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: what the caller promises.
    unsafe {
        let zero = _mm512_setzero_si512();
        let (mut pairs, mut fours, mut columns) = ([zero; 16], [zero; 16], [zero; 16]);
        for row in 0..8 {
            pairs[2 * row] = _mm512_unpacklo_epi32(rows[2 * row], rows[2 * row + 1]);
            pairs[2 * row + 1] = _mm512_unpackhi_epi32(rows[2 * row], rows[2 * row + 1]);
        }
        for row in 0..4 {
            for half in 0..2 {
                let (upper, lower) = (pairs[4 * row + half], pairs[4 * row + 2 + half]);
                fours[4 * row + 2 * half] = _mm512_unpacklo_epi64(upper, lower);
                fours[4 * row + 2 * half + 1] = _mm512_unpackhi_epi64(upper, lower);
            }
        }
        // Each vector now holds four rows of one column in each of its quarters.
        for column in 0..4 {
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[column], fours[4 + column]);
            let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[column], fours[4 + column]);
            let even_below = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[8 + column], fours[12 + column]);
            let odd_below = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[8 + column], fours[12 + column]);
            columns[column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_below);
            columns[8 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_below);
            columns[4 + column] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_below);
            columns[12 + column] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_below);
        }
        columns
    }
}
