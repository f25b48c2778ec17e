//! Products of few lines with many that are read once.

use std::arch::x86_64::*;

use super::super::pack::Source;
use super::super::stream::Strip;
use super::load::{Load, PairsOfBf16, PairsOfF32, Plain, Rounded, Widened, first_lanes};

/// Calls a function for the number of lines of the factors, and as many vectors or lines of the strip at a time as leave
/// registers free.
macro_rules! dispatch {
    ($function:ident, $strip:ident, $load:expr) => {{
        let load = $load;
        match $strip.few {
            1 => $function::<_, 1, 8>($strip, load),
            2 => $function::<_, 2, 8>($strip, load),
            4 => $function::<_, 4, 4>($strip, load),
            8 => $function::<_, 8, 2>($strip, load),
            _ => $function::<_, 16, 1>($strip, load),
        }
    }};
}

macro_rules! functions {
    ($($across:ident, $along:ident, $features:literal, $f32:ident, $bf16:ident;)*) => {
        $(/// See [`super::Streams::across`].
        ///
        /// # Safety
        /// See there.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $across(strip: &Strip) {
            // SAFETY: what the caller promises; the processor has the instructions.
            unsafe {
                match strip.source {
                    Source::F32(start) => dispatch!(across, strip, $f32(start)),
                    Source::Bf16(start) => dispatch!(across, strip, $bf16(start)),
                }
            }
        }

        /// See [`super::Streams::along`].
        ///
        /// # Safety
        /// See there.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $along(strip: &Strip) {
            // SAFETY: what the caller promises; the processor has the instructions.
            unsafe {
                match strip.source {
                    Source::F32(start) => dispatch!(along, strip, $f32(start)),
                    Source::Bf16(start) => dispatch!(along, strip, $bf16(start)),
                }
            }
        })*
    };
}

functions! {
    across_avx512, along_avx512, "avx512f,avx512bw,avx512vl", Plain, Widened;
    across_avx512_rounded, along_avx512_rounded, "avx512f,avx512bw,avx512vl", Rounded, Widened;
    across_avx512_bf16, along_avx512_bf16, "avx512f,avx512bw,avx512vl,avx512bf16", PairsOfF32, PairsOfBf16;
}

/// How many steps are done for some lines before the next ones. Their pages are known to the processor meanwhile.
const BLOCK: usize = 32;

/// # Safety
/// See [`super::Streams::across`].
#[inline(always)]
unsafe fn across<L: Load, const FEW: usize, const VECTORS: usize>(strip: &Strip, load: L) {
    let count = strip.lines.len();
    let steps = strip.offsets.len().div_ceil(L::DEPTH);
    for start in (0..steps).step_by(BLOCK) {
        let end = (start + BLOCK).min(steps);
        let mut line = 0;
        // SAFETY: the lines and steps lie in the strip.
        unsafe {
            while line + 16 * VECTORS <= count {
                across_block::<L, FEW, VECTORS>(strip, load, start, end, line, 16);
                line += 16 * VECTORS;
            }
            while line < count {
                let lanes = (count - line).min(16);
                across_block::<L, FEW, 1>(strip, load, start, end, line, lanes);
                line += lanes;
            }
        }
    }
}

/// Adds some steps of some lines, of which the last vector has so many lanes.
///
/// # Safety
/// The strip has these steps and lines.
#[inline(always)]
unsafe fn across_block<L: Load, const FEW: usize, const VECTORS: usize>(
    strip: &Strip,
    load: L,
    start: usize,
    end: usize,
    line: usize,
    lanes: usize,
) {
    let depth = strip.offsets;
    let mask = first_lanes(lanes);
    let first_line = strip.lines[0] + line;
    // SAFETY: the processor has the instruction.
    let mut sums = [[unsafe { _mm512_setzero_ps() }; VECTORS]; FEW];
    // SAFETY: the lines, steps and factors lie in the strip.
    unsafe {
        let out = strip.sums.add(line);
        if start > 0 {
            for (few, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_maskz_loadu_ps(mask, out.add(few * strip.lines.len() + 16 * vector));
                }
            }
        }
        for step in start..end {
            let position = step * L::DEPTH;
            let first = first_line + depth[position];
            let second =
                if L::DEPTH == 2 { depth.get(position + 1).map(|second| first_line + second) } else { None };
            let later = first_line + depth[(position + BLOCK * L::DEPTH).min(depth.len() - 1)];
            let factors = strip.factors.add(step * FEW);
            for vector in 0..VECTORS {
                load.prefetch(later + 16 * vector);
                let words = load.across(first + 16 * vector, second.map(|second| second + 16 * vector), mask);
                for (few, sums) in sums.iter_mut().enumerate() {
                    let factor = _mm512_set1_epi32(*factors.add(few) as i32);
                    sums[vector] = L::add_products(sums[vector], factor, words);
                }
            }
        }
        for (few, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                _mm512_mask_storeu_ps(out.add(few * strip.lines.len() + 16 * vector), mask, sum);
            }
        }
    }
}

/// # Safety
/// See [`super::Streams::along`].
#[inline(always)]
unsafe fn along<L: Load, const FEW: usize, const LINES: usize>(strip: &Strip, load: L) {
    let count = strip.lines.len();
    let mut line = 0;
    // SAFETY: the lines lie in the strip.
    unsafe {
        while line + LINES <= count {
            along_lines::<L, FEW, LINES>(strip, load, line);
            line += LINES;
        }
        while line < count {
            along_lines::<L, FEW, 1>(strip, load, line);
            line += 1;
        }
    }
}

/// Computes some lines.
///
/// # Safety
/// The strip has these lines.
#[inline(always)]
unsafe fn along_lines<L: Load, const FEW: usize, const LINES: usize>(strip: &Strip, load: L, line: usize) {
    let depth = strip.offsets.len();
    let steps = depth.div_ceil(L::DEPTH);
    let all = strip.lines.len();
    let lines: [usize; LINES] = std::array::from_fn(|index| strip.lines[line + index] + strip.offsets[0]);
    let later: [usize; LINES] =
        std::array::from_fn(|index| strip.lines[(line + LINES + index).min(all - 1)] + strip.offsets[0]);
    // SAFETY: the processor has the instruction.
    let mut sums = [[unsafe { _mm512_setzero_ps() }; LINES]; FEW];
    // SAFETY: the lines and factors lie in the strip.
    unsafe {
        let mut step = 0;
        while step + 16 <= steps && (step + 16) * L::DEPTH <= depth {
            let position = step * L::DEPTH;
            for index in 0..LINES {
                load.prefetch(later[index] + position);
                let words = load.along(lines[index] + position, 16 * L::DEPTH);
                for (few, sums) in sums.iter_mut().enumerate() {
                    let factors = _mm512_loadu_si512(strip.factors.add(few * steps + step).cast());
                    sums[index] = L::add_products(sums[index], factors, words);
                }
            }
            step += 16;
        }
        if step < steps {
            let position = step * L::DEPTH;
            let mask = first_lanes(steps - step);
            for index in 0..LINES {
                let words = load.along(lines[index] + position, depth - position);
                for (few, sums) in sums.iter_mut().enumerate() {
                    let factors =
                        _mm512_maskz_loadu_epi32(mask, strip.factors.add(few * steps + step).cast());
                    sums[index] = L::add_products(sums[index], factors, words);
                }
            }
        }
        for (few, sums) in sums.iter().enumerate() {
            for (index, &sum) in sums.iter().enumerate() {
                *strip.sums.add(few * all + line + index) = _mm512_reduce_add_ps(sum);
            }
        }
    }
}
