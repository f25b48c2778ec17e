//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the conventions of optax or of Pax.

use mt_shape::{
    DType,
    kernels::{self, attributes},
};
use mt_trace::Tensor;

use crate::{Parameter, Slot, StepForm, StepInputs, clip::sum_of_squares};

/// The optimizer's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub form: AdamForm,
    pub b1: f64,
    pub b2: f64,
    /// Added outside the square root.
    pub epsilon: f64,
    /// Added inside the square root.
    pub epsilon_root: f64,
    pub weight_decay: f64,
    /// Element type of the first moment.
    pub first_moment_dtype: DType,
}

/// Correction for running means that start at zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdamForm {
    /// The means are divided by the sum of the weights of their gradients.
    Standard,
    /// As `Standard`, and the first moment looks one step ahead (Dozat, 2016).
    Nesterov,
    /// The decay grows from 0 to its value, so the means need no division. Except for rounding, the updates equal those
    /// of `Standard`.
    Pax,
}

impl Adam {
    /// The running means of the gradients and of their squares.
    pub(crate) fn slots(
        &self,
        index: usize,
        parameter: &Parameter,
        sub_optimizer: Option<&'static str>,
    ) -> Vec<Slot> {
        let slot =
            |name, dtype, order| Slot { sub_optimizer, ..Slot::like(name, index, parameter, dtype, order) };
        vec![slot("mu", self.first_moment_dtype, 1), slot("nu", DType::F32, 2)]
    }

    /// Scalars of the step that follows `count` steps.
    #[track_caller]
    pub(crate) fn step<'t>(&self, count: Tensor<'t>) -> AdamStep<'t> {
        let number = count.cast(DType::F32) + 1.0;
        // One minus a power of the decay.
        let weight = |decay: f64, power: Tensor<'t>| {
            let base = count.region().full(DType::F32, &[], decay);
            -(base.power(power)) + 1.0
        };
        let (first, second) = match self.form {
            AdamForm::Standard => (weight(self.b1, number), weight(self.b2, number)),
            AdamForm::Nesterov => {
                return AdamStep {
                    constants: *self,
                    first: weight(self.b1, number + 1.0),
                    second: weight(self.b2, number),
                    gradient: Some(weight(self.b1, number)),
                };
            }
            AdamForm::Pax => {
                let decay = |decay: f64| weight(decay, number - 1.0) * decay / weight(decay, number);
                (decay(self.b1), decay(self.b2))
            }
        };
        AdamStep { constants: *self, first, second, gradient: None }
    }
}

/// Scalars that all parameters share in one step.
pub(crate) struct AdamStep<'t> {
    constants: Adam,
    /// Divisor of the first moment; in Pax's form its decay.
    first: Tensor<'t>,
    /// Divisor of the second moment; in Pax's form its decay.
    second: Tensor<'t>,
    /// Divisor of the gradient that Nesterov's form adds.
    gradient: Option<Tensor<'t>>,
}

/// The results of a step for one parameter.
pub(crate) struct Stepped<'t> {
    pub value: Tensor<'t>,
    pub moments: [Tensor<'t>; 2],
    /// The sum of squares of the new value.
    pub squares: Tensor<'t>,
}

impl<'t> AdamStep<'t> {
    /// The whole step of a parameter with clipping and learning rate. A kernel updates the arrays in place.
    #[track_caller]
    pub fn at_once(
        &self,
        parameter: &Parameter,
        value: Tensor<'t>,
        moments: &[Tensor<'t>],
        gradient: Tensor<'t>,
        inputs: &StepInputs<'_, 't>,
    ) -> Stepped<'t> {
        let arrays = [value, moments[0], moments[1], gradient];
        let factor = inputs.clipping_factor.unwrap_or_else(|| value.region().full(DType::F32, &[], 1.0));
        let numbers = [factor, inputs.learning_rate, self.first, self.second];
        let operands: Vec<Tensor<'t>> = arrays.into_iter().chain(numbers).chain(self.gradient).collect();
        let results =
            value.region().kernel(&kernels::ADAM, self.attributes(parameter), &operands, |_, operands| {
                let [value, first_moment, second_moment, gradient, factor, rate, first, second] =
                    operands[..8]
                else {
                    unreachable!("there are eight operands, and for Nesterov's form another")
                };
                let step =
                    AdamStep { constants: self.constants, first, second, gradient: operands.get(8).copied() };
                let old = [first_moment, second_moment];
                let moments = old.map(|moment| moment.cast(DType::F32));
                let wide = value.cast(DType::F32);
                let gradient = (gradient * factor.cast(gradient.dtype())).cast(DType::F32);
                let (update, moments) = step.update(parameter, wide, gradient, &moments);
                let next = (wide - update * rate).cast(value.dtype());
                let [first, second] = [0, 1].map(|index| moments[index].cast(old[index].dtype()));
                vec![next, first, second, sum_of_squares(next)]
            });
        let [value, first, second, squares] = results[..] else {
            unreachable!("the kernel has four results")
        };
        Stepped { value, moments: [first, second], squares }
    }

    /// The kernel's attributes: the bits of `f32` numbers.
    fn attributes(&self, parameter: &Parameter) -> Vec<(&'static str, i64)> {
        let Adam { form, b1, b2, epsilon, epsilon_root, weight_decay, .. } = self.constants;
        let number = |value: f64| i64::from((value as f32).to_bits());
        let StepForm { scale, .. } = parameter.form;
        let weight_decay = if parameter.decays { weight_decay } else { 0.0 };
        let mut all = vec![
            (attributes::NESTEROV, i64::from(form == AdamForm::Nesterov)),
            (attributes::PAX, i64::from(form == AdamForm::Pax)),
            (attributes::B1, number(b1)),
            (attributes::NEW_SHARE_1, number(1.0 - b1)),
            (attributes::B2, number(b2)),
            (attributes::NEW_SHARE_2, number(1.0 - b2)),
            (attributes::EPSILON, number(epsilon * scale)),
            (attributes::EPSILON_ROOT, number(epsilon_root * scale.powi(2))),
            (attributes::WEIGHT_DECAY, number(weight_decay)),
        ];
        if parameter.form != StepForm::VALUE {
            all.push((attributes::UPDATE_SCALE, number(1.0 / scale)));
            all.push((attributes::CONSTANT_DECAY, number(parameter.form.constant_decay(weight_decay))));
        }
        all
    }

    /// The amount to subtract from the parameter before the learning rate applies, and the new moments.
    #[track_caller]
    pub fn update(
        &self,
        parameter: &Parameter,
        value: Tensor<'t>,
        gradient: Tensor<'t>,
        moments: &[Tensor<'t>],
    ) -> (Tensor<'t>, Vec<Tensor<'t>>) {
        let Adam { form, b1, b2, epsilon, epsilon_root, weight_decay, .. } = self.constants;
        let (first, second, numerator, squares) = if form == AdamForm::Pax {
            let mean =
                |kept: Tensor<'t>, new: Tensor<'t>, decay: Tensor<'t>| new * (-decay + 1.0) + kept * decay;
            let first = mean(moments[0], gradient, self.first);
            let second = mean(moments[1], gradient.square(), self.second);
            (first, second, first, second)
        } else {
            let first = moments[0] * b1 + gradient * (1.0 - b1);
            let second = moments[1] * b2 + gradient.square() * (1.0 - b2);
            let numerator = first / self.first;
            let numerator = match self.gradient {
                Some(weight) => numerator * b1 + gradient / weight * (1.0 - b1),
                None => numerator,
            };
            (first, second, numerator, second / self.second)
        };
        // Gradients with respect to the stepped form are those with respect to the value, divided by the form's scale.
        // Multiplying the epsilons by the scale has the same effect as dividing all gradients by it.
        let StepForm { scale, .. } = parameter.form;
        let update = numerator / ((squares + epsilon_root * scale.powi(2)).sqrt() + epsilon * scale);
        (decayed(update, parameter, value, weight_decay), vec![first, second])
    }
}

/// The amount to subtract from the value for an update of the stepped form, including weight decay if the parameter
/// decays.
#[track_caller]
pub(crate) fn decayed<'t>(
    update: Tensor<'t>,
    parameter: &Parameter,
    value: Tensor<'t>,
    weight_decay: f64,
) -> Tensor<'t> {
    let update = parameter.form.to_value(update);
    if parameter.decays && weight_decay != 0.0 {
        update + parameter.form.decay(value, weight_decay)
    } else {
        update
    }
}
