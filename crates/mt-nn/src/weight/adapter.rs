//! Low-rank adapters of weights: LoRA, rsLoRA and DoRA.
//!
//! A weight `W` with an adapter acts as `W + scale · A · B`. `A` maps the weight's inputs to `rank` numbers and `B` maps
//! these to its outputs. DoRA also rescales each output to a learned norm. The definitions are those of the PEFT
//! library.

use mt_shape::{Axis, DType, Path, axis};
use mt_trace::{ScanOptions, Tensor};

use crate::{Initializer, LayerPlace, ParamSpec};

/// The axis of an adapter's rank.
pub const LORA_RANK: &str = "lora_rank";

/// The options of a weight's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    pub rank: usize,
    /// The factor of `A · B`.
    pub scale: f64,
    /// Whether each output has a learned norm (DoRA).
    pub has_magnitude: bool,
}

/// The arrays of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AdapterArray {
    /// `A`: `[inputs, lora_rank]`.
    A,
    /// `B`: `[lora_rank, outputs]`.
    B,
    /// The norm of each output, `[outputs]`.
    Magnitude,
    /// A parameter that is trained and saved beside the adapters of others, such as the head of a reward model.
    Whole,
}

impl AdapterArray {
    /// The name that the array adds to the path of its weight.
    pub const fn name(self) -> &'static str {
        match self {
            Self::A => "lora_a",
            Self::B => "lora_b",
            Self::Magnitude => "lora_magnitude",
            Self::Whole => "whole",
        }
    }
}

impl Adapter {
    /// The arrays of the adapter of a weight that is `dense` as one array and whose first `num_inputs` axes are the
    /// input.
    pub(super) fn specs(self, dense: &ParamSpec, num_inputs: usize) -> Vec<(&'static str, ParamSpec)> {
        let rank = axis(LORA_RANK, self.rank);
        let fan_in = dense.axes[..num_inputs].iter().map(|axis| axis.size).product::<usize>();
        let (inputs, outputs) = dense.axes.split_at(num_inputs);
        let (of_inputs, of_outputs) = dense.logical_axes.split_at(num_inputs);
        let declare = |array: AdapterArray, axes: Vec<Axis>, logical_axes, initializer, inputs| {
            let spec = ParamSpec {
                axes,
                logical_axes,
                initializer,
                // The updates of adapters are too small for the narrow types of published weights.
                dtype: DType::F32,
                num_input_axes: inputs,
                adapter: Some(array),
                ..ParamSpec::new([], Initializer::Zeros)
            };
            (array.name(), spec)
        };
        // Kaiming-uniform with a = √5.
        let uniform = Initializer::Uniform { bound: (fan_in as f64).powf(-0.5) };
        let to_rank = ([inputs, &[rank]].concat(), [of_inputs, &[None]].concat());
        let from_rank = ([&[rank], outputs].concat(), [&[None], of_outputs].concat());
        let mut arrays = vec![
            declare(AdapterArray::A, to_rank.0, to_rank.1, uniform, num_inputs),
            declare(AdapterArray::B, from_rank.0, from_rank.1, Initializer::Zeros, 1),
        ];
        if self.has_magnitude {
            let initializer = Initializer::NormOfWeight;
            let (axes, logical_axes) = (outputs.to_vec(), of_outputs.to_vec());
            arrays.push(declare(AdapterArray::Magnitude, axes, logical_axes, initializer, 0));
        }
        arrays
    }

    /// The product with the whole weight, from the product with the frozen one. `dense` gives the frozen weight in `f32`.
    #[track_caller]
    pub(super) fn dot<'t>(
        self,
        arrays: &[Tensor<'t>],
        x: Tensor<'t>,
        over: &[&'static str],
        product: Tensor<'t>,
        dense: impl FnOnce() -> Tensor<'t>,
    ) -> Tensor<'t> {
        let dtype = x.dtype();
        let low = x.dot(arrays[0].cast(dtype), over);
        let sum = product + low.dot(arrays[1].cast(dtype), &[LORA_RANK]) * self.scale;
        match self.factors(arrays, dense) {
            Some(factors) => sum * factors.cast(dtype),
            None => sum,
        }
    }

    /// The whole weight as one array in `f32`.
    #[track_caller]
    pub(super) fn merged<'t>(self, arrays: &[Tensor<'t>], dense: Tensor<'t>) -> Tensor<'t> {
        let sum = self.sum(arrays, dense);
        match self.factors(arrays, || dense) {
            Some(factors) => sum * factors,
            None => sum,
        }
    }

    /// `W + scale · A · B` in `f32`.
    #[track_caller]
    fn sum<'t>(self, arrays: &[Tensor<'t>], dense: Tensor<'t>) -> Tensor<'t> {
        dense + arrays[0].cast(DType::F32).dot(arrays[1].cast(DType::F32), &[LORA_RANK]) * self.scale
    }

    /// DoRA's factor of each output, `[outputs]`: its learned norm over the norm of `W + scale · A · B`, which counts as a
    /// constant in the backward pass.
    #[track_caller]
    fn factors<'t>(self, arrays: &[Tensor<'t>], dense: impl FnOnce() -> Tensor<'t>) -> Option<Tensor<'t>> {
        let magnitude = arrays.get(2)?;
        let inputs: Vec<&'static str> =
            arrays[0].axes().iter().map(|axis| axis.name).filter(|name| *name != LORA_RANK).collect();
        let norms = norm_of_outputs(self.sum(arrays, dense()).stop_gradient(), &inputs);
        Some(magnitude.cast(DType::F32) / norms)
    }
}

/// The norm of each output of a weight, over its inputs.
fn norm_of_outputs<'t>(weight: Tensor<'t>, inputs: &[&'static str]) -> Tensor<'t> {
    let weight = weight.cast(DType::F32);
    (weight * weight).sum(inputs).sqrt()
}

/// The first norms of outputs of the weights that learn them, with the indices of their parameters: those of the frozen
/// weights, because `B` is zero at first. `values` gives a parameter by its index.
pub fn first_magnitudes<'t>(
    parameters: &[(Path, ParamSpec)],
    mut values: impl FnMut(usize) -> Tensor<'t>,
) -> Vec<(usize, Tensor<'t>)> {
    let mut made = Vec::new();
    for (index, (path, spec)) in parameters.iter().enumerate() {
        if spec.adapter != Some(AdapterArray::Magnitude) {
            continue;
        }
        let weight = path.parent();
        let base = parameters.iter().position(|(other, _)| *other == weight);
        let base = base.expect("an adapter's weight is at the parent of its path");
        let kept: Vec<&'static str> = spec.axes.iter().map(|axis| axis.name).collect();
        let inputs = parameters[base].1.axes.iter().map(|axis| axis.name).filter(|name| !kept.contains(name));
        let norms = norm_of_outputs(values(base), &inputs.collect::<Vec<_>>());
        made.push((index, norms.cast(spec.dtype)));
    }
    made
}

/// The parameters without adapters, in order, with the adapters merged into their weights. Weights keep their types; sums
/// are computed in `f32`.
pub fn merged_weights<'t>(
    parameters: &[(Path, ParamSpec)],
    adapter: Adapter,
    values: &[Tensor<'t>],
) -> Vec<Tensor<'t>> {
    let is_kept = |spec: &ParamSpec| matches!(spec.adapter, None | Some(AdapterArray::Whole));
    let of_base = parameters.iter().zip(values).filter(|((_, spec), _)| is_kept(spec));
    let merged = of_base.map(|((path, spec), value)| {
        let adapted = parameters
            .iter()
            .zip(values)
            .filter(|((other, array), _)| array.adapter.is_some() && other.parent() == *path);
        let arrays: Vec<Tensor<'t>> = adapted.map(|(_, array)| *array).collect();
        if arrays.is_empty() {
            return *value;
        }
        match spec.place {
            LayerPlace::Stacked { .. } => merged_stack(spec, adapter, *value, &arrays),
            LayerPlace::None | LayerPlace::One(_) => {
                adapter.merged(&arrays, value.cast(DType::F32)).cast(spec.dtype)
            }
        }
    });
    merged.collect()
}

/// The weight and the adapter of a layer.
#[derive(mt_derive::Tree)]
struct LayerWeight<L> {
    dense: L,
    arrays: Vec<L>,
}

/// Merges the adapters of stacked layers, one layer after the other.
fn merged_stack<'t>(
    spec: &ParamSpec,
    adapter: Adapter,
    dense: Tensor<'t>,
    arrays: &[Tensor<'t>],
) -> Tensor<'t> {
    let layers = LayerWeight { dense, arrays: arrays.to_vec() };
    let ([], [merged]) = dense.region().scan(ScanOptions::over(spec.axes[0]), [], &layers, |_, [], layer| {
        let merged = adapter.merged(&layer.arrays, layer.dense.cast(DType::F32));
        ([], [merged.cast(spec.dtype)])
    });
    merged
}
