//! The numbers that arrays are made of.

use half::bf16;

/// A number that is computed with as `f32`.
pub trait Element: Copy + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    /// Rounds to the nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // Without branches, unlike the one of `half`, so that loops of it become vectors.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let not_a_number = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { not_a_number } else { rounded } as u16)
    }
}
