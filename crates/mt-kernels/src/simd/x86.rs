//! The vectors of x86-64.

use std::arch::x86_64::*;

use super::{Simd, SimdBf16, Work};

/// AVX2 with fused multiply-add.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// [`Avx512`] with products of `bf16`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512);

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has_all = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        has_all.then_some(Self(()))
    }
}

impl Avx512Bf16 {
    pub(crate) fn detect() -> Option<Self> {
        Avx512::detect().filter(|_| is_x86_feature_detected!("avx512bf16")).map(Self)
    }
}

/// Implements methods of a trait that take a few instructions each.
macro_rules! instructions {
    ($(fn $name:ident($self:ident $(, $argument:ident: $type:ty)*) -> $result:ty { $value:expr })*) => {
        $(
            #[inline(always)]
            fn $name($self $(, $argument: $type)*) -> $result {
                // SAFETY: a value of this type exists only if the processor has the instructions.
                unsafe { $value }
            }
        )*
    };
}

/// Implements `Simd::run` by a function that is compiled for the features.
macro_rules! run {
    ($features:literal) => {
        #[inline(always)]
        fn run(self, work: impl Work) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            fn run(work: impl Work) {
                work.run();
            }
            // SAFETY: a value of this type exists only if the processor has the instructions.
            unsafe { run(work) }
        }
    };
}

impl Simd for Avx2 {
    type Floats = __m256;
    type Words = __m256i;
    type Mask = __m256;
    const WIDTH: usize = 8;
    const TILE: (usize, usize) = (6, 2);

    run!("avx2,fma");

    instructions! {
        fn splat(self, value: f32) -> __m256 { _mm256_set1_ps(value) }
        fn add(self, left: __m256, right: __m256) -> __m256 { _mm256_add_ps(left, right) }
        fn sub(self, left: __m256, right: __m256) -> __m256 { _mm256_sub_ps(left, right) }
        fn mul(self, left: __m256, right: __m256) -> __m256 { _mm256_mul_ps(left, right) }
        fn div(self, left: __m256, right: __m256) -> __m256 { _mm256_div_ps(left, right) }
        fn mul_add(self, left: __m256, right: __m256, addend: __m256) -> __m256 {
            _mm256_fmadd_ps(left, right, addend)
        }
        fn max(self, left: __m256, right: __m256) -> __m256 { _mm256_max_ps(left, right) }
        fn min(self, left: __m256, right: __m256) -> __m256 { _mm256_min_ps(left, right) }
        fn round(self, value: __m256) -> __m256 {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(value)
        }
        fn times_power_of_two(self, value: __m256, power: __m256) -> __m256 {
            {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
                _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            }
        }
        fn less(self, left: __m256, right: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LT_OQ>(left, right) }
        fn select(self, mask: __m256, yes: __m256, no: __m256) -> __m256 { _mm256_blendv_ps(no, yes, mask) }
        fn splat_word(self, value: u32) -> __m256i { _mm256_set1_epi32(value as i32) }
        fn bits(self, value: __m256) -> __m256i { _mm256_castps_si256(value) }
        fn floats(self, value: __m256i) -> __m256 { _mm256_castsi256_ps(value) }
        fn both(self, left: __m256, right: __m256) -> __m256 { _mm256_and_ps(left, right) }
        fn equal_words(self, left: __m256i, right: __m256i) -> __m256 {
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(left, right))
        }
        fn at_most(self, left: __m256i, right: __m256i) -> __m256 {
            _mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(left, right), _mm256_set1_epi32(-1)))
        }
        fn add_words(self, left: __m256i, right: __m256i) -> __m256i { _mm256_add_epi32(left, right) }
        fn xor_words(self, left: __m256i, right: __m256i) -> __m256i { _mm256_xor_si256(left, right) }
        fn and_words(self, left: __m256i, right: __m256i) -> __m256i { _mm256_and_si256(left, right) }
        fn rotate_left(self, value: __m256i, by: u32) -> __m256i {
            {
                let high = _mm256_sllv_epi32(value, _mm256_set1_epi32(by as i32));
                _mm256_or_si256(high, _mm256_srlv_epi32(value, _mm256_set1_epi32(32 - by as i32)))
            }
        }
        fn shift_right(self, value: __m256i, by: u32) -> __m256i {
            _mm256_srlv_epi32(value, _mm256_set1_epi32(by as i32))
        }
        fn converted(self, value: __m256i) -> __m256 { _mm256_cvtepi32_ps(value) }
        fn round_bf16(self, value: __m256) -> __m256 {
            {
                let bits = _mm256_castps_si256(value);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
                let rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(!0xffff)));
                // Rounding could turn NaN into an infinity.
                _mm256_blendv_ps(rounded, value, _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value))
            }
        }
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> __m256i {
        // SAFETY: the processor has the instruction; the caller promises that a vector of words is readable.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_words(self, words: __m256i, to: *mut u32) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(to.cast(), words) }
    }

    #[inline(always)]
    unsafe fn transpose_square(self, from: *const u32, from_apart: usize, to: *mut u32, to_apart: usize) {
        // SAFETY: the processor has the instructions; the caller promises the distances of rows.
        unsafe {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (index, row) in rows.iter_mut().enumerate() {
                *row = _mm256_loadu_si256(from.add(index * from_apart).cast());
            }
            let mut halves = [[_mm256_setzero_si256(); 4]; 2];
            for (half, rows) in halves.iter_mut().zip(rows.chunks_exact(4)) {
                let low = _mm256_unpacklo_epi32(rows[0], rows[1]);
                let high = _mm256_unpackhi_epi32(rows[0], rows[1]);
                let next_low = _mm256_unpacklo_epi32(rows[2], rows[3]);
                let next_high = _mm256_unpackhi_epi32(rows[2], rows[3]);
                *half = [
                    _mm256_unpacklo_epi64(low, next_low),
                    _mm256_unpackhi_epi64(low, next_low),
                    _mm256_unpacklo_epi64(high, next_high),
                    _mm256_unpackhi_epi64(high, next_high),
                ];
            }
            for (index, (upper, lower)) in halves[0].into_iter().zip(halves[1]).enumerate() {
                let first = _mm256_permute2x128_si256::<0x20>(upper, lower);
                let second = _mm256_permute2x128_si256::<0x31>(upper, lower);
                _mm256_storeu_si256(to.add(index * to_apart).cast(), first);
                _mm256_storeu_si256(to.add((index + 4) * to_apart).cast(), second);
            }
        }
    }
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Words = __m512i;
    type Mask = __mmask16;
    const WIDTH: usize = 16;
    const TILE: (usize, usize) = (6, 4);

    run!("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl");

    #[inline(always)]
    fn both(self, left: __mmask16, right: __mmask16) -> __mmask16 {
        left & right
    }

    instructions! {
        fn splat(self, value: f32) -> __m512 { _mm512_set1_ps(value) }
        fn add(self, left: __m512, right: __m512) -> __m512 { _mm512_add_ps(left, right) }
        fn sub(self, left: __m512, right: __m512) -> __m512 { _mm512_sub_ps(left, right) }
        fn mul(self, left: __m512, right: __m512) -> __m512 { _mm512_mul_ps(left, right) }
        fn div(self, left: __m512, right: __m512) -> __m512 { _mm512_div_ps(left, right) }
        fn mul_add(self, left: __m512, right: __m512, addend: __m512) -> __m512 {
            _mm512_fmadd_ps(left, right, addend)
        }
        fn max(self, left: __m512, right: __m512) -> __m512 { _mm512_max_ps(left, right) }
        fn min(self, left: __m512, right: __m512) -> __m512 { _mm512_min_ps(left, right) }
        fn round(self, value: __m512) -> __m512 { _mm512_roundscale_ps::<0>(value) }
        fn times_power_of_two(self, value: __m512, power: __m512) -> __m512 {
            {
                let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(power), _mm512_set1_epi32(127));
                _mm512_mul_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
            }
        }
        fn less(self, left: __m512, right: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(left, right) }
        fn select(self, mask: __mmask16, yes: __m512, no: __m512) -> __m512 {
            _mm512_mask_blend_ps(mask, no, yes)
        }
        fn splat_word(self, value: u32) -> __m512i { _mm512_set1_epi32(value as i32) }
        fn bits(self, value: __m512) -> __m512i { _mm512_castps_si512(value) }
        fn floats(self, value: __m512i) -> __m512 { _mm512_castsi512_ps(value) }
        fn equal_words(self, left: __m512i, right: __m512i) -> __mmask16 {
            _mm512_cmpeq_epi32_mask(left, right)
        }
        fn at_most(self, left: __m512i, right: __m512i) -> __mmask16 { _mm512_cmple_epi32_mask(left, right) }
        fn add_words(self, left: __m512i, right: __m512i) -> __m512i { _mm512_add_epi32(left, right) }
        fn xor_words(self, left: __m512i, right: __m512i) -> __m512i { _mm512_xor_si512(left, right) }
        fn and_words(self, left: __m512i, right: __m512i) -> __m512i { _mm512_and_si512(left, right) }
        fn rotate_left(self, value: __m512i, by: u32) -> __m512i {
            _mm512_rolv_epi32(value, _mm512_set1_epi32(by as i32))
        }
        fn shift_right(self, value: __m512i, by: u32) -> __m512i {
            _mm512_srlv_epi32(value, _mm512_set1_epi32(by as i32))
        }
        fn converted(self, value: __m512i) -> __m512 { _mm512_cvtepi32_ps(value) }
        fn round_bf16(self, value: __m512) -> __m512 {
            {
                let bits = _mm512_castps_si512(value);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
                let rounded = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(!0xffff)));
                // Rounding could turn NaN into an infinity.
                _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value), rounded, value)
            }
        }
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> __m512i {
        // SAFETY: the processor has the instruction; the caller promises that a vector of words is readable.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_words(self, words: __m512i, to: *mut u32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(to.cast(), words) }
    }

    #[inline(always)]
    unsafe fn transpose_square(self, from: *const u32, from_apart: usize, to: *mut u32, to_apart: usize) {
        // SAFETY: the processor has the instructions; the caller promises the distances of rows.
        unsafe {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (index, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(from.add(index * from_apart).cast());
            }
            // Quarter q of vector `[i][j]` holds the words of rows 4i to 4i + 3 in column 4q + j.
            let mut quarters = [[_mm512_setzero_si512(); 4]; 4];
            for (quarter, rows) in quarters.iter_mut().zip(rows.chunks_exact(4)) {
                let low = _mm512_unpacklo_epi32(rows[0], rows[1]);
                let high = _mm512_unpackhi_epi32(rows[0], rows[1]);
                let next_low = _mm512_unpacklo_epi32(rows[2], rows[3]);
                let next_high = _mm512_unpackhi_epi32(rows[2], rows[3]);
                *quarter = [
                    _mm512_unpacklo_epi64(low, next_low),
                    _mm512_unpackhi_epi64(low, next_low),
                    _mm512_unpacklo_epi64(high, next_high),
                    _mm512_unpackhi_epi64(high, next_high),
                ];
            }
            let [first, second, third, fourth] = quarters;
            for (index, first) in first.into_iter().enumerate() {
                let [second, third, fourth] = [second[index], third[index], fourth[index]];
                let upper_even = _mm512_shuffle_i32x4::<0x88>(first, second);
                let upper_odd = _mm512_shuffle_i32x4::<0xdd>(first, second);
                let lower_even = _mm512_shuffle_i32x4::<0x88>(third, fourth);
                let lower_odd = _mm512_shuffle_i32x4::<0xdd>(third, fourth);
                let columns = [
                    _mm512_shuffle_i32x4::<0x88>(upper_even, lower_even),
                    _mm512_shuffle_i32x4::<0x88>(upper_odd, lower_odd),
                    _mm512_shuffle_i32x4::<0xdd>(upper_even, lower_even),
                    _mm512_shuffle_i32x4::<0xdd>(upper_odd, lower_odd),
                ];
                for (quarter, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_si512(to.add((4 * quarter + index) * to_apart).cast(), column);
                }
            }
        }
    }
}

/// Delegates methods to the instruction set that this one extends.
macro_rules! inherit {
    ($(fn $name:ident($self:ident $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        $(
            #[inline(always)]
            fn $name($self $(, $argument: $type)*) -> $result {
                $self.0.$name($($argument),*)
            }
        )*
    };
}

impl Simd for Avx512Bf16 {
    type Floats = __m512;
    type Words = __m512i;
    type Mask = __mmask16;
    const WIDTH: usize = Avx512::WIDTH;
    const TILE: (usize, usize) = Avx512::TILE;

    run!("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");

    inherit! {
        fn splat(self, value: f32) -> __m512;
        fn add(self, left: __m512, right: __m512) -> __m512;
        fn sub(self, left: __m512, right: __m512) -> __m512;
        fn mul(self, left: __m512, right: __m512) -> __m512;
        fn div(self, left: __m512, right: __m512) -> __m512;
        fn mul_add(self, left: __m512, right: __m512, addend: __m512) -> __m512;
        fn max(self, left: __m512, right: __m512) -> __m512;
        fn min(self, left: __m512, right: __m512) -> __m512;
        fn round(self, value: __m512) -> __m512;
        fn times_power_of_two(self, value: __m512, power: __m512) -> __m512;
        fn less(self, left: __m512, right: __m512) -> __mmask16;
        fn select(self, mask: __mmask16, yes: __m512, no: __m512) -> __m512;
        fn splat_word(self, value: u32) -> __m512i;
        fn bits(self, value: __m512) -> __m512i;
        fn floats(self, value: __m512i) -> __m512;
        fn both(self, left: __mmask16, right: __mmask16) -> __mmask16;
        fn equal_words(self, left: __m512i, right: __m512i) -> __mmask16;
        fn at_most(self, left: __m512i, right: __m512i) -> __mmask16;
        fn add_words(self, left: __m512i, right: __m512i) -> __m512i;
        fn xor_words(self, left: __m512i, right: __m512i) -> __m512i;
        fn and_words(self, left: __m512i, right: __m512i) -> __m512i;
        fn rotate_left(self, value: __m512i, by: u32) -> __m512i;
        fn shift_right(self, value: __m512i, by: u32) -> __m512i;
        fn converted(self, value: __m512i) -> __m512;
        fn round_bf16(self, value: __m512) -> __m512;
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> __m512i {
        // SAFETY: the caller promises the same.
        unsafe { self.0.load_words(from) }
    }

    #[inline(always)]
    unsafe fn store_words(self, words: __m512i, to: *mut u32) {
        // SAFETY: the caller promises the same.
        unsafe { self.0.store_words(words, to) }
    }

    #[inline(always)]
    unsafe fn transpose_square(self, from: *const u32, from_apart: usize, to: *mut u32, to_apart: usize) {
        // SAFETY: the caller promises the same.
        unsafe { self.0.transpose_square(from, from_apart, to, to_apart) }
    }
}

/// The order that interleaves the halves of a vector: 0, 16, 1, 17, …
const ZIPPED: [u16; 32] = {
    let mut order = [0; 32];
    let mut index = 0;
    while index < 32 {
        order[index] = (index / 2 + index % 2 * 16) as u16;
        index += 1;
    }
    order
};

impl SimdBf16 for Avx512Bf16 {
    #[inline(always)]
    fn add_products(self, sum: __m512, left: __m512i, right: __m512i) -> __m512 {
        // SAFETY: the processor has the instruction; vectors of pairs and of words have the same size and hold any
        // bits.
        unsafe {
            _mm512_dpbf16_ps(
                sum,
                std::mem::transmute::<__m512i, __m512bh>(left),
                std::mem::transmute::<__m512i, __m512bh>(right),
            )
        }
    }

    #[inline(always)]
    fn zip(self, first: __m512, second: __m512) -> __m512i {
        let joined = self.join(first, second);
        // SAFETY: the processor has the instructions; the constant has the size of a vector.
        unsafe { _mm512_permutexvar_epi16(_mm512_loadu_si512(ZIPPED.as_ptr().cast()), joined) }
    }

    #[inline(always)]
    fn join(self, first: __m512, second: __m512) -> __m512i {
        // SAFETY: the processor has the instruction; vectors of pairs and of words have the same size and hold any
        // bits.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
    }
}
