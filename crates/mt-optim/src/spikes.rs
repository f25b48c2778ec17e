//! Detection of steps whose loss or gradient norm jumps.

use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

/// The criterion for a spike: the loss or the gradient norm is more than `scaling_factor` standard deviations above the
/// mean of the previous steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpikeGuard {
    /// The number of previous steps in the history.
    pub interval: usize,
    /// The number of standard deviations.
    pub scaling_factor: f64,
}

/// The losses and gradient norms of previous steps.
#[derive(Clone, Copy, Debug)]
pub struct History<'t> {
    /// `f32[window]`, a ring buffer.
    pub losses: Tensor<'t>,
    /// `f32[window]`, a ring buffer.
    pub gradient_norms: Tensor<'t>,
    /// The number of recorded steps, an `i32` scalar.
    pub count: Tensor<'t>,
}

/// The axis of a [`History`].
const WINDOW: &str = "window";

impl SpikeGuard {
    /// The axis of a history.
    pub fn axis(&self) -> Axis {
        axis(WINDOW, self.interval)
    }

    /// Whether a step is a spike, and the updated history. No step is a spike while less than half of the history is
    /// filled. Spikes are recorded, so a new level becomes normal. Values that are not finite count as spikes once half
    /// of the history is filled, and are never recorded, because the mean would stay NaN.
    #[track_caller]
    pub fn judge<'t>(
        &self,
        history: History<'t>,
        loss: Tensor<'t>,
        gradient_norm: Tensor<'t>,
    ) -> (Tensor<'t>, History<'t>) {
        let History { losses, gradient_norms, count } = history;
        let region = count.region();
        let number = |value: usize| region.integer(DType::I32, value as i64);
        let filled = count.minimum(number(self.interval));
        let is_filled = region.iota(DType::I32, self.axis()).less(filled);
        let weight = filled.cast(DType::F32);
        let is_normal = |ring: Tensor<'t>, value: Tensor<'t>| {
            let zero = region.full(DType::F32, &[], 0.0);
            let sum = |tensor: Tensor<'t>| is_filled.select(tensor, zero).sum(&[WINDOW]);
            let mean = sum(ring) / weight.maximum(1.0);
            // The unbiased estimate.
            let variance = sum((ring - mean).square()) / (weight - 1.0).maximum(1.0);
            (value - mean).less_equal(variance.sqrt() * self.scaling_factor)
        };
        let is_normal = is_normal(losses, loss).logical_and(is_normal(gradient_norms, gradient_norm));
        let is_early = (count + 1.0).less(number((self.interval / 2).max(2)));
        let is_spike = is_normal.logical_or(is_early).logical_not();

        let place = count.remainder(number(self.interval));
        let is_finite = loss.is_finite().logical_and(gradient_norm.is_finite());
        let written = |ring: Tensor<'t>, value: Tensor<'t>| {
            let update = value.cast(DType::F32).unsqueeze(WINDOW);
            is_finite.select(ring.dynamic_update(WINDOW, place, update), ring)
        };
        let next = History {
            losses: written(losses, loss),
            gradient_norms: written(gradient_norms, gradient_norm),
            count: is_finite.select(count + 1.0, count),
        };
        (is_spike, next)
    }
}
