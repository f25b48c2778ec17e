//! The element types of arrays.

use half::bf16;

/// An element that kernels convert to `f32` for computation.
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

    // Unlike the conversion of `half`, this one has no branches, so that the compiler vectorizes its loops.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let not_a_number = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { not_a_number } else { rounded } as u16)
    }
}
