//! Cuts per-device code at the tensors that a policy keeps.
//!
//! Regions see per-device code as one operation, so a name inside it would keep nothing. Cut in two, the named tensors are
//! results of the first operation, which can be kept, and the backward pass recomputes the first one without them.

use std::{collections::HashMap, sync::Arc};

use mt_ir::{Graph, ManualComputation, Node, Op, SavePolicy, ValueId, extract};
use mt_shape::PartitionSpec;

use crate::{
    manual::{all_axes, over},
    partition::is_view,
};

/// The graph with its per-device code cut at the tensors that the policy keeps; `None` if there are none.
pub(crate) fn split_at_names(graph: &Graph, policy: &SavePolicy) -> Option<Graph> {
    let is_cut = |node: &Node| match &node.op {
        Op::ManualComputation(op) => !first_names(&op.body, policy).is_empty(),
        _ => false,
    };
    if !graph.nodes().iter().any(is_cut) {
        return None;
    }
    let mut result = Graph::new();
    let mut map: HashMap<ValueId, ValueId> =
        graph.inputs().iter().map(|input| (*input, result.input(graph.ty(*input).clone()))).collect();
    for node in graph.nodes() {
        match &node.op {
            Op::ManualComputation(op) => {
                result.set_scope(node.scope.clone());
                let operands: Vec<ValueId> = node.operands.iter().map(|operand| map[operand]).collect();
                let values = emit_split(&mut result, op, &operands, policy);
                map.extend(node.results.iter().copied().zip(values));
            }
            _ => result.copy_node(graph, node, &mut map),
        }
    }
    result.set_outputs(graph.outputs().iter().map(|output| map[output]).collect());
    Some(result)
}

/// The named tensors that the policy keeps and that depend on no other ones, with their names. The result of naming is
/// the second value.
fn first_names(body: &Graph, policy: &SavePolicy) -> Vec<(ValueId, ValueId, Arc<str>)> {
    let SavePolicy::Names(names) = policy else { return Vec::new() };
    let producers = body.producers();
    let mut depends = vec![false; body.num_values()];
    let mut found = Vec::new();
    for node in body.nodes() {
        let mut is_behind = node.operands.iter().any(|operand| depends[operand.index()]);
        if let Op::Name(name) = &node.op
            && names.contains_key(&**name)
            && producers[node.operands[0].index()].is_some()
        {
            if !is_behind {
                found.push((node.operands[0], node.results[0], name.clone()));
            }
            is_behind = true;
        }
        for result in &node.results {
            depends[result.index()] = is_behind;
        }
    }
    found
}

/// Emits per-device code, cut at each level of named tensors, and returns its results.
fn emit_split(
    builder: &mut Graph,
    op: &ManualComputation,
    operands: &[ValueId],
    policy: &SavePolicy,
) -> Vec<ValueId> {
    let body = &op.body;
    let named = first_names(body, policy);
    if named.is_empty() {
        return builder.emit_all(Op::ManualComputation(op.clone()), operands);
    }
    let cut = Cut::new(body, &named);
    let spec = |value: &ValueId| over(&all_axes(op), body.ty(*value).dims.len() + 1);
    let specs: Vec<PartitionSpec> = cut.crossing.iter().map(spec).collect();
    let first =
        ManualComputation { body: Arc::new(cut.first(body)), output_specs: specs.clone(), ..op.clone() };
    let mut crossing = builder.emit_all(Op::ManualComputation(first), operands);
    for (value, (outer, spec)) in cut.crossing.iter().zip(crossing.iter_mut().zip(&specs)) {
        if let Some((.., name)) = named.iter().find(|(known, ..)| known == value) {
            let placed = builder.emit(Op::Constrain(spec.clone()), &[*outer]);
            *outer = builder.emit(Op::Name(name.clone()), &[placed]);
        }
    }
    let second = ManualComputation {
        body: Arc::new(cut.second(body, &named)),
        input_specs: [op.input_specs.as_slice(), &specs].concat(),
        ..op.clone()
    };
    emit_split(builder, &second, &[operands, &crossing].concat(), policy)
}

/// A cut of a body into two.
struct Cut {
    /// The nodes that the named tensors depend on.
    in_first: Vec<bool>,
    /// The nodes that cost nothing, so that both sides may have them.
    is_free: Vec<bool>,
    /// The values of the first side that the second one reads.
    crossing: Vec<ValueId>,
}

impl Cut {
    fn new(body: &Graph, named: &[(ValueId, ValueId, Arc<str>)]) -> Self {
        let mut needed = vec![false; body.num_values()];
        for (value, ..) in named {
            needed[value.index()] = true;
        }
        let mut in_first = vec![false; body.nodes().len()];
        for (index, node) in body.nodes().iter().enumerate().rev() {
            in_first[index] = node.results.iter().any(|result| needed[result.index()]);
            if in_first[index] {
                for operand in &node.operands {
                    needed[operand.index()] = true;
                }
            }
        }
        let mut at_hand = vec![false; body.num_values()];
        for input in body.inputs() {
            at_hand[input.index()] = true;
        }
        let mut is_free = Vec::new();
        let mut made_first = vec![false; body.num_values()];
        for (node, in_first) in body.nodes().iter().zip(&in_first) {
            let is_cheap = node.operands.is_empty() || is_view(&node.op);
            let free = is_cheap && node.operands.iter().all(|operand| at_hand[operand.index()]);
            is_free.push(free);
            for result in &node.results {
                at_hand[result.index()] = free;
                made_first[result.index()] = *in_first && !free;
            }
        }
        let names: Vec<ValueId> = named.iter().map(|(_, result, _)| *result).collect();
        let mut crossing = Vec::new();
        let mut read = |value: ValueId| {
            if made_first[value.index()] && !crossing.contains(&value) {
                crossing.push(value);
            }
        };
        for (index, node) in body.nodes().iter().enumerate() {
            if !in_first[index] || node.results.iter().any(|result| names.contains(result)) {
                node.operands.iter().for_each(|operand| read(*operand));
            }
        }
        body.outputs().iter().for_each(|output| read(*output));
        Self { in_first, is_free, crossing }
    }

    /// The first side: from the inputs of the body to the crossing values, with a leading axis over the devices.
    fn first(&self, body: &Graph) -> Graph {
        let mut first = extract(body, body.inputs(), &self.crossing);
        let mut outputs = first.outputs().to_vec();
        for output in &mut outputs {
            let dims = [&[1], first.ty(*output).dims.as_slice()].concat();
            *output = first.reshape(*output, &dims);
        }
        first.set_outputs(outputs);
        first
    }

    /// The second side: from the inputs of the body and the crossing values to the outputs of the body.
    fn second(&self, body: &Graph, named: &[(ValueId, ValueId, Arc<str>)]) -> Graph {
        let mut second = Graph::new();
        let mut map: HashMap<ValueId, ValueId> =
            body.inputs().iter().map(|input| (*input, second.input(body.ty(*input).clone()))).collect();
        let mut given = Vec::new();
        for value in &self.crossing {
            let mut ty = body.ty(*value).clone();
            ty.dims.insert(0, 1);
            given.push(second.input(ty));
        }
        for (value, given) in self.crossing.iter().zip(given) {
            let dims = body.ty(*value).dims.clone();
            map.insert(*value, second.reshape(given, &dims));
        }
        for (index, node) in body.nodes().iter().enumerate() {
            if let Some((value, result, _)) =
                named.iter().find(|(_, result, _)| node.results.contains(result))
            {
                map.insert(*result, map[value]);
            } else if !self.in_first[index] || self.is_free[index] {
                second.copy_node(body, node, &mut map);
            }
        }
        second.set_outputs(body.outputs().iter().map(|output| map[output]).collect());
        second
    }
}
