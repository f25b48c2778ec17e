//! Gradient clipping.

use mt_shape::DType;
use mt_trace::Tensor;

/// The root of the sum of all squares, in `f32`.
///
/// # Panics
/// There are no tensors.
#[track_caller]
pub fn global_norm<'t>(tensors: &[Tensor<'t>]) -> Tensor<'t> {
    let squares = tensors.iter().map(|tensor| tensor.cast(DType::F32).square().sum_all());
    squares.reduce(|total, square| total + square).expect("at least one tensor").sqrt()
}

/// Scales gradients down so that their global norm is at most `threshold`. `norm` is their norm.
#[track_caller]
pub fn clip_by_global_norm<'t>(
    gradients: &[Tensor<'t>],
    norm: Tensor<'t>,
    threshold: f64,
) -> Vec<Tensor<'t>> {
    // The larger of norm and threshold divides, so that gradients within the threshold stay as they are.
    let factor = norm.region().full(DType::F32, &[], threshold) / norm.maximum(threshold);
    gradients.iter().map(|gradient| *gradient * factor.cast(gradient.dtype())).collect()
}
