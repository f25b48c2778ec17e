//! Normalization.

use mt_derive::Tree;
use mt_shape::DType;
use mt_trace::Tensor;

/// How a norm is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOptions {
    /// What is added to the mean square, or to the variance.
    pub epsilon: f64,
    /// What is added to the stored scale, which is kept around 0 where this is 1.
    pub offset: f64,
}

/// Divides by the root of the mean square over the axes `over`.
///
/// The mean is taken in `f32`: squares of `bf16` lose what distinguishes them.
///
/// # Shapes
/// `[…, over] -> […, over]`
#[track_caller]
pub fn rms_normalize<'t>(x: Tensor<'t>, over: &[&'static str], epsilon: f64) -> Tensor<'t> {
    wide_rms(x, over, epsilon).cast(x.dtype())
}

#[track_caller]
fn wide_rms<'t>(x: Tensor<'t>, over: &[&'static str], epsilon: f64) -> Tensor<'t> {
    let wide = x.cast(DType::F32);
    let inverse = (wide.square().mean(over) + epsilon).rsqrt();
    wide * inverse
}

/// Root-mean-square normalization with a learned scale (Zhang and Sennrich, 2019).
#[derive(Clone, Debug, Tree)]
pub struct RmsNorm<L> {
    pub scale: L,
}

impl<'t> RmsNorm<Tensor<'t>> {
    /// Divides by the root of the mean square over the axis `over`, then multiplies by the scale.
    ///
    /// # Shapes
    /// `[…, over] -> […, over]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &'static str, options: NormOptions) -> Tensor<'t> {
        self.scaled(x, &[over], options)
    }

    /// As [`RmsNorm::forward`], over all axes that the scale has.
    ///
    /// # Shapes
    /// `[…, scale's axes] -> […, scale's axes]`
    #[track_caller]
    pub fn forward_over_scale(&self, x: Tensor<'t>, options: NormOptions) -> Tensor<'t> {
        let over: Vec<&'static str> = self.scale.axes().iter().map(|axis| axis.name).collect();
        self.scaled(x, &over, options)
    }

    #[track_caller]
    fn scaled(&self, x: Tensor<'t>, over: &[&'static str], options: NormOptions) -> Tensor<'t> {
        if options.offset == 0.0 {
            return rms_normalize(x, over, options.epsilon) * self.scale.cast(x.dtype());
        }
        // In `bf16` the sum would lose most of a scale that is kept around 0.
        let scale = self.scale.cast(DType::F32) + options.offset;
        (wide_rms(x, over, options.epsilon) * scale).cast(x.dtype())
    }
}

/// Layer normalization with a learned scale and bias (Ba et al., 2016).
#[derive(Clone, Debug, Tree)]
pub struct LayerNorm<L> {
    pub scale: L,
    pub bias: L,
}

impl<'t> LayerNorm<Tensor<'t>> {
    /// Subtracts the mean over the axis `over` and divides by the standard deviation, both in `f32`, then multiplies
    /// by the scale and adds the bias.
    ///
    /// # Shapes
    /// `[…, over] -> […, over]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &'static str, options: NormOptions) -> Tensor<'t> {
        let wide = x.cast(DType::F32);
        let centred = wide - wide.mean(&[over]);
        let inverse = (centred.square().mean(&[over]) + options.epsilon).rsqrt();
        let scale = self.scale.cast(DType::F32) + options.offset;
        (centred * inverse * scale + self.bias.cast(DType::F32)).cast(x.dtype())
    }
}

/// A norm of either kind.
#[derive(Clone, Debug, Tree)]
pub enum Norm<L> {
    Rms(RmsNorm<L>),
    Layer(LayerNorm<L>),
}

impl<'t> Norm<Tensor<'t>> {
    /// Normalizes over the axis `over`.
    ///
    /// # Shapes
    /// `[…, over] -> […, over]`
    #[track_caller]
    pub fn forward(&self, x: Tensor<'t>, over: &'static str, options: NormOptions) -> Tensor<'t> {
        match self {
            Self::Rms(norm) => norm.forward(x, over, options),
            Self::Layer(norm) => norm.forward(x, over, options),
        }
    }
}
