//! Differentiation of operations with regions.

use std::sync::Arc;

use mt_ir::{Graph, Node, Op, SavePolicy, Scan, TensorType, ValueId};
use mt_shape::{DType, PartitionSpec};

use crate::{
    AutodiffError,
    activity::{active_scan_inputs, active_values, needs_cotangent},
    cleaned,
    joint::joint,
    manual::{self, ManualTape},
    partition::{moved, partition, placement},
    split::split_at_names,
};

/// The data of a node's forward pass that its backward pass needs.
pub(crate) enum Tape {
    /// Only operands and results: the table of rules applies.
    Rule,
    Scan(ScanTape),
    /// Remat and custom derivatives: a backward graph and its leading arguments.
    Region(RegionTape),
    Case(CaseTape),
    Manual(ManualTape),
}

pub(crate) struct RegionTape {
    backward: Graph,
    /// Values in the builder that the backward graph reads before cotangents.
    residuals: Vec<ValueId>,
    /// The outputs whose cotangents are inputs of the backward graph.
    cotangents: Vec<bool>,
    /// For each operand, the output of the backward graph that is its gradient.
    gradients: Vec<Option<usize>>,
    /// Set if the compiler must not merge the recomputation with the forward pass: the inputs of the backward graph
    /// that were in host memory from the start.
    barrier: Option<Vec<bool>>,
}

pub(crate) struct ScanTape {
    scan: Scan,
    backward: Graph,
    /// The body's inputs that the backward body reads.
    uses_inputs: Vec<bool>,
    operands: Vec<ValueId>,
    /// Stacks of the carries that the backward body reads, then stacks of the saved values.
    carries: Vec<ValueId>,
    saved: Vec<ValueId>,
    cotangents: Vec<bool>,
    gradients: Vec<Option<usize>>,
}

pub(crate) struct CaseTape {
    backward: Vec<Arc<Graph>>,
    /// Branch index, arguments, residuals of all branches.
    operands: Vec<ValueId>,
    cotangents: Vec<bool>,
    /// The arguments that get gradients, in the order of the backward branches' outputs.
    gradients: Vec<bool>,
}

/// Emits the forward pass of an operation with regions; `None` if the operation has none and can be copied.
///
/// `wanted` marks the results that will have cotangents.
pub(crate) fn forward(
    builder: &mut Graph,
    node: &Node,
    operands: &[ValueId],
    active: &[bool],
    wanted: &[bool],
) -> Result<Option<(Vec<ValueId>, Tape)>, AutodiffError> {
    Ok(Some(match &node.op {
        Op::Scan(scan) => forward_scan(builder, scan, operands, active, wanted)?,
        Op::Remat(remat) => {
            let cut_body = split_at_names(&remat.body, &remat.save);
            let joint = joint(cut_body.as_ref().unwrap_or(&remat.body), active, wanted)?;
            let all = vec![true; operands.len()];
            let cut = partition(&joint, operands.len(), &remat.save, &all)?;
            let values = builder.inline(&cleaned(&cut.forward)?, operands);
            let (results, saved) = values.split_at(node.results.len());
            let mut residuals = Vec::new();
            for (index, operand) in operands.iter().enumerate().filter(|(index, _)| cut.uses_inputs[*index]) {
                residuals.push(moved(builder, *operand, cut.inputs_in[index]));
            }
            residuals.extend(saved);
            let tape = RegionTape {
                backward: cleaned(&cut.backward)?,
                residuals,
                cotangents: wanted.to_vec(),
                gradients: numbered(&joint.gradients),
                barrier: Some(cut.from_host),
            };
            (results.to_vec(), Tape::Region(tape))
        }
        Op::CustomVjp(op) => {
            let values = builder.inline(&op.forward, operands);
            let (results, residuals) = values.split_at(node.results.len());
            let mut next = 0..;
            let gradients =
                op.differentiable.iter().map(|marked| marked.then(|| next.next()).flatten()).collect();
            let tape = RegionTape {
                backward: (*op.backward).clone(),
                residuals: residuals.to_vec(),
                cotangents: vec![true; node.results.len()],
                gradients,
                barrier: None,
            };
            (results.to_vec(), Tape::Region(tape))
        }
        Op::Case { branches } => forward_case(builder, branches, operands, active, wanted)?,
        Op::ManualComputation(op) => {
            let (results, tape) = manual::forward(builder, op, operands, active, wanted)?;
            (results, Tape::Manual(tape))
        }
        Op::While(_) | Op::Kernel(_) => {
            return Err(AutodiffError::NotDifferentiable {
                op: node.op.name(),
                scope: node.scope.to_string(),
            });
        }
        _ => return Ok(None),
    }))
}

/// Emits the backward pass; returns a gradient for each operand, or `None` for zero.
pub(crate) fn backward(
    builder: &mut Graph,
    node: &Node,
    tape: Tape,
    cotangents: &[Option<ValueId>],
) -> Result<Vec<Option<ValueId>>, AutodiffError> {
    Ok(match tape {
        Tape::Rule => unreachable!("handled by the table of rules"),
        Tape::Region(tape) => backward_region(builder, node, tape, cotangents),
        Tape::Scan(tape) => backward_scan(builder, tape, cotangents)?,
        Tape::Case(tape) => backward_case(builder, node, tape, cotangents),
        Tape::Manual(tape) => manual::backward(builder, tape, cotangents)?,
    })
}

fn pick<T: Clone>(items: &[T], keep: &[bool]) -> Vec<T> {
    items.iter().zip(keep).filter(|(_, keep)| **keep).map(|(item, _)| item.clone()).collect()
}

/// The gradients that exist, numbered from 0 in order.
fn numbered(gradients: &[Option<usize>]) -> Vec<Option<usize>> {
    let mut next = 0..;
    gradients.iter().map(|gradient| gradient.and_then(|_| next.next())).collect()
}

/// The cotangents of the results that `wanted` marks, with zeros for missing ones.
fn filled(
    builder: &mut Graph,
    types: &[TensorType],
    cotangents: &[Option<ValueId>],
    wanted: &[bool],
) -> Vec<ValueId> {
    let mut values = Vec::new();
    for ((ty, cotangent), wanted) in types.iter().zip(cotangents).zip(wanted) {
        if *wanted {
            values.push(cotangent.unwrap_or_else(|| builder.splat(ty.clone(), 0.0)));
        }
    }
    values
}

fn result_types(
    builder: &Graph,
    node: &Node,
    cotangents: &[Option<ValueId>],
    outputs: Vec<TensorType>,
) -> Vec<TensorType> {
    debug_assert_eq!(outputs.len(), node.results.len());
    debug_assert!(
        cotangents.iter().zip(&outputs).all(|(value, ty)| value.is_none_or(|value| builder.ty(value) == ty))
    );
    outputs
}

fn backward_region(
    builder: &mut Graph,
    node: &Node,
    tape: RegionTape,
    cotangents: &[Option<ValueId>],
) -> Vec<Option<ValueId>> {
    let outputs = match &node.op {
        Op::Remat(remat) => remat.body.output_types(),
        Op::CustomVjp(op) => op.primal.output_types(),
        _ => unreachable!("only these have a region tape"),
    };
    let types = result_types(builder, node, cotangents, outputs);
    let seeds = filled(builder, &types, cotangents, &tape.cotangents);
    let mut arguments = [tape.residuals, seeds].concat();
    if let Some(from_host) = &tape.barrier {
        // With the cotangents among the barrier's operands, recomputation starts only when the backward pass arrives
        // here. Values that were in host memory from the start stay outside: XLA would treat everything that leaves a
        // barrier with them as host values.
        let inside: Vec<usize> = (0..arguments.len()).filter(|index| !from_host[*index]).collect();
        let operands: Vec<ValueId> = inside.iter().map(|index| arguments[*index]).collect();
        for (index, value) in inside.iter().zip(builder.emit_all(Op::OptimizationBarrier, &operands)) {
            arguments[*index] = value;
        }
    }
    let gradients = builder.inline(&tape.backward, &arguments);
    tape.gradients.iter().map(|gradient| gradient.map(|index| gradients[index])).collect()
}

fn forward_case(
    builder: &mut Graph,
    branches: &[Arc<Graph>],
    operands: &[ValueId],
    active: &[bool],
    wanted: &[bool],
) -> Result<(Vec<ValueId>, Tape), AutodiffError> {
    let num_arguments = operands.len() - 1;
    let mut joints = Vec::new();
    let mut cuts = Vec::new();
    for branch in branches {
        let joint = joint(branch, &active[1..], wanted)?;
        cuts.push(partition(&joint, num_arguments, &SavePolicy::Everything, &vec![true; num_arguments])?);
        joints.push(joint);
    }
    let gradients: Vec<bool> =
        (0..num_arguments).map(|index| joints.iter().any(|joint| joint.gradients[index].is_some())).collect();
    let num_results = branches[0].outputs().len();
    let saved_types: Vec<Vec<TensorType>> =
        cuts.iter().map(|cut| cut.forward.output_types()[num_results..].to_vec()).collect();
    // Every branch returns the residuals of all branches: its own, and zeros for the others.
    let forward = cuts.iter().enumerate().map(|(own, cut)| {
        let mut branch = Graph::new();
        let inputs: Vec<ValueId> = cut.forward.input_types().into_iter().map(|ty| branch.input(ty)).collect();
        let values = branch.inline(&cut.forward, &inputs);
        let mut outputs = values[..num_results].to_vec();
        for (index, types) in saved_types.iter().enumerate() {
            if index == own {
                outputs.extend(&values[num_results..]);
            } else {
                outputs.extend(types.iter().map(|ty| branch.splat(ty.clone(), 0.0)));
            }
        }
        branch.set_outputs(outputs);
        Arc::new(branch)
    });
    let values = builder.emit_all(Op::Case { branches: forward.collect() }, operands);
    let residual_types: Vec<TensorType> = saved_types.concat();
    let argument_types = branches[0].input_types();
    let cotangent_types = pick(&branches[0].output_types(), wanted);
    let mut first_saved = 0;
    let backward = cuts.iter().zip(&joints).map(|(cut, joint)| {
        let mut branch = Graph::new();
        let arguments: Vec<ValueId> = argument_types.iter().map(|ty| branch.input(ty.clone())).collect();
        let residuals: Vec<ValueId> = residual_types.iter().map(|ty| branch.input(ty.clone())).collect();
        let seeds: Vec<ValueId> = cotangent_types.iter().map(|ty| branch.input(ty.clone())).collect();
        let own = residuals[first_saved..first_saved + cut.num_saved].to_vec();
        first_saved += cut.num_saved;
        let inner = [pick(&arguments, &cut.uses_inputs), own, seeds].concat();
        let values = branch.inline(&cut.backward, &inner);
        let mut next = values.into_iter();
        let mut outputs = Vec::new();
        for (index, ty) in argument_types.iter().enumerate().filter(|(index, _)| gradients[*index]) {
            let own = joint.gradients[index].and_then(|_| next.next());
            outputs.push(own.unwrap_or_else(|| branch.splat(ty.clone(), 0.0)));
        }
        branch.set_outputs(outputs);
        Arc::new(branch)
    });
    let tape = CaseTape {
        backward: backward.collect(),
        operands: [operands, &values[num_results..]].concat(),
        cotangents: wanted.to_vec(),
        gradients,
    };
    Ok((values[..num_results].to_vec(), Tape::Case(tape)))
}

fn backward_case(
    builder: &mut Graph,
    node: &Node,
    tape: CaseTape,
    cotangents: &[Option<ValueId>],
) -> Vec<Option<ValueId>> {
    let Op::Case { branches } = &node.op else { unreachable!("only a case has a case tape") };
    let types = result_types(builder, node, cotangents, branches[0].output_types());
    let seeds = filled(builder, &types, cotangents, &tape.cotangents);
    let operands = [tape.operands, seeds].concat();
    let mut gradients = builder.emit_all(Op::Case { branches: tape.backward }, &operands).into_iter();
    std::iter::once(None)
        .chain(tape.gradients.iter().map(|exists| exists.then(|| gradients.next()).flatten()))
        .collect()
}

/// The outputs of a scan's body that have cotangents: the requested ones, and carries that a later step reads. Such a
/// carry counts even if it does not depend on a differentiated input, because the reverse scan must still carry the
/// cotangent of the initial carry back to the first step.
fn scan_cotangents(scan: &Scan, active: &[bool], wanted: &[bool]) -> Vec<bool> {
    let values = active_values(&scan.body, active);
    let mut outputs = wanted.to_vec();
    loop {
        let needs = needs_cotangent(&scan.body, &values, &outputs);
        let before = outputs.clone();
        let carries = scan.body.inputs()[scan.num_captured..].iter().take(scan.num_carry);
        for (wanted, input) in outputs.iter_mut().zip(carries) {
            *wanted |= needs[input.index()];
        }
        if outputs == before {
            return outputs;
        }
    }
}

fn constrain_stack(builder: &mut Graph, stack: ValueId, spec: Option<PartitionSpec>) -> ValueId {
    match spec {
        Some(spec) => builder.emit(Op::Constrain(spec.with_leading()), &[stack]),
        None => stack,
    }
}

fn forward_scan(
    builder: &mut Graph,
    scan: &Scan,
    operands: &[ValueId],
    active: &[bool],
    wanted: &[bool],
) -> Result<(Vec<ValueId>, Tape), AutodiffError> {
    let body_active = active_scan_inputs(scan, active);
    let cotangents = scan_cotangents(scan, &body_active, wanted);
    let cut_body = split_at_names(&scan.body, &scan.save);
    let joint = joint(cut_body.as_ref().unwrap_or(&scan.body), &body_active, &cotangents)?;
    let (captured, carry) = (scan.num_captured, scan.num_carry);
    let is_carry = |index: usize| (captured..captured + carry).contains(&index);
    let varying: Vec<bool> = (0..operands.len()).map(is_carry).collect();
    let cut = partition(&joint, operands.len(), &scan.save, &varying)?;
    let num_outputs = scan.body.outputs().len();

    // The forward scan also stacks the carries that the backward body reads, and the saved values.
    let mut forward = cut.forward;
    let kept_carries: Vec<usize> =
        (captured..captured + carry).filter(|index| cut.uses_inputs[*index]).collect();
    let mut outputs = forward.outputs().to_vec();
    let saved_outputs = outputs.split_off(num_outputs);
    for index in &kept_carries {
        let carry = forward.inputs()[*index];
        outputs.push(moved(&mut forward, carry, cut.inputs_in[*index]));
    }
    outputs.extend(&saved_outputs);
    let carry_specs: Vec<_> =
        kept_carries.iter().map(|index| placement(&forward, outputs[index - captured])).collect();
    let saved_specs: Vec<_> = saved_outputs.iter().map(|value| placement(&forward, *value)).collect();
    forward.set_outputs(outputs);
    let forward = Scan { body: Arc::new(cleaned(&forward)?), ..scan.clone() };
    let values = builder.emit_all(Op::Scan(forward), operands);
    let (carries, saved) = values[num_outputs..].split_at(kept_carries.len());
    let carries =
        carries.iter().zip(carry_specs).map(|(stack, spec)| constrain_stack(builder, *stack, spec)).collect();
    let saved =
        saved.iter().zip(saved_specs).map(|(stack, spec)| constrain_stack(builder, *stack, spec)).collect();
    let tape = ScanTape {
        scan: scan.clone(),
        backward: cut.backward,
        uses_inputs: cut.uses_inputs,
        operands: operands.to_vec(),
        carries,
        saved,
        cotangents,
        gradients: numbered(&joint.gradients),
    };
    Ok((values[..num_outputs].to_vec(), Tape::Scan(tape)))
}

/// Sums over steps are kept in `f32` at least.
fn accumulator(ty: &TensorType) -> TensorType {
    let is_narrow = ty.dtype.is_float() && ty.dtype.bits() < DType::F32.bits();
    let dtype = if is_narrow { DType::F32 } else { ty.dtype };
    TensorType::new(dtype, ty.dims.clone())
}

fn backward_scan(
    builder: &mut Graph,
    tape: ScanTape,
    cotangents: &[Option<ValueId>],
) -> Result<Vec<Option<ValueId>>, AutodiffError> {
    let scan = &tape.scan;
    let (captured, carry) = (scan.num_captured, scan.num_carry);
    let first_slice = captured + carry;
    let input_types = scan.body.input_types();
    let output_types = scan.body.output_types();
    let has_gradient = |index: usize| tape.gradients[index].is_some();

    // Operands of the reverse scan. Captured: the captured values that the body reads.
    let kept = |range: std::ops::Range<usize>| range.filter(|index| tape.uses_inputs[*index]);
    let captured_operands: Vec<ValueId> = kept(0..captured).map(|index| tape.operands[index]).collect();
    // Carry: cotangents of the carry, then running sums of the captured values' gradients.
    let carried: Vec<usize> = (0..carry).filter(|index| tape.cotangents[*index]).collect();
    let summed: Vec<usize> = (0..captured).filter(|index| has_gradient(*index)).collect();
    let mut carry_operands = Vec::new();
    for index in &carried {
        let zero = |builder: &mut Graph| builder.splat(output_types[*index].clone(), 0.0);
        carry_operands.push(cotangents[*index].unwrap_or_else(|| zero(builder)));
    }
    for index in &summed {
        carry_operands.push(builder.splat(accumulator(&input_types[*index]), 0.0));
    }
    // Slices: stacked carries, inputs, saved values, cotangents of the stacked outputs.
    let stacked_cotangents: Vec<usize> =
        (carry..output_types.len()).filter(|index| tape.cotangents[*index]).collect();
    let mut slice_operands = tape.carries.clone();
    slice_operands.extend(kept(first_slice..input_types.len()).map(|index| tape.operands[index]));
    slice_operands.extend(&tape.saved);
    for index in &stacked_cotangents {
        let ty = &output_types[*index];
        let stacked = TensorType::new(ty.dtype, [&[scan.length], ty.dims.as_slice()].concat());
        slice_operands.push(cotangents[*index].unwrap_or_else(|| builder.splat(stacked, 0.0)));
    }

    let mut body = Graph::new();
    let inner = |body: &mut Graph, values: &[ValueId]| -> Vec<ValueId> {
        values.iter().map(|value| body.input(builder.ty(*value).clone())).collect()
    };
    let inner_captured = inner(&mut body, &captured_operands);
    let inner_carry = inner(&mut body, &carry_operands);
    let inner_slices: Vec<ValueId> = slice_operands
        .iter()
        .map(|value| {
            let ty = builder.ty(*value);
            body.input(TensorType::new(ty.dtype, &ty.dims[1..]))
        })
        .collect();
    let (carry_cotangents, sums) = inner_carry.split_at(carried.len());
    let (state, ys) = inner_slices.split_at(inner_slices.len() - stacked_cotangents.len());
    // Inputs of the backward graph: captured values, carry, slices, saved values, cotangents in output order. The
    // stacked carries come first among the slices, so the inputs after the captured ones are already in that order.
    let arguments = [&inner_captured, state, carry_cotangents, ys].concat();
    let gradients = body.inline(&tape.backward, &arguments);
    let gradient = |index: usize| tape.gradients[index].map(|position| gradients[position]);
    let mut outputs = Vec::new();
    for index in &carried {
        let ty = output_types[*index].clone();
        outputs.push(gradient(captured + index).unwrap_or_else(|| body.splat(ty, 0.0)));
    }
    for (index, sum) in summed.iter().zip(sums) {
        let value = gradient(*index).expect("summed gradients exist");
        let value = body.convert(value, body.ty(*sum).dtype);
        outputs.push(body.add(*sum, value));
    }
    let sliced: Vec<usize> = (first_slice..input_types.len()).filter(|index| has_gradient(*index)).collect();
    let mut stack_specs = Vec::new();
    for index in &sliced {
        let value = gradient(*index).expect("these gradients exist");
        stack_specs.push(placement(&body, value));
        outputs.push(value);
    }
    body.set_outputs(outputs);
    let reverse = Scan {
        body: Arc::new(cleaned(&body)?),
        length: scan.length,
        reverse: !scan.reverse,
        num_captured: captured_operands.len(),
        num_carry: carry_operands.len(),
        save: scan.save.clone(),
    };
    let operands = [captured_operands, carry_operands, slice_operands].concat();
    let results = builder.emit_all(Op::Scan(reverse), &operands);

    let mut all = vec![None; tape.operands.len()];
    for (position, index) in carried.iter().enumerate() {
        all[captured + index] = Some(results[position]);
    }
    for (position, index) in summed.iter().enumerate() {
        let sum = results[carried.len() + position];
        all[*index] = Some(builder.convert(sum, input_types[*index].dtype));
    }
    for ((position, index), spec) in sliced.iter().enumerate().zip(stack_specs) {
        let stack = results[carried.len() + summed.len() + position];
        all[*index] = Some(constrain_stack(builder, stack, spec));
    }
    Ok(all)
}
