//! Normalization.

use mt_derive::Tree;
use mt_shape::{
    DType,
    kernels::{self, attributes},
};
use mt_trace::Tensor;

/// Options of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOptions {
    /// Added to the mean square or the variance.
    pub epsilon: f64,
    /// Added to the stored scale: 1 for scales that are stored around 0.
    pub offset: f64,
}

/// Divides by the root of the mean square over the axes `over`.
///
/// The mean is computed in `f32`, because `bf16` squares are too coarse.
///
/// # Shapes
/// `[…, over] -> […, over]`
#[track_caller]
pub fn rms_normalize<'t>(x: Tensor<'t>, over: &[&'static str], epsilon: f64) -> Tensor<'t> {
    scaled(x, None, over, NormOptions { epsilon, offset: 0.0 })
}

/// The normalized tensor, multiplied by the scale if there is one.
#[track_caller]
fn scaled<'t>(
    x: Tensor<'t>,
    scale: Option<Tensor<'t>>,
    over: &[&'static str],
    options: NormOptions,
) -> Tensor<'t> {
    let axes = x.axes();
    // The kernel takes scales of `f32`, and batch-invariant programs have no other way to normalize rows.
    let scale = scale.map(|scale| match x.region().target().is_invariant() {
        true => scale.cast(DType::F32),
        false => scale,
    });
    // The kernel normalizes rows of the last axis.
    let Some(last) = axes
        .last()
        .filter(|axis| over == [axis.name] && scale.is_none_or(|scale| scale.axes()[..] == [**axis]))
    else {
        return normalized(x, scale, over, options)[0];
    };
    let over = last.name;
    let arguments: Vec<Tensor<'t>> = [x].into_iter().chain(scale).collect();
    let results = x.region().custom_vjp_list(
        "rms_norm",
        &arguments,
        &vec![true; arguments.len()],
        |_, arguments| normalized_by_kernel(&arguments, over, options)[..1].to_vec(),
        |_, arguments| {
            let results = normalized_by_kernel(&arguments, over, options);
            (results[..1].to_vec(), [&arguments, &results[1..]].concat())
        },
        |_, residuals, cotangents| gradients_by_kernel(&[cotangents, residuals].concat(), over, options),
    );
    results[0]
}

/// The normalized tensor, multiplied by the scale if there is one, and the reciprocal of the root mean square, in
/// `f32`.
fn normalized<'t>(
    x: Tensor<'t>,
    scale: Option<Tensor<'t>>,
    over: &[&'static str],
    options: NormOptions,
) -> [Tensor<'t>; 2] {
    let wide = x.cast(DType::F32);
    let inverse = (wide.square().mean(over) + options.epsilon).rsqrt();
    let wide = wide * inverse;
    let result = match scale {
        None => wide.cast(x.dtype()),
        Some(scale) if options.offset == 0.0 => wide.cast(x.dtype()) * scale.cast(x.dtype()),
        // In `bf16` the sum would round away most of a scale that is stored around 0.
        Some(scale) => (wide * (scale.cast(DType::F32) + options.offset)).cast(x.dtype()),
    };
    [result, inverse]
}

fn normalized_by_kernel<'t>(
    arguments: &[Tensor<'t>],
    over: &'static str,
    options: NormOptions,
) -> Vec<Tensor<'t>> {
    arguments[0].region().kernel(&kernels::RMS_NORM, norm_attributes(options), arguments, |_, arguments| {
        normalized(arguments[0], arguments.get(1).copied(), &[over], options).to_vec()
    })
}

/// The gradients of the tensor and of the scale, if there is one. The operands are the gradient of the result, the
/// arguments, and the reciprocal of the root mean square.
fn gradients_by_kernel<'t>(
    operands: &[Tensor<'t>],
    over: &'static str,
    options: NormOptions,
) -> Vec<Tensor<'t>> {
    operands[0].region().kernel(
        &kernels::RMS_NORM_GRADIENT,
        norm_attributes(options),
        operands,
        |_, operands| gradients(&operands, over, options),
    )
}

/// The gradients with the roundings of automatic differentiation of [`normalized`]. The kernel also rounds normalized
/// elements, but it rounds neither the gradient's products with them and with the scale nor the gradient of the scale.
fn gradients<'t>(operands: &[Tensor<'t>], over: &'static str, options: NormOptions) -> Vec<Tensor<'t>> {
    let [of_result, x, scale @ .., inverse] = operands else { unreachable!("there are at least three") };
    let (dtype, axes) = (x.dtype(), x.axes());
    let rows: Vec<&'static str> = axes[..axes.len() - 1].iter().map(|axis| axis.name).collect();
    let wide = x.cast(DType::F32);
    let (of_wide, of_scale) = match scale.first() {
        None => (of_result.cast(DType::F32), None),
        Some(scale) if options.offset == 0.0 => {
            let of_scale = (*of_result * (wide * *inverse).cast(dtype)).sum(&rows).cast(scale.dtype());
            ((*of_result * scale.cast(dtype)).cast(DType::F32), Some(of_scale))
        }
        Some(scale) => {
            let of_result = of_result.cast(DType::F32);
            let of_scale = (of_result * (wide * *inverse)).sum(&rows).cast(scale.dtype());
            (of_result * (scale.cast(DType::F32) + options.offset), Some(of_scale))
        }
    };
    let of_inverse = (of_wide * wide).sum(&[over]);
    let of_mean = of_inverse * (inverse.square() * *inverse * -0.5);
    let of_square = of_mean * (1.0 / x.axis(over).size as f64);
    let of_x = of_wide * *inverse + of_square * (wide * 2.0);
    [of_x.cast(dtype)].into_iter().chain(of_scale).collect()
}

/// The kernels' attributes: the bits of `f32` numbers.
fn norm_attributes(options: NormOptions) -> Vec<(&'static str, i64)> {
    let number = |value: f64| i64::from((value as f32).to_bits());
    vec![(attributes::EPSILON, number(options.epsilon)), (attributes::OFFSET, number(options.offset))]
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
        scaled(x, Some(self.scale), &[over], options)
    }

    /// As [`RmsNorm::forward`], over all axes of the scale.
    ///
    /// # Shapes
    /// `[…, scale's axes] -> […, scale's axes]`
    #[track_caller]
    pub fn forward_over_scale(&self, x: Tensor<'t>, options: NormOptions) -> Tensor<'t> {
        let over: Vec<&'static str> = self.scale.axes().iter().map(|axis| axis.name).collect();
        scaled(x, Some(self.scale), &over, options)
    }
}

/// Layer normalization with a learned scale and bias (Ba et al., 2016).
#[derive(Clone, Debug, Tree)]
pub struct LayerNorm<L> {
    pub scale: L,
    pub bias: L,
}

impl<'t> LayerNorm<Tensor<'t>> {
    /// Subtracts the mean over the axis `over` and divides by the standard deviation, both in `f32`, then multiplies by
    /// the scale and adds the bias.
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

/// An RMS norm or a layer norm.
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
