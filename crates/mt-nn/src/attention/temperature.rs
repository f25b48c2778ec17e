//! The temperature of attention logits by position.

use mt_shape::DType;
use mt_trace::Tensor;

/// Factors of queries that grow with the position, so that the softmax over more keys stays as sharp (Llama 4; after
/// Nakanishi, 2025).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// The growth of the factor with the logarithm of the number of whole intervals.
    pub strength: f64,
    /// The number of positions in an interval. The factor is 1 within the first one.
    pub interval: usize,
}

impl Temperature {
    /// `1 + strength · ln(1 + ⌊(position + 1) / interval⌋)`
    ///
    /// # Shapes
    /// `i32[batch, position] -> f32[batch, position]`
    #[track_caller]
    pub fn factors<'t>(self, positions: Tensor<'t>) -> Tensor<'t> {
        let intervals = (positions + 1.0) / self.interval as f64;
        (intervals + 1.0).cast(DType::F32).log() * self.strength + 1.0
    }
}
