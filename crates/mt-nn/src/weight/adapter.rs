//! Low-rank adapters of weights: LoRA, rsLoRA and DoRA.
//!
//! A weight `W` with an adapter acts as `W + scale · A · B`. `A` maps the weight's inputs to `rank` numbers and `B` maps
//! these to its outputs. DoRA also rescales each output to a learned norm. The definitions are those of the PEFT
//! library. A weight can also have several adapters, among which the rows of a batch choose (`rows.rs`).

use mt_shape::{Axis, DType, Noise, Path, axis};
use mt_trace::{Key, ScanOptions, Tensor};

use super::{DENSE, WeightFormat, rows};
use crate::{Initializer, LayerPlace, ParamSpec, SequenceOrder, dropout};

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
    /// The share of the adapter's inputs that training drops.
    pub dropout: f64,
    /// The number of adapters of which each row of a batch chooses one or none, in generation; `None` for one adapter of
    /// all rows.
    pub choices: Option<usize>,
}

/// The frozen weight below an adapter.
#[derive(Clone, Copy)]
pub(super) struct Frozen<'a, 't> {
    pub format: &'static dyn WeightFormat,
    pub arrays: &'a [Tensor<'t>],
}

impl<'t> Frozen<'_, 't> {
    /// The weight as one array in `f32`.
    fn dense(self) -> Tensor<'t> {
        self.format.dense(self.arrays, DType::F32)
    }
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
        if let Some(count) = self.choices {
            return rows::specs(self, count, dense, num_inputs);
        }
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

    /// The product with the whole weight. `noise` drops inputs of the adapter, as the PEFT library does: with a learned norm
    /// the norm's change also acts on what is left of the inputs.
    #[track_caller]
    pub(super) fn dot<'t>(
        self,
        arrays: &[Tensor<'t>],
        x: Tensor<'t>,
        over: &[&'static str],
        frozen: Frozen<'_, 't>,
        noise: Option<Noise<Tensor<'t>>>,
    ) -> Tensor<'t> {
        let dtype = x.dtype();
        let product = frozen.format.dot(frozen.arrays, x, over);
        let dropped = noise.filter(|_| self.dropout > 0.0).map(|noise| {
            let order = match noise.paired_shards {
                Some(shards) => SequenceOrder::Paired { shards },
                None => SequenceOrder::AsRead,
            };
            dropout(x, self.dropout, Key::new(noise.key), order)
        });
        let low = arrays[0].cast(dtype).dot(dropped.unwrap_or(x), over);
        let added = arrays[1].cast(dtype).dot(low, &[LORA_RANK]) * self.scale;
        match (self.factors(arrays, || frozen.dense()), dropped) {
            (None, _) => product + added,
            (Some(factors), None) => (product + added) * factors.cast(dtype),
            (Some(factors), Some(dropped)) => {
                let change = frozen.format.dot(frozen.arrays, dropped, over) * (factors - 1.0).cast(dtype);
                product + change + added * factors.cast(dtype)
            }
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
pub(super) fn norm_of_outputs<'t>(weight: Tensor<'t>, inputs: &[&'static str]) -> Tensor<'t> {
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
        let weight = Weighted::at(&path.parent(), parameters);
        let kept: Vec<&'static str> = spec.axes.iter().map(|axis| axis.name).collect();
        let names = weight.dense.axes.iter().map(|axis| axis.name);
        let inputs: Vec<&'static str> = names.filter(|name| !kept.contains(name)).collect();
        let base: Vec<Tensor<'t>> = weight.base.iter().map(|index| values(*index)).collect();
        let norms =
            weight.of_each_layer(&base, &[], |dense, _| norm_of_outputs(dense, &inputs).cast(spec.dtype));
        made.push((index, norms));
    }
    made
}

/// The parameters without adapters, in order, with the adapters merged into their weights, each as one dense array.
/// Weights keep the types of their dense form; sums are computed in `f32`.
pub fn merged_weights<'t>(
    parameters: &[(Path, ParamSpec)],
    adapter: Adapter,
    values: &[Tensor<'t>],
) -> Vec<Tensor<'t>> {
    let is_kept =
        |spec: &ParamSpec| matches!(spec.adapter, None | Some(AdapterArray::Whole)) && spec.is_first_array();
    let of_base = parameters.iter().zip(values).filter(|((_, spec), _)| is_kept(spec));
    let merged = of_base.map(|((path, spec), value)| {
        let weight = Weighted::at(&spec.stored_form(path).0, parameters);
        if weight.adapter.is_empty() && spec.encoded.is_none() {
            return *value;
        }
        let arrays = |indices: &[usize]| indices.iter().map(|index| values[*index]).collect::<Vec<_>>();
        let dtype = weight.dense.dtype;
        weight.of_each_layer(&arrays(&weight.base), &arrays(&weight.adapter), |dense, adapted| {
            let merged = if adapted.is_empty() { dense } else { adapter.merged(adapted, dense) };
            merged.cast(dtype)
        })
    });
    merged.collect()
}

/// A weight among a model's parameters, by the indices of its arrays.
pub(super) struct Weighted {
    /// The weight as one array.
    pub dense: ParamSpec,
    format: &'static dyn WeightFormat,
    pub base: Vec<usize>,
    pub adapter: Vec<usize>,
}

impl Weighted {
    pub fn at(weight: &Path, parameters: &[(Path, ParamSpec)]) -> Self {
        let indices = |includes: &dyn Fn(&Path, &ParamSpec) -> bool| -> Vec<usize> {
            let all = parameters.iter().enumerate();
            all.filter(|(_, (path, spec))| includes(path, spec)).map(|(index, _)| index).collect()
        };
        let base = indices(&|path, spec| match spec.encoded {
            Some(_) => path.parent() == *weight,
            None => path == weight,
        });
        let adapter = indices(&|path, spec| spec.adapter.is_some() && path.parent() == *weight);
        let first = base.first().expect("an adapter's weight is at the parent of its path");
        let (path, spec) = &parameters[*first];
        let format: &'static dyn WeightFormat = match &spec.encoded {
            Some(array) => array.weight.encoding.format(),
            None => &DENSE,
        };
        Self { dense: spec.stored_form(path).1, format, base, adapter }
    }

    /// The results of `compute` for the dense form in `f32` and the adapter's arrays, one layer after the other.
    pub fn of_each_layer<'t>(
        &self,
        base: &[Tensor<'t>],
        adapter: &[Tensor<'t>],
        compute: impl for<'b> Fn(Tensor<'b>, &[Tensor<'b>]) -> Tensor<'b>,
    ) -> Tensor<'t> {
        let LayerPlace::Stacked { .. } = self.dense.place else {
            return compute(self.format.dense(base, DType::F32), adapter);
        };
        let layers = LayerWeight { base: base.to_vec(), adapter: adapter.to_vec() };
        let over = ScanOptions::over(self.dense.axes[0]);
        let ([], [made]) = base[0].region().scan(over, [], &layers, |_, [], layer| {
            ([], [compute(self.format.dense(&layer.base, DType::F32), &layer.adapter)])
        });
        made
    }
}

/// The arrays of the weight and of the adapter of a layer.
#[derive(mt_derive::Tree)]
struct LayerWeight<L> {
    base: Vec<L>,
    adapter: Vec<L>,
}
