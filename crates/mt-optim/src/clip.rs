//! Gradient clipping.

use mt_shape::{DType, kernels};
use mt_trace::Tensor;

use crate::Parameter;

/// The square root of the sum of all squares, in `f32`.
///
/// # Panics
/// There are no tensors.
#[track_caller]
pub fn global_norm<'t>(tensors: &[Tensor<'t>]) -> Tensor<'t> {
    let squares: Vec<Tensor<'t>> = tensors.iter().map(|tensor| sum_of_squares(*tensor)).collect();
    norm(&squares)
}

/// The norm of the gradients of all trained parameters, with respect to their stepped forms.
///
/// # Panics
/// No parameter is trained.
#[track_caller]
pub fn gradient_norm<'t>(parameters: &[Parameter], gradients: &[Tensor<'t>]) -> Tensor<'t> {
    let trained = parameters.iter().zip(gradients).filter(|(parameter, _)| parameter.is_trained);
    let squares: Vec<Tensor<'t>> =
        trained.map(|(parameter, gradient)| parameter.gradient_squares(*gradient)).collect();
    norm(&squares)
}

/// The norm of several tensors, from their sums of squares.
///
/// # Panics
/// There are no tensors.
#[track_caller]
pub fn norm<'t>(squares: &[Tensor<'t>]) -> Tensor<'t> {
    let total = squares.iter().copied().reduce(|total, square| total + square);
    total.expect("at least one tensor").sqrt()
}

/// The sum of all squares, in `f32`.
#[track_caller]
pub fn sum_of_squares(tensor: Tensor<'_>) -> Tensor<'_> {
    tensor.region().kernel(&kernels::SUM_OF_SQUARES, Vec::new(), &[tensor], |_, operands| {
        vec![operands[0].cast(DType::F32).square().sum_all()]
    })[0]
}

/// The factor that limits gradients with a global norm to `threshold`.
#[track_caller]
pub fn clipping_factor(norm: Tensor<'_>, threshold: f64) -> Tensor<'_> {
    // Divides by the larger of norm and threshold, so gradients within the threshold keep their value.
    norm.region().full(DType::F32, &[], threshold) / norm.maximum(threshold)
}
