//! Rows of quantized weights as numbers, rounded as the libraries that define the formats round them.

use std::sync::LazyLock;

use half::{bf16, f16};
use mt_shape::Float8;

/// The form of a weight's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Numbers of 8 bits. `block` is the number of rows and of columns that share a scale.
    Fp8 { block: [usize; 2] },
    /// Numbers of 4 bits; each 32 adjacent columns have a scale, which is the exponent of a power of two.
    Mxfp4,
    /// Numbers of 4 bits; each 32 adjacent columns have a scale of any form.
    Fp4,
    /// Integers of 4 bits. `group` is the number of adjacent columns that share a scale.
    Int4 { group: usize },
}

/// The form of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    F32,
    BF16,
    F16,
    /// Exponents of 2 in bytes; the highest one means infinity.
    Exponents,
    /// The type `F8_E8M0`: exponents of 2, whose highest one is not a number.
    F8E8M0,
}

/// Adjacent columns of 4 bits with a common scale.
pub const FP4_GROUP: usize = 32;
/// Codes of 4 bits in a word of packed integers.
const IN_WORD: usize = 8;

/// The numbers of e2m1: a sign, two bits of exponent, one of mantissa.
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

static E4M3: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| Float8::E4M3FN.to_f32(code as u8)));

/// A number of `f32` in memory of any alignment.
pub type Number = [u8; 4];

impl Codes {
    /// Bytes of the codes of a row.
    pub fn row_bytes(self, columns: usize) -> usize {
        match self {
            Self::Fp8 { .. } => columns,
            Self::Mxfp4 | Self::Fp4 => columns / 2,
            Self::Int4 { .. } => columns.div_ceil(IN_WORD) * 4,
        }
    }

    /// The rows and columns that share a scale.
    pub fn block(self) -> [usize; 2] {
        match self {
            Self::Fp8 { block } => block,
            Self::Mxfp4 | Self::Fp4 => [1, FP4_GROUP],
            Self::Int4 { group } => [1, group],
        }
    }

    /// Decodes a row.
    pub fn decode(self, codes: &[u8], scales: &[u8], form: Scales, made: &mut [Number]) {
        let [_, width] = self.block();
        for (index, made) in made.chunks_mut(width).enumerate() {
            let scale = form.at(scales, index);
            let first = index * width;
            match self {
                Self::Fp8 { .. } => {
                    for (made, code) in made.iter_mut().zip(&codes[first..]) {
                        *made = (E4M3[usize::from(*code)] * scale).to_le_bytes();
                    }
                }
                Self::Mxfp4 => {
                    // The power of the highest exponent is not a number of `f32`, but its half is one.
                    let scale = f64::from_bits((u64::from(scales[index]) + 1023 - 127) << 52);
                    let numbers = E2M1.map(|number| ((f64::from(number) * scale) as f32).to_le_bytes());
                    look_up(codes, first, &numbers, made);
                }
                Self::Fp4 => {
                    let numbers = E2M1.map(|number| (number * scale).to_le_bytes());
                    look_up(codes, first, &numbers, made);
                }
                Self::Int4 { .. } => {
                    // The library computes in the type of the scales.
                    let number = |code: usize| form.rounded((code as f32 - 8.0) * scale).to_le_bytes();
                    look_up(codes, first, &std::array::from_fn(number), made);
                }
            }
        }
    }
}

/// Writes the numbers of codes of 4 bits from the code `first`. The lower half of a byte comes first.
fn look_up(codes: &[u8], first: usize, numbers: &[Number; 16], made: &mut [Number]) {
    for (place, made) in (first..).zip(made) {
        *made = numbers[usize::from(codes[place / 2] >> (4 * (place % 2)) & 15)];
    }
}

impl Scales {
    /// Bytes of a scale.
    pub fn byte_size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::BF16 | Self::F16 => 2,
            Self::Exponents | Self::F8E8M0 => 1,
        }
    }

    /// The scale with this index.
    fn at(self, scales: &[u8], index: usize) -> f32 {
        let size = self.byte_size();
        match (self, &scales[index * size..(index + 1) * size]) {
            (Self::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (Self::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Self::F8E8M0, &[u8::MAX]) => f32::NAN,
            (_, &[exponent]) => power(exponent),
            _ => unreachable!("a scale has as many bytes as its type"),
        }
    }

    /// A number rounded to the type of the scales.
    fn rounded(self, number: f32) -> f32 {
        match self {
            Self::BF16 => bf16::from_f32(number).to_f32(),
            Self::F16 => f16::from_f32(number).to_f32(),
            Self::F32 | Self::Exponents | Self::F8E8M0 => number,
        }
    }
}

/// The power of two with this exponent, to which 127 is added.
fn power(exponent: u8) -> f32 {
    // The bits of `f32` have the same exponent. The lowest number has no implied bit.
    if exponent == 0 { f32::from_bits(1 << 22) } else { f32::from_bits(u32::from(exponent) << 23) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_codes_of_4_bits_are_numbers() {
        for (code, number) in E2M1.iter().enumerate() {
            let (sign, exponent, mantissa) = (code >> 3, code >> 1 & 3, (code & 1) as f32);
            let size = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2_f32.powi(exponent as i32 - 1),
            };
            let expected = if sign == 0 { size } else { -size };
            assert_eq!(number.to_bits(), expected.to_bits(), "{code}");
        }
    }

    #[test]
    fn exponents_are_powers() {
        for exponent in 0..u8::MAX {
            assert_eq!(f64::from(power(exponent)), f64::from(i32::from(exponent) - 127).exp2(), "{exponent}");
        }
        assert_eq!(power(u8::MAX), f32::INFINITY);
        assert!(Scales::F8E8M0.at(&[u8::MAX], 0).is_nan());
        assert_eq!(Scales::F8E8M0.at(&[0, 130], 1), 8.0);
    }

    /// Decodes a row to numbers.
    fn decoded(codes: Codes, bytes: &[u8], scales: &[u8], form: Scales, columns: usize) -> Vec<f32> {
        let mut made = vec![[0; 4]; columns];
        assert_eq!(codes.row_bytes(columns), bytes.len());
        codes.decode(bytes, scales, form, &mut made);
        made.into_iter().map(f32::from_le_bytes).collect()
    }

    #[test]
    fn products_are_rounded_as_the_scales() {
        let scale = bf16::from_f32(1.0 / 3.0);
        let words = [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe];
        let made = decoded(Codes::Int4 { group: 16 }, &words, &scale.to_le_bytes(), Scales::BF16, 16);
        for (code, number) in made.into_iter().enumerate() {
            let exact = (code as f32 - 8.0) * scale.to_f32();
            assert_eq!(number, bf16::from_f32(exact).to_f32(), "{code}");
        }
        let made = decoded(
            Codes::Int4 { group: 3 },
            &[0x9a, 0xbc, 0xd, 0],
            &[0, 0, 0, 64, 0, 0, 128, 63],
            Scales::F32,
            5,
        );
        assert_eq!(made, [4.0, 2.0, 8.0, 3.0, 5.0]);
    }

    #[test]
    fn the_last_block_may_be_narrower() {
        let scales: Vec<u8> = [2.0_f32, 0.5].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let made = decoded(Codes::Fp8 { block: [4, 2] }, &[0x38, 0xb8, 0x40], &scales, Scales::F32, 3);
        assert_eq!(made, [2.0, -2.0, 1.0]);
    }
}
