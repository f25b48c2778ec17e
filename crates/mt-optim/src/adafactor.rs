//! Adafactor (Shazeer and Stern, 2018): for matrices it keeps the row and column means of the second moment.
//! Conventions and constants are optax's. The layers of a stack are separate parameters.

use mt_shape::DType;
use mt_trace::Tensor;

use crate::{Parameter, Slot};

/// The optimizer's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Second moments are factored over the two longest axes if both have at least this size.
    pub min_factored_size: usize,
}

/// Exponent in `1 − step^exponent`, the decay of the second moment, which approaches 1.
const DECAY_EXPONENT: f64 = -0.8;

/// Added to squared gradients.
const EPSILON: f64 = 1e-30;

/// Updates are clipped to this root mean square before they are scaled.
const LARGEST_UPDATE: f64 = 1.0;

/// Updates are scaled by the parameter's root mean square, but at least by this.
const SMALLEST_PARAMETER: f64 = 1e-3;

impl Default for Adafactor {
    fn default() -> Self {
        Self { min_factored_size: 128 }
    }
}

impl Adafactor {
    /// The positions of the second longest and the longest axis, if moments are factored over them.
    fn factored(&self, parameter: &Parameter) -> Option<(usize, usize)> {
        let mut positions: Vec<usize> = parameter.own_axes().collect();
        positions.sort_by_key(|position| parameter.axes[*position].size);
        let longest = positions.pop()?;
        let second = positions.pop()?;
        (parameter.axes[second].size >= self.min_factored_size).then_some((second, longest))
    }

    /// The mean squares over the longest and over the second longest axis, or the elementwise second moment.
    pub(crate) fn slots(&self, index: usize, parameter: &Parameter) -> Vec<Slot> {
        let slot = |name: &'static str, without: Option<usize>| {
            let mut slot = Slot::like(name, index, parameter, DType::F32, 2);
            slot.axes.retain(|axis| Some(*axis) != without);
            slot
        };
        match self.factored(parameter) {
            Some((second, longest)) => vec![slot("v_row", Some(longest)), slot("v_col", Some(second))],
            None => vec![slot("v", None)],
        }
    }

    /// Scalars of the step that follows `count` steps.
    #[track_caller]
    pub(crate) fn step<'t>(&self, count: Tensor<'t>) -> AdafactorStep<'t> {
        let number = count.cast(DType::F32) + 1.0;
        AdafactorStep { constants: *self, decay: -(number.power(DECAY_EXPONENT)) + 1.0 }
    }
}

/// Scalars that all parameters share in one step.
pub(crate) struct AdafactorStep<'t> {
    constants: Adafactor,
    decay: Tensor<'t>,
}

impl<'t> AdafactorStep<'t> {
    /// The amount to subtract from the parameter before the learning rate applies, and the new slots.
    #[track_caller]
    pub fn update(
        &self,
        parameter: &Parameter,
        value: Tensor<'t>,
        gradient: Tensor<'t>,
        kept: &[Tensor<'t>],
    ) -> (Tensor<'t>, Vec<Tensor<'t>>) {
        // Gradients with respect to the stepped form are those with respect to the value, divided by the form's scale.
        // The factors below cancel this scale, so only epsilon is adjusted.
        let squares = gradient.square() + EPSILON * parameter.form.scale.powi(2);
        let mean = |kept: Tensor<'t>, new: Tensor<'t>| kept * self.decay + new * (-self.decay + 1.0);
        let (update, kept) = match self.constants.factored(parameter) {
            Some((second, longest)) => {
                let [second, longest] = [second, longest].map(|position| parameter.axes[position].name);
                let rows = mean(kept[0], squares.mean(&[longest]));
                let columns = mean(kept[1], squares.mean(&[second]));
                let row_factors = (rows / rows.mean(&[second])).rsqrt();
                (gradient * row_factors * columns.rsqrt(), vec![rows, columns])
            }
            None => {
                let each = mean(kept[0], squares);
                (gradient * each.rsqrt(), vec![each])
            }
        };
        let names = parameter.own_names();
        let root_mean_square = |tensor: Tensor<'t>| tensor.square().mean(&names).sqrt();
        let excess = (root_mean_square(update) * (1.0 / LARGEST_UPDATE)).maximum(1.0);
        let size = root_mean_square(parameter.form.of(value)).maximum(SMALLEST_PARAMETER);
        (parameter.form.to_value(update / excess * size), kept)
    }
}
