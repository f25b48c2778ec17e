//! Words of panels, built from sixteen elements of an operand at a time.

use std::arch::x86_64::*;

use half::bf16;

use super::tiles::{as_bf16, round_avx512};

/// Builds words from an operand's elements. The functions must be inlined into code with the instructions enabled.
pub(super) trait Load: Copy {
    type Element;

    /// The elements along the contraction in a word.
    const DEPTH: usize;

    /// The elements in a cache line.
    const CACHE_LINE: usize;

    /// The address of the source's first element.
    fn source(self) -> *const Self::Element;

    /// A word of each of up to sixteen adjacent lines: the elements from `first` on and, if a word holds two, those
    /// from `second` on (zeros if that is `None`).
    ///
    /// # Safety
    /// The elements of the mask lie in the source.
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i;

    /// A word of each of 32 adjacent lines.
    ///
    /// # Safety
    /// The elements lie in the source.
    #[inline(always)]
    unsafe fn across_two(self, first: usize, second: usize) -> [__m512i; 2] {
        let all = __mmask16::MAX;
        // SAFETY: what the caller promises.
        unsafe { [self.across(first, Some(second), all), self.across(first + 16, Some(second + 16), all)] }
    }

    /// Up to sixteen words of a line: the `count` elements from `first` on.
    ///
    /// # Safety
    /// The elements lie in the source.
    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises; a word is of one element here.
        unsafe { self.across(first, None, first_lanes(count)) }
    }

    /// Adds products of words to sums.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[inline(always)]
    unsafe fn add_products(sums: __m512, left: __m512i, right: __m512i) -> __m512 {
        // SAFETY: what the caller promises.
        unsafe { _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sums) }
    }

    /// Prefetches elements into the caches. They may lie outside of the source.
    #[inline(always)]
    fn prefetch(self, first: usize) {
        // SAFETY: prefetching reads no values, and accepts any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(self.source().wrapping_add(first).cast()) }
    }

    /// Prefetches elements into the L2 cache and the outer ones.
    #[inline(always)]
    fn prefetch_far(self, first: usize) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(self.source().wrapping_add(first).cast()) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Plain(pub *const f32);

impl Load for Plain {
    type Element = f32;
    const DEPTH: usize = 1;
    const CACHE_LINE: usize = 16;

    #[inline(always)]
    fn source(self) -> *const f32 {
        self.0
    }

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, self.0.add(first))) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Rounded(pub *const f32);

impl Load for Rounded {
    type Element = f32;
    const DEPTH: usize = 1;
    const CACHE_LINE: usize = 16;

    #[inline(always)]
    fn source(self) -> *const f32 {
        self.0
    }

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_slli_epi32::<16>(round_avx512(_mm512_maskz_loadu_ps(mask, self.0.add(first)))) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Widened(pub *const bf16);

impl Load for Widened {
    type Element = bf16;
    const DEPTH: usize = 1;
    const CACHE_LINE: usize = 32;

    #[inline(always)]
    fn source(self) -> *const bf16 {
        self.0
    }

    #[inline(always)]
    unsafe fn across(self, first: usize, _: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_slli_epi32::<16>(load_halves(self.0.add(first), mask)) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct PairsOfBf16(pub *const bf16);

impl Load for PairsOfBf16 {
    type Element = bf16;
    const DEPTH: usize = 2;
    const CACHE_LINE: usize = 32;

    #[inline(always)]
    fn source(self) -> *const bf16 {
        self.0
    }

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
    unsafe fn across_two(self, first: usize, second: usize) -> [__m512i; 2] {
        // SAFETY: what the caller promises.
        unsafe {
            let low = _mm512_loadu_si512(self.0.add(first).cast());
            let high = _mm512_loadu_si512(self.0.add(second).cast());
            [LOWER.vector(), UPPER.vector()].map(|indices| _mm512_permutex2var_epi16(low, indices, high))
        }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe { _mm512_maskz_loadu_epi16(u32::MAX >> (32 - count), self.0.add(first).cast()) }
    }

    #[inline(always)]
    unsafe fn add_products(sums: __m512, left: __m512i, right: __m512i) -> __m512 {
        // SAFETY: what the caller promises.
        unsafe { _mm512_dpbf16_ps(sums, as_bf16(left), as_bf16(right)) }
    }
}

#[derive(Clone, Copy)]
pub(super) struct PairsOfF32(pub *const f32);

impl Load for PairsOfF32 {
    type Element = f32;
    const DEPTH: usize = 2;
    const CACHE_LINE: usize = 16;

    #[inline(always)]
    fn source(self) -> *const f32 {
        self.0
    }

    #[inline(always)]
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe {
            let [low, high] = floats_across(self.0, first, second, mask);
            zipped(low, high)
        }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe {
            let [low, high] = floats_along(self.0, first, count);
            joined(low, high)
        }
    }

    #[inline(always)]
    unsafe fn add_products(sums: __m512, left: __m512i, right: __m512i) -> __m512 {
        // SAFETY: what the caller promises.
        unsafe { _mm512_dpbf16_ps(sums, as_bf16(left), as_bf16(right)) }
    }
}

/// Pairs of `bf16`: for each number, the remainder of rounding it to `bf16`, itself rounded.
#[derive(Clone, Copy)]
pub(super) struct PairsOfRemainders(pub *const f32);

impl Load for PairsOfRemainders {
    type Element = f32;
    const DEPTH: usize = 2;
    const CACHE_LINE: usize = 16;

    #[inline(always)]
    fn source(self) -> *const f32 {
        self.0
    }

    #[inline(always)]
    unsafe fn across(self, first: usize, second: Option<usize>, mask: __mmask16) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe {
            let [low, high] = floats_across(self.0, first, second, mask);
            zipped(remainders(low), remainders(high))
        }
    }

    #[inline(always)]
    unsafe fn along(self, first: usize, count: usize) -> __m512i {
        // SAFETY: what the caller promises.
        unsafe {
            let [low, high] = floats_along(self.0, first, count);
            joined(remainders(low), remainders(high))
        }
    }
}

/// Numbers of up to sixteen adjacent lines, from `first` on and from `second` on; zeros if there is no second.
///
/// # Safety
/// The elements of the mask lie in the source.
#[inline(always)]
unsafe fn floats_across(
    source: *const f32,
    first: usize,
    second: Option<usize>,
    mask: __mmask16,
) -> [__m512; 2] {
    // SAFETY: what the caller promises.
    unsafe {
        let low = _mm512_maskz_loadu_ps(mask, source.add(first));
        let high = match second {
            Some(second) => _mm512_maskz_loadu_ps(mask, source.add(second)),
            None => _mm512_setzero_ps(),
        };
        [low, high]
    }
}

/// Up to 32 numbers of a line, from `first` on, padded with zeros.
///
/// # Safety
/// The elements lie in the source.
#[inline(always)]
unsafe fn floats_along(source: *const f32, first: usize, count: usize) -> [__m512; 2] {
    // SAFETY: what the caller promises.
    unsafe {
        let low = _mm512_maskz_loadu_ps(first_lanes(count.min(16)), source.add(first));
        let high = match count {
            0..=16 => _mm512_setzero_ps(),
            _ => _mm512_maskz_loadu_ps(first_lanes(count - 16), source.add(first + 16)),
        };
        [low, high]
    }
}

/// Rounds two vectors to `bf16` and joins them.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn joined(low: __m512, high: __m512) -> __m512i {
    // SAFETY: what the caller promises; both types are 64 bytes without invalid values.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rounds two vectors to `bf16` and interleaves them, the first vector's numbers in the lower halves of words.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn zipped(low: __m512, high: __m512) -> __m512i {
    // SAFETY: what the caller promises.
    unsafe { _mm512_permutexvar_epi16(INTERLEAVE.vector(), joined(low, high)) }
}

/// The remainders of rounding to `bf16`; zero where rounding gives an infinity.
///
/// # Safety
/// The processor has the instructions.
#[inline(always)]
unsafe fn remainders(numbers: __m512) -> __m512 {
    // SAFETY: what the caller promises.
    unsafe {
        let first = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(round_avx512(numbers)));
        let magnitude = _mm512_abs_ps(first);
        let is_finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(magnitude, _mm512_set1_ps(f32::INFINITY));
        _mm512_maskz_sub_ps(is_finite, numbers, first)
    }
}

/// Sixteen `bf16`, each in the lower half of a word.
///
/// # Safety
/// The elements of the mask lie in the source.
#[inline(always)]
unsafe fn load_halves(start: *const bf16, mask: __mmask16) -> __m512i {
    // SAFETY: what the caller promises.
    unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, start.cast())) }
}

/// A mask of the first `count` lanes; `count` is at least 1.
#[inline(always)]
pub(super) fn first_lanes(count: usize) -> __mmask16 {
    u16::MAX >> (16 - count)
}

/// Moves the first half of a vector to the even positions and the second half to the odd ones.
static INTERLEAVE: Indices = Indices(interleave(0, 16));

/// Interleaves the first halves of two vectors.
static LOWER: Indices = Indices(interleave(0, 32));

/// Interleaves the second halves of two vectors.
static UPPER: Indices = Indices(interleave(16, 48));

#[repr(align(64))]
struct Indices([u16; 32]);

impl Indices {
    #[inline(always)]
    fn vector(&self) -> __m512i {
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_loadu_si512(self.0.as_ptr().cast()) }
    }
}

const fn interleave(even: u16, odd: u16) -> [u16; 32] {
    let mut indices = [0; 32];
    let mut index = 0;
    while index < 16 {
        indices[2 * index] = even + index as u16;
        indices[2 * index + 1] = odd + index as u16;
        index += 1;
    }
    indices
}
