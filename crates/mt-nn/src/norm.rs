//! Normalization.

use mt_derive::Tree;
use mt_shape::DType;
use mt_trace::Tensor;

/// Root-mean-square normalization with a learned scale (Zhang and Sennrich, 2019).
#[derive(Clone, Debug, Tree)]
pub struct RmsNorm<L> {
    pub scale: L,
}

impl<'t> RmsNorm<Tensor<'t>> {
    /// Divides by the root of the mean square over the axis `over`, then multiplies by the scale.
    ///
    /// The mean is taken in `f32`: squares of `bf16` lose what distinguishes them.
    ///
    /// # Shapes
    /// `[…, over] -> […, over]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &'static str, epsilon: f64) -> Tensor<'t> {
        let wide = x.cast(DType::F32);
        let inverse = (wide.square().mean(&[over]) + epsilon).rsqrt();
        (wide * inverse).cast(x.dtype()) * self.scale.cast(x.dtype())
    }
}
