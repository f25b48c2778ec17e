//! Differentiation of per-device code.
//!
//! A value that all devices along some mesh axes have alike counts as the mean of their values, so each device gets its
//! share of the cotangent. The gradient of an operand that devices share is the sum over these devices. The sum is
//! taken outside of the per-device code, where the partitioner may combine it with other communication.

use std::sync::Arc;

use mt_ir::{Binary, Graph, ManualComputation, Op, Reduction, SavePolicy, TensorType, ValueId};
use mt_shape::{DType, PartitionSpec};

use crate::{AutodiffError, cleaned, joint::joint, partition::partition};

/// The data of the forward pass that the backward pass needs.
pub(crate) struct ManualTape {
    manual: ManualComputation,
    backward: Graph,
    /// Operands and residuals that the backward graph reads, with their specs.
    arguments: Vec<(ValueId, PartitionSpec)>,
    /// The number of leading `arguments` that are operands. The others have a leading axis over all devices.
    num_operands: usize,
    cotangents: Vec<bool>,
    gradients: Vec<Option<usize>>,
    operand_types: Vec<TensorType>,
    output_types: Vec<TensorType>,
}

/// Emits the forward pass with the residuals as further results.
pub(crate) fn forward(
    builder: &mut Graph,
    manual: &ManualComputation,
    operands: &[ValueId],
    active: &[bool],
    wanted: &[bool],
) -> Result<(Vec<ValueId>, ManualTape), AutodiffError> {
    let joint = joint(&manual.body, active, wanted)?;
    let cut = partition(&joint, operands.len(), &SavePolicy::Everything, &vec![true; operands.len()])?;
    let num_outputs = manual.body.outputs().len();
    let mut body = cut.forward;
    let mut outputs = body.outputs().to_vec();
    let mut output_specs = manual.output_specs.clone();
    for residual in &mut outputs[num_outputs..] {
        let dims = [&[1], body.ty(*residual).dims.as_slice()].concat();
        *residual = body.reshape(*residual, &dims);
        output_specs.push(over(&all_axes(manual), dims.len()));
    }
    body.set_outputs(outputs);
    let op = ManualComputation { body: Arc::new(cleaned(&body)?), output_specs, ..manual.clone() };
    let residual_specs = op.output_specs[num_outputs..].to_vec();
    let values = builder.emit_all(Op::ManualComputation(op), operands);
    let (results, residuals) = values.split_at(num_outputs);
    let mut arguments: Vec<(ValueId, PartitionSpec)> = operands
        .iter()
        .zip(&manual.input_specs)
        .zip(&cut.uses_inputs)
        .filter(|(_, used)| **used)
        .map(|((operand, spec), _)| (*operand, spec.clone()))
        .collect();
    let num_operands = arguments.len();
    arguments.extend(residuals.iter().copied().zip(residual_specs));
    let mut next = 0..;
    let gradients = joint.gradients.iter().map(|gradient| gradient.and_then(|_| next.next())).collect();
    let tape = ManualTape {
        manual: manual.clone(),
        backward: cut.backward,
        arguments,
        num_operands,
        cotangents: wanted.to_vec(),
        gradients,
        operand_types: operands.iter().map(|operand| builder.ty(*operand).clone()).collect(),
        output_types: results.iter().map(|result| builder.ty(*result).clone()).collect(),
    };
    Ok((results.to_vec(), tape))
}

/// Emits the backward pass; returns a gradient for each operand, or `None` for zero.
pub(crate) fn backward(
    builder: &mut Graph,
    tape: ManualTape,
    cotangents: &[Option<ValueId>],
) -> Result<Vec<Option<ValueId>>, AutodiffError> {
    let manual = &tape.manual;
    let mut operands: Vec<ValueId> = tape.arguments.iter().map(|(value, _)| *value).collect();
    let mut input_specs: Vec<PartitionSpec> = tape.arguments.iter().map(|(_, spec)| spec.clone()).collect();
    // The share of each cotangent that a device gets.
    let mut shares = Vec::new();
    for (index, _) in tape.cotangents.iter().enumerate().filter(|(_, wanted)| **wanted) {
        let zero = |builder: &mut Graph| builder.splat(tape.output_types[index].clone(), 0.0);
        operands.push(cotangents[index].unwrap_or_else(|| zero(builder)));
        let spec = &manual.output_specs[index];
        let alike: usize = unsplit(manual, spec).iter().map(|(_, size)| size).product();
        input_specs.push(spec.clone());
        shares.push(1.0 / alike as f64);
    }

    let mut body = Graph::new();
    let mut inner = Vec::new();
    for (index, (operand, spec)) in operands.iter().zip(&input_specs).enumerate() {
        let ty = builder.ty(*operand);
        let own = body.input(TensorType::new(ty.dtype, own_dims(manual, &ty.dims, spec)));
        let is_residual = (tape.num_operands..tape.arguments.len()).contains(&index);
        let value = if is_residual {
            let dims = body.ty(own).dims[1..].to_vec();
            body.reshape(own, &dims)
        } else if let Some(share) = index.checked_sub(tape.arguments.len()).map(|index| shares[index])
            && share != 1.0
        {
            let factor = body.splat_like(own, share);
            body.emit(Op::Binary(Binary::Multiply), &[own, factor])
        } else {
            own
        };
        inner.push(value);
    }
    let gradients = body.inline(&tape.backward, &inner);
    let mut outputs = Vec::new();
    let mut output_specs = Vec::new();
    for (index, position) in tape.gradients.iter().enumerate() {
        let Some(position) = position else { continue };
        let gradient = gradients[*position];
        let dims = [&[1], body.ty(gradient).dims.as_slice()].concat();
        outputs.push(body.reshape(gradient, &dims));
        let spec = &manual.input_specs[index];
        let sharing: Vec<String> = unsplit(manual, spec).into_iter().map(|(axis, _)| axis).collect();
        output_specs.push(PartitionSpec([&[sharing], spec.0.as_slice()].concat()));
    }
    body.set_outputs(outputs);
    let op = ManualComputation {
        body: Arc::new(cleaned(&body)?),
        manual_axes: manual.manual_axes.clone(),
        input_specs,
        output_specs,
    };
    let mut results = builder.emit_all(Op::ManualComputation(op), &operands).into_iter();
    let gradients = tape.gradients.iter().zip(&tape.operand_types).map(|(gradient, ty)| {
        gradient.map(|_| {
            let each = results.next().expect("there is a result for each gradient");
            sum_over_devices(builder, each, ty)
        })
    });
    Ok(gradients.collect())
}

/// The sum along the leading axis. It is kept in `f32` at least.
fn sum_over_devices(builder: &mut Graph, each: ValueId, ty: &TensorType) -> ValueId {
    if builder.ty(each).dims[0] == 1 {
        return builder.reshape(each, &ty.dims);
    }
    let wide = if ty.dtype.bits() < DType::F32.bits() { DType::F32 } else { ty.dtype };
    let each = builder.convert(each, wide);
    let sum = builder.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![0] }, &[each]);
    builder.convert(sum, ty.dtype)
}

/// The mesh axes of per-device code.
pub(crate) fn all_axes(manual: &ManualComputation) -> Vec<String> {
    manual.manual_axes.iter().map(|(axis, _)| axis.clone()).collect()
}

/// A spec that splits the leading of `rank` axes.
pub(crate) fn over(axes: &[String], rank: usize) -> PartitionSpec {
    let rest = vec![Vec::new(); rank - 1];
    PartitionSpec([vec![axes.to_vec()], rest].concat())
}

/// The mesh axes that do not split a value.
fn unsplit(manual: &ManualComputation, spec: &PartitionSpec) -> Vec<(String, usize)> {
    let is_unsplit = |axis: &&(String, usize)| !spec.0.iter().flatten().any(|own| *own == axis.0);
    manual.manual_axes.iter().filter(is_unsplit).cloned().collect()
}

/// The dimensions of a device's shard.
fn own_dims(manual: &ManualComputation, dims: &[usize], spec: &PartitionSpec) -> Vec<usize> {
    let size = |axis: &String| {
        manual.manual_axes.iter().find(|(known, _)| known == axis).map_or(1, |(_, size)| *size)
    };
    let num_shards = |index: usize| spec.0.get(index).map_or(1, |axes| axes.iter().map(size).product());
    dims.iter().enumerate().map(|(index, dim)| dim / num_shards(index)).collect()
}
