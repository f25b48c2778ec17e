//! Vectors as arrays, for processors without a better instruction set.

#[cfg(test)]
use super::SimdBf16;
use super::{Simd, Work};

#[derive(Clone, Copy)]
pub(crate) struct Portable;

const WIDTH: usize = 8;

/// Applies a function of numbers to each lane. The compiler vectorizes these loops with the processor's baseline
/// instructions.
macro_rules! each {
    ($index:ident: $value:expr) => {{
        let mut result = [Default::default(); WIDTH];
        let mut $index = 0;
        while $index < WIDTH {
            result[$index] = $value;
            $index += 1;
        }
        result
    }};
}

impl Simd for Portable {
    type Floats = [f32; WIDTH];
    type Words = [u32; WIDTH];
    type Mask = [bool; WIDTH];
    const WIDTH: usize = WIDTH;
    const TILE: (usize, usize) = (4, 1);

    #[inline(always)]
    fn run(self, work: impl Work) {
        #[inline(never)]
        fn run(work: impl Work) {
            work.run();
        }
        run(work);
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        [value; WIDTH]
    }

    #[inline(always)]
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: left[index] + right[index])
    }

    #[inline(always)]
    fn sub(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: left[index] - right[index])
    }

    #[inline(always)]
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: left[index] * right[index])
    }

    #[inline(always)]
    fn div(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: left[index] / right[index])
    }

    #[inline(always)]
    fn mul_add(self, left: Self::Floats, right: Self::Floats, addend: Self::Floats) -> Self::Floats {
        each!(index: left[index] * right[index] + addend[index])
    }

    #[inline(always)]
    fn max(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: if left[index] > right[index] { left[index] } else { right[index] })
    }

    #[inline(always)]
    fn min(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        each!(index: if left[index] < right[index] { left[index] } else { right[index] })
    }

    #[inline(always)]
    fn round(self, value: Self::Floats) -> Self::Floats {
        // The sum's last place counts ones, so adding this number rounds.
        const ONES: f32 = 12_582_912.0;
        each!(index: (value[index] + ONES) - ONES)
    }

    #[inline(always)]
    fn times_power_of_two(self, value: Self::Floats, power: Self::Floats) -> Self::Floats {
        each!(index: value[index] * f32::from_bits(((power[index] as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn less(self, left: Self::Floats, right: Self::Floats) -> Self::Mask {
        each!(index: left[index] < right[index])
    }

    #[inline(always)]
    fn select(self, mask: Self::Mask, yes: Self::Floats, no: Self::Floats) -> Self::Floats {
        each!(index: if mask[index] { yes[index] } else { no[index] })
    }

    #[inline(always)]
    fn splat_word(self, value: u32) -> Self::Words {
        [value; WIDTH]
    }

    #[inline(always)]
    fn bits(self, value: Self::Floats) -> Self::Words {
        each!(index: value[index].to_bits())
    }

    #[inline(always)]
    fn floats(self, value: Self::Words) -> Self::Floats {
        each!(index: f32::from_bits(value[index]))
    }

    #[inline(always)]
    fn both(self, left: Self::Mask, right: Self::Mask) -> Self::Mask {
        each!(index: left[index] & right[index])
    }

    #[inline(always)]
    fn equal_words(self, left: Self::Words, right: Self::Words) -> Self::Mask {
        each!(index: left[index] == right[index])
    }

    #[inline(always)]
    fn at_most(self, left: Self::Words, right: Self::Words) -> Self::Mask {
        each!(index: left[index] as i32 <= right[index] as i32)
    }

    #[inline(always)]
    fn add_words(self, left: Self::Words, right: Self::Words) -> Self::Words {
        each!(index: left[index].wrapping_add(right[index]))
    }

    #[inline(always)]
    fn xor_words(self, left: Self::Words, right: Self::Words) -> Self::Words {
        each!(index: left[index] ^ right[index])
    }

    #[inline(always)]
    fn and_words(self, left: Self::Words, right: Self::Words) -> Self::Words {
        each!(index: left[index] & right[index])
    }

    #[inline(always)]
    fn rotate_left(self, value: Self::Words, by: u32) -> Self::Words {
        each!(index: value[index].rotate_left(by))
    }

    #[inline(always)]
    fn shift_right(self, value: Self::Words, by: u32) -> Self::Words {
        each!(index: value[index] >> by)
    }

    #[inline(always)]
    fn converted(self, value: Self::Words) -> Self::Floats {
        each!(index: value[index] as i32 as f32)
    }

    #[inline(always)]
    fn round_bf16(self, value: Self::Floats) -> Self::Floats {
        each!(index: half::bf16::from_f32(value[index]).to_f32())
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u32) -> Self::Words {
        // SAFETY: what the caller promises.
        unsafe { from.cast::<Self::Words>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store_words(self, words: Self::Words, to: *mut u32) {
        // SAFETY: what the caller promises.
        unsafe { to.cast::<Self::Words>().write_unaligned(words) }
    }

    #[inline(always)]
    unsafe fn transpose_square(self, from: *const u32, from_apart: usize, to: *mut u32, to_apart: usize) {
        for row in 0..WIDTH {
            for column in 0..WIDTH {
                // SAFETY: what the caller promises.
                unsafe { *to.add(column * to_apart + row) = *from.add(row * from_apart + column) };
            }
        }
    }
}

#[cfg(test)]
impl SimdBf16 for Portable {
    fn add_products(self, sum: Self::Floats, left: Self::Words, right: Self::Words) -> Self::Floats {
        let halves = |word: u32| [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)];
        std::array::from_fn(|index| {
            let (left, right) = (halves(left[index]), halves(right[index]));
            sum[index] + left[0] * right[0] + left[1] * right[1]
        })
    }

    fn zip(self, first: Self::Floats, second: Self::Floats) -> Self::Words {
        std::array::from_fn(|index| pair(first[index], second[index]))
    }

    fn join(self, first: Self::Floats, second: Self::Floats) -> Self::Words {
        let all = [first, second].concat();
        std::array::from_fn(|index| pair(all[2 * index], all[2 * index + 1]))
    }
}

/// A word of two numbers, rounded to `bf16`.
#[cfg(test)]
fn pair(low: f32, high: f32) -> u32 {
    let [low, high] = [low, high].map(|number| u32::from(half::bf16::from_f32(number).to_bits()));
    low | high << 16
}
