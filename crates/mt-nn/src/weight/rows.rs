//! Several adapters of a weight, among which the rows of a batch choose.
//!
//! Their arrays are stacked, and ranks are padded with zeros to the largest one. Rows with the same adapter follow one
//! another, so that a product with adapters is a grouped product, which reads the arrays of the chosen adapters once. Rows
//! without an adapter are behind all groups and cost nothing. On several devices, each row meets all adapters.

use mt_shape::{AdapterChoices, Axis, DType, axis};
use mt_trace::Tensor;

use super::{
    Adapter, AdapterArray, LORA_RANK,
    adapter::{Frozen, Weighted, norm_of_outputs},
};
use crate::{
    Initializer, ParamSpec,
    axes::{BATCH, EXPERT, POSITION, ROW},
    experts::{RowGroups, grouped_dot},
};

/// The axis of a weight's adapters.
pub const ADAPTER: &str = "adapter";
/// The axis of the factors of no adapter, and of each adapter.
const CHOICE_OF_ROW: &str = "choice_of_row";
const INPUT: &str = "adapter_input";
const OUTPUT: &str = "adapter_output";

/// Stands for the learned norm of an output that has none.
pub const WITHOUT_MAGNITUDE: f32 = f32::INFINITY;

/// The share of rows that usually have adapters, by which grouped products choose their tiles.
const USUAL_SHARE: f64 = 0.5;

/// The arrays of `count` adapters of a weight that is `dense` as one array and whose first `num_inputs` axes are the
/// input. They have the type of activations, so that no step converts those of adapters that no row has chosen.
pub(super) fn specs(
    adapter: Adapter,
    count: usize,
    dense: &ParamSpec,
    num_inputs: usize,
) -> Vec<(&'static str, ParamSpec)> {
    let (rank, adapters) = (axis(LORA_RANK, adapter.rank), axis(ADAPTER, count));
    let (inputs, outputs) = dense.axes.split_at(num_inputs);
    let (of_inputs, of_outputs) = dense.logical_axes.split_at(num_inputs);
    let declare = |array: AdapterArray, axes: Vec<Axis>, logical_axes, num_input_axes| {
        let spec = ParamSpec {
            axes,
            logical_axes,
            num_group_axes: 1,
            num_input_axes,
            is_trainable: false,
            adapter: Some(array),
            ..ParamSpec::new([], Initializer::Loaded)
        };
        (array.name(), spec)
    };
    let to_rank = ([&[adapters], inputs, &[rank]].concat(), [&[None], of_inputs, &[None]].concat());
    let from_rank = ([&[adapters, rank], outputs].concat(), [&[None, None], of_outputs].concat());
    let mut arrays = vec![
        declare(AdapterArray::A, to_rank.0, to_rank.1, num_inputs),
        declare(AdapterArray::B, from_rank.0, from_rank.1, 1),
    ];
    if adapter.has_magnitude {
        let choices = axis(CHOICE_OF_ROW, 1 + count);
        let (axes, logical_axes) = ([&[choices], outputs].concat(), [&[None], of_outputs].concat());
        arrays.push(declare(AdapterArray::Magnitude, axes, logical_axes, 0));
    }
    arrays
}

/// The product of each row with the weight and with the row's adapter, whose factor `B` contains.
#[track_caller]
pub(super) fn dot<'t>(
    frozen: Frozen<'_, 't>,
    arrays: &[Tensor<'t>],
    x: Tensor<'t>,
    over: &[&'static str],
    choices: AdapterChoices<Tensor<'t>>,
) -> Tensor<'t> {
    let product = frozen.format.dot(frozen.arrays, x, over);
    let names: Vec<&'static str> = [BATCH, POSITION].into_iter().chain(over.iter().copied()).collect();
    if x.axes().len() != names.len() {
        x.region()
            .fail("dot", "adapters that differ by row need the axes `batch`, `position` and the inputs");
    }
    let added = match x.region().num_devices() {
        1 => of_groups(arrays, x, over, choices),
        _ => of_all(arrays, x, over, choices),
    };
    let order: Vec<&'static str> = product.axes().iter().map(|axis| axis.name).collect();
    let sum = product + added.order(&order);
    match arrays.get(2) {
        Some(factors) => {
            let of_rows = factors.take(CHOICE_OF_ROW, choices.choices);
            sum * of_rows.cast(x.dtype()).broadcast(&sum.axes())
        }
        None => sum,
    }
}

/// The products of rows with their adapters, as grouped products.
#[track_caller]
fn of_groups<'t>(
    arrays: &[Tensor<'t>],
    x: Tensor<'t>,
    over: &[&'static str],
    choices: AdapterChoices<Tensor<'t>>,
) -> Tensor<'t> {
    let names: Vec<&'static str> = [BATCH, POSITION].into_iter().chain(over.iter().copied()).collect();
    let (batch, position) = (x.axis(BATCH), x.axis(POSITION));
    let rows = x.order(&names).merge(&[BATCH, POSITION], ROW).merge(over, INPUT);
    let (a, b) = (arrays[0], arrays[1]);
    let is_output = |axis: &&Axis| ![ADAPTER, LORA_RANK].contains(&axis.name);
    let outputs: Vec<Axis> = b.axes().iter().filter(is_output).copied().collect();
    let of_outputs: Vec<&'static str> = outputs.iter().map(|axis| axis.name).collect();
    let stacked = |array: Tensor<'t>, order: Vec<&'static str>, merged: &[&'static str], into| {
        array.order(&order).merge(merged, into).rename(ADAPTER, EXPERT)
    };
    let a = stacked(a, [&[ADAPTER], over, &[LORA_RANK]].concat(), over, INPUT);
    let b = stacked(b, [&[ADAPTER, LORA_RANK], of_outputs.as_slice()].concat(), &of_outputs, OUTPUT);
    // A row of the batch is as many rows of the product as it has tokens.
    let sizes = choices.counts.rename(ADAPTER, EXPERT) * position.size as f64;
    let groups = RowGroups { sizes, usual_share: USUAL_SHARE };
    let low = grouped_dot(rows, a, groups, INPUT);
    let added = grouped_dot(low, b, groups, LORA_RANK);
    added.split(OUTPUT, &outputs).split(ROW, &[batch, position])
}

/// The products of rows with all adapters, of which those that a row has not chosen become 0. Rows stay on their devices, and
/// weights are placed like those that they adapt. The groups of a grouped product lie across devices instead.
#[track_caller]
fn of_all<'t>(
    arrays: &[Tensor<'t>],
    x: Tensor<'t>,
    over: &[&'static str],
    choices: AdapterChoices<Tensor<'t>>,
) -> Tensor<'t> {
    let [a, b] = [arrays[0], arrays[1]].map(|array| array.cast(x.dtype()));
    let low = x.contract(a, over);
    let (region, axes) = (x.region(), low.axes());
    let adapters = low.axis(ADAPTER);
    let of_rows = [x.axis(BATCH), adapters];
    let is_chosen = (region.iota(DType::I32, adapters).broadcast(&of_rows) + 1.0).equals(choices.choices);
    let low = is_chosen.broadcast(&axes).select(low, region.full(low.dtype(), &axes, 0.0));
    low.contract(b, &[ADAPTER, LORA_RANK])
}

/// The factors by which weights with learned norms multiply their outputs, with the indices of the parameters that hold
/// the learned norms. The factor is 1 where a norm is [`WITHOUT_MAGNITUDE`]. `values` are all parameters, whose adapters'
/// factors `B` contains.
pub fn row_factors<'t>(
    parameters: &[(mt_shape::Path, ParamSpec)],
    values: &[Tensor<'t>],
) -> Vec<(usize, Tensor<'t>)> {
    let mut made = Vec::new();
    for (index, (path, spec)) in parameters.iter().enumerate() {
        if spec.adapter != Some(AdapterArray::Magnitude) {
            continue;
        }
        let weight = Weighted::at(&path.parent(), parameters);
        let arrays = |indices: &[usize]| indices.iter().map(|index| values[*index]).collect::<Vec<_>>();
        let factors = weight.of_each_layer(&arrays(&weight.base), &arrays(&weight.adapter), factors_of_layer);
        made.push((index, factors));
    }
    made
}

/// # Shapes
/// `[inputs, outputs], ([adapter, inputs, lora_rank], [adapter, lora_rank, outputs], [choice_of_row, outputs])
/// -> f32[choice_of_row, outputs]`
fn factors_of_layer<'t>(dense: Tensor<'t>, arrays: &[Tensor<'t>]) -> Tensor<'t> {
    let &[a, b, magnitudes] = arrays else { unreachable!("adapters with learned norms have three arrays") };
    let outputs: Vec<&'static str> = magnitudes.axes()[1..].iter().map(|axis| axis.name).collect();
    let names = dense.axes();
    let inputs: Vec<&'static str> =
        names.iter().map(|axis| axis.name).filter(|name| !outputs.contains(name)).collect();
    let factors_of = |choice: usize| {
        let magnitude = magnitudes.at(CHOICE_OF_ROW, choice).cast(DType::F32);
        let ones = dense.region().full(DType::F32, &magnitude.axes(), 1.0);
        let Some(adapter) = choice.checked_sub(1) else { return ones };
        let [a, b] = [a, b].map(|array| array.at(ADAPTER, adapter).cast(DType::F32));
        let order: Vec<&'static str> = names.iter().map(|axis| axis.name).collect();
        let sum = dense + a.dot(b, &[LORA_RANK]).order(&order);
        let factors = magnitude / norm_of_outputs(sum, &inputs).order(&outputs);
        magnitude.less(f64::from(f32::MAX)).select(factors, ones)
    };
    let choices = magnitudes.axis(CHOICE_OF_ROW).size;
    let each: Vec<Tensor<'t>> =
        (0..choices).map(|choice| factors_of(choice).unsqueeze(CHOICE_OF_ROW)).collect();
    each[0].concatenate(&each[1..], CHOICE_OF_ROW)
}
