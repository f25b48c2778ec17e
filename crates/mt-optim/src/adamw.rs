//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the conventions of optax.

use mt_shape::DType;
use mt_trace::Tensor;

use crate::{Parameter, Slot};

/// The optimizer's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub b1: f64,
    pub b2: f64,
    /// Added outside the square root.
    pub epsilon: f64,
    /// Added inside the square root.
    pub epsilon_root: f64,
    pub weight_decay: f64,
    /// The type the first moments are kept in.
    pub first_moment_dtype: DType,
}

impl AdamW {
    /// Running means of gradients and of their squares.
    pub(crate) fn slots(&self, index: usize, parameter: &Parameter) -> Vec<Slot> {
        vec![
            Slot::like("mu", index, parameter, self.first_moment_dtype, 1),
            Slot::like("nu", index, parameter, DType::F32, 2),
        ]
    }

    /// The step after `count` others.
    #[track_caller]
    pub(crate) fn step<'t>(&self, count: Tensor<'t>) -> AdamWStep<'t> {
        let number = count.cast(DType::F32) + 1.0;
        let bias = |decay: f64| {
            let base = count.region().full(DType::F32, &[], decay);
            -(base.power(number)) + 1.0
        };
        AdamWStep { constants: *self, first_bias: bias(self.b1), second_bias: bias(self.b2) }
    }
}

/// What is the same for all parameters in one step.
#[derive(Clone, Copy)]
pub(crate) struct AdamWStep<'t> {
    constants: AdamW,
    first_bias: Tensor<'t>,
    second_bias: Tensor<'t>,
}

impl<'t> AdamWStep<'t> {
    /// What is taken off a parameter, before the learning rate, and the new moments.
    #[track_caller]
    pub fn update(
        &self,
        value: Tensor<'t>,
        gradient: Tensor<'t>,
        moments: &[Tensor<'t>],
    ) -> (Tensor<'t>, Vec<Tensor<'t>>) {
        let AdamW { b1, b2, epsilon, epsilon_root, weight_decay, .. } = self.constants;
        let first = moments[0].cast(DType::F32) * b1 + gradient * (1.0 - b1);
        let second = moments[1] * b2 + gradient.square() * (1.0 - b2);
        let denominator = (second / self.second_bias + epsilon_root).sqrt() + epsilon;
        let update = first / self.first_bias / denominator + value * weight_decay;
        (update, vec![first, second])
    }
}
