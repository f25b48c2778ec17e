//! Floating-point numbers of 8 bits, rounded as Python's `ml_dtypes` rounds them.

/// A type of floating-point numbers of 8 bits: a sign, an exponent, a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float8 {
    mantissa_bits: u32,
    /// Added to the exponent where it is stored.
    bias: i32,
    /// The code of the largest finite number.
    largest: u8,
    /// The code of numbers that are too large.
    overflow: u8,
    nan: u8,
}

const SIGN: u8 = 0x80;

impl Float8 {
    /// [`crate::DType::F8E4M3FN`]: up to 448, without infinities. Larger numbers are not a number.
    pub const E4M3FN: Self = Self { mantissa_bits: 3, bias: 7, largest: 0x7e, overflow: 0x7f, nan: 0x7f };
    /// [`crate::DType::F8E5M2`]: up to 57,344. Larger numbers are infinite.
    pub const E5M2: Self = Self { mantissa_bits: 2, bias: 15, largest: 0x7b, overflow: 0x7c, nan: 0x7e };

    /// The number of this code.
    pub fn to_f32(self, code: u8) -> f32 {
        let (sign, code) = (if code & SIGN == 0 { 1.0 } else { -1.0 }, code & !SIGN);
        if code > self.largest {
            let is_infinite = code == self.overflow && self.overflow != self.nan;
            return sign * if is_infinite { f32::INFINITY } else { f32::NAN };
        }
        let implied = 1 << self.mantissa_bits;
        let (exponent, mantissa) = (i32::from(code) >> self.mantissa_bits, i32::from(code) & (implied - 1));
        // Without an exponent there is no implied bit.
        let (exponent, mantissa) = if exponent == 0 { (1, mantissa) } else { (exponent, mantissa + implied) };
        sign * mantissa as f32 * 2_f32.powi(exponent - self.bias - self.mantissa_bits.cast_signed())
    }

    /// The code of the nearest number, of two equally near ones that with an even mantissa.
    pub fn from_f32(self, number: f32) -> u8 {
        let sign = if number.is_sign_negative() { SIGN } else { 0 };
        let size = number.abs();
        if size.is_nan() {
            return sign | self.nan;
        }
        let exponent =
            ((size.to_bits() >> (f32::MANTISSA_DIGITS - 1)).cast_signed() - 127).max(1 - self.bias);
        // How many of the smallest steps at this exponent it is. Scaling by a power of two is exact.
        let step = f64::from(exponent - self.mantissa_bits.cast_signed()).exp2();
        let steps = (f64::from(size) / step).round_ties_even();
        // A mantissa that is rounded up to the next power of two carries into the exponent.
        let code = f64::from((exponent + self.bias - 1) << self.mantissa_bits) + steps;
        sign | if code > f64::from(self.largest) { self.overflow } else { code as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [Float8; 2] = [Float8::E4M3FN, Float8::E5M2];

    /// FNV-1a.
    fn digest(bytes: impl Iterator<Item = u8>) -> u64 {
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    #[test]
    fn codes_are_those_of_ml_dtypes() {
        // Digests of the codes of all `bf16` numbers, and of the `f32` numbers of all codes, from ml_dtypes 0.6.
        let expected =
            [(0xfcf9_b068_35fb_1295, 0xdad1_d9c5_0f74_9ca5), (0xdc7c_834c_4593_4ea5, 0x6c1e_56b6_fb09_c905)];
        for (float8, (codes, numbers)) in TYPES.into_iter().zip(expected) {
            let all = (0..=u16::MAX).map(|upper| float8.from_f32(f32::from_bits(u32::from(upper) << 16)));
            assert_eq!(digest(all), codes, "{float8:?}");
            let bits = |code| match float8.to_f32(code) {
                number if number.is_nan() => 0x7fc0_0000_u32,
                number => number.to_bits(),
            };
            let all = (0..=u8::MAX).flat_map(|code| bits(code).to_le_bytes());
            assert_eq!(digest(all), numbers, "{float8:?}");
        }
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_code() {
        for float8 in TYPES {
            for code in 0..float8.largest {
                let (number, next) = (float8.to_f32(code), float8.to_f32(code + 1));
                assert_eq!(float8.from_f32(number), code);
                assert_eq!(float8.from_f32(-number), code | SIGN);
                let middle = (number + next) / 2.0;
                assert_eq!(
                    float8.from_f32(middle),
                    code + code % 2,
                    "{middle} is between {number} and {next}"
                );
                assert_eq!(float8.from_f32(middle.next_down()), code);
                assert_eq!(float8.from_f32(middle.next_up()), code + 1);
            }
        }
        assert_eq!([464.0, 464.0_f32.next_up()].map(|size| Float8::E4M3FN.from_f32(size)), [0x7e, 0x7f]);
        assert_eq!(
            [61_440.0_f32.next_down(), 61_440.0].map(|size| Float8::E5M2.from_f32(size)),
            [0x7b, 0x7c]
        );
    }
}
