//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the conventions of optax.

use mt_shape::DType;
use mt_trace::Tensor;

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

/// Running means of gradients and of their squares, one for each parameter.
#[derive(Clone, Debug)]
pub struct Moments<'t> {
    pub first: Vec<Tensor<'t>>,
    pub second: Vec<Tensor<'t>>,
}

impl AdamW {
    /// One step: the new parameters and moments. `step` counts from 0, an integer scalar.
    #[track_caller]
    pub fn update<'t>(
        &self,
        parameters: &[Tensor<'t>],
        gradients: &[Tensor<'t>],
        moments: &Moments<'t>,
        step: Tensor<'t>,
        learning_rate: Tensor<'t>,
    ) -> (Vec<Tensor<'t>>, Moments<'t>) {
        let count = step.cast(DType::F32) + 1.0;
        let bias = |decay: f64| {
            let base = step.region().full(DType::F32, &[], decay);
            -(base.power(count)) + 1.0
        };
        let (first_bias, second_bias) = (bias(self.b1), bias(self.b2));
        let mut next = Vec::with_capacity(parameters.len());
        let mut next_moments = Moments { first: Vec::new(), second: Vec::new() };
        for (index, (parameter, gradient)) in parameters.iter().zip(gradients).enumerate() {
            let gradient = gradient.cast(DType::F32);
            let first = moments.first[index].cast(DType::F32) * self.b1 + gradient * (1.0 - self.b1);
            let second = moments.second[index] * self.b2 + gradient.square() * (1.0 - self.b2);
            let denominator = (second / second_bias + self.epsilon_root).sqrt() + self.epsilon;
            let wide = parameter.cast(DType::F32);
            let update = first / first_bias / denominator + wide * self.weight_decay;
            next.push((wide - update * learning_rate).cast(parameter.dtype()));
            next_moments.first.push(first.cast(self.first_moment_dtype));
            next_moments.second.push(second);
        }
        (next, next_moments)
    }
}
