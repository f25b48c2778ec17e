//! Cuts a joint graph into a forward and a backward region.

use std::collections::BTreeMap;

use mt_ir::{Graph, Memory, Op, SavePolicy, ValueId, extract};

use crate::{AutodiffError, Joint, verified};

/// The two regions of a differentiated region.
pub(crate) struct Partition {
    /// Maps the region's inputs to its outputs, then the saved values, each in the memory that holds it.
    pub forward: Graph,
    /// Maps the region's inputs that `uses_inputs` marks, the saved values, and the cotangents of the outputs to the
    /// existing gradients, in order. Values in host memory are first transferred to the device.
    pub backward: Graph,
    /// The inputs of the backward region that the forward pass received in host memory and transferred itself.
    pub from_host: Vec<bool>,
    /// The region's inputs that the backward region reads.
    pub uses_inputs: Vec<bool>,
    pub num_saved: usize,
    /// For each input of the region, the memory from which the backward region takes it.
    pub inputs_in: Vec<Memory>,
}

/// Selects the saved values by `policy` and cuts. `varying` marks inputs whose dependents are worth saving. Values that
/// depend only on the other inputs (weights, masks, random bits) are recomputed, and those inputs stay where they are.
pub(crate) fn partition(
    joint: &Joint,
    num_inputs: usize,
    policy: &SavePolicy,
    varying: &[bool],
) -> Result<Partition, AutodiffError> {
    let graph = &joint.graph;
    let (inputs, cotangents) = graph.inputs().split_at(num_inputs);
    let outputs = &graph.outputs()[..joint.num_outputs];
    let gradients: Vec<ValueId> =
        joint.gradients.iter().flatten().map(|index| graph.outputs()[*index]).collect();
    let mut inputs_in = vec![Memory::Device; num_inputs];
    let mut candidates = Vec::new();
    let mut memories = Vec::new();
    match policy {
        SavePolicy::Names(names) => {
            for (value, memory) in named_values(graph, cotangents, names) {
                match inputs.iter().position(|input| *input == value) {
                    Some(index) if varying[index] => inputs_in[index] = memory,
                    Some(_) => {}
                    None => {
                        candidates.push(value);
                        memories.push(memory);
                    }
                }
            }
        }
        SavePolicy::Everything => {
            candidates = frontier(graph, inputs, cotangents, &gradients, varying);
            memories = vec![Memory::Device; candidates.len()];
        }
    }
    let all = [inputs, &candidates, cotangents].concat();
    let backward = extract(graph, &all, &gradients);
    let mut used = vec![false; backward.num_values()];
    for value in backward.nodes().iter().flat_map(|node| &node.operands).chain(backward.outputs()) {
        used[value.index()] = true;
    }
    let is_used: Vec<bool> = backward.inputs().iter().map(|input| used[input.index()]).collect();
    let uses_inputs = is_used[..inputs.len()].to_vec();
    let (saved, saved_in): (Vec<ValueId>, Vec<Memory>) = candidates
        .into_iter()
        .zip(memories)
        .zip(&is_used[inputs.len()..])
        .filter_map(|(value, used)| used.then_some(value))
        .unzip();
    let kept_inputs: Vec<ValueId> =
        inputs.iter().zip(&uses_inputs).filter(|(_, used)| **used).map(|(value, _)| *value).collect();
    let mut forward = extract(graph, inputs, &[outputs, &saved].concat());
    let mut results = forward.outputs().to_vec();
    for (result, memory) in results[outputs.len()..].iter_mut().zip(&saved_in) {
        *result = moved(&mut forward, *result, *memory);
    }
    forward.set_outputs(results);
    let backward = extract(graph, &[kept_inputs.as_slice(), &saved, cotangents].concat(), &gradients);
    let from_host = fetched_inputs(&backward);
    let kept_in = inputs_in.iter().zip(&uses_inputs).filter(|(_, used)| **used).map(|(memory, _)| *memory);
    let backward = fetched(backward, &kept_in.chain(saved_in).collect::<Vec<_>>());
    Ok(Partition {
        forward: verified("partition into a forward region", forward)?,
        backward: verified("partition into a backward region", backward)?,
        from_host,
        uses_inputs,
        num_saved: saved.len(),
        inputs_in,
    })
}

/// A value, transferred to the memory that holds it.
pub(crate) fn moved(graph: &mut Graph, value: ValueId, memory: Memory) -> ValueId {
    match memory {
        Memory::Device => value,
        Memory::Host => graph.emit(Op::Transfer(memory), &[value]),
    }
}

/// The inputs of a graph that it only transfers to the device.
fn fetched_inputs(graph: &Graph) -> Vec<bool> {
    let (mut fetched, mut read) = (vec![false; graph.num_values()], vec![false; graph.num_values()]);
    for node in graph.nodes() {
        let uses = if node.op == Op::Transfer(Memory::Device) { &mut fetched } else { &mut read };
        for operand in &node.operands {
            uses[operand.index()] = true;
        }
    }
    for output in graph.outputs() {
        read[output.index()] = true;
    }
    graph.inputs().iter().map(|input| fetched[input.index()] && !read[input.index()]).collect()
}

/// A graph whose leading inputs are in the given memories instead of device memory.
fn fetched(graph: Graph, memories: &[Memory]) -> Graph {
    if memories.iter().all(|memory| *memory == Memory::Device) {
        return graph;
    }
    let mut result = Graph::new();
    let mut arguments: Vec<ValueId> = graph.input_types().into_iter().map(|ty| result.input(ty)).collect();
    for (argument, _) in arguments.iter_mut().zip(memories).filter(|(_, memory)| **memory == Memory::Host) {
        *argument = result.emit(Op::Transfer(Memory::Device), &[*argument]);
    }
    let outputs = result.inline(&graph, &arguments);
    result.set_outputs(outputs);
    result
}

/// For each value, whether it depends on one of `sources`.
fn depends_on(graph: &Graph, sources: impl IntoIterator<Item = ValueId>) -> Vec<bool> {
    let mut depends = vec![false; graph.num_values()];
    for source in sources {
        depends[source.index()] = true;
    }
    for node in graph.nodes() {
        if node.operands.iter().any(|operand| depends[operand.index()]) {
            for result in &node.results {
                depends[result.index()] = true;
            }
        }
    }
    depends
}

/// The values with one of the names. Rules read the result of the named operation, not that of naming it. A value that
/// is only a view of one already found is not added.
fn named_values(
    graph: &Graph,
    cotangents: &[ValueId],
    names: &BTreeMap<String, Memory>,
) -> Vec<(ValueId, Memory)> {
    let is_backward = depends_on(graph, cotangents.iter().copied());
    let producers = graph.producers();
    let mut values: Vec<(ValueId, Memory)> = Vec::new();
    for node in graph.nodes() {
        let Op::Name(name) = &node.op else { continue };
        let Some(memory) = names.get(&**name) else { continue };
        let value = node.operands[0];
        let mut view = Some(value);
        while let Some(known) = view
            && !values.iter().any(|(value, _)| *value == known)
        {
            view = producers[known.index()]
                .map(|index| &graph.nodes()[index])
                .filter(|node| is_view(&node.op))
                .map(|node| node.operands[0]);
        }
        if view.is_none() && !is_backward[value.index()] {
            values.push((value, *memory));
        }
    }
    values
}

/// Whether an operation only copies, moves or selects elements of its operand.
pub(crate) fn is_view(op: &Op) -> bool {
    is_copy(op) || matches!(op, Op::Constrain(_) | Op::Slice { .. } | Op::Transpose { .. })
}

/// Whether an operation copies its operand unchanged.
fn is_copy(op: &Op) -> bool {
    matches!(op, Op::Name(_) | Op::StopGradient | Op::Transfer(_) | Op::Broadcast { .. } | Op::Reshape { .. })
}

/// The forward values that backward nodes read, except those that are cheap to recompute.
fn frontier(
    graph: &Graph,
    inputs: &[ValueId],
    cotangents: &[ValueId],
    gradients: &[ValueId],
    varying: &[bool],
) -> Vec<ValueId> {
    let is_backward = depends_on(graph, cotangents.iter().copied());
    let sources = inputs.iter().zip(varying).filter(|(_, varying)| **varying).map(|(input, _)| *input);
    let worth_saving = depends_on(graph, sources);
    let producers = graph.producers();
    // A value that was copied unchanged is saved once, as the original.
    let origin = |mut value: ValueId| loop {
        let Some(index) = producers[value.index()] else { return value };
        let node = &graph.nodes()[index];
        if !is_copy(&node.op) {
            return value;
        }
        value = node.operands[0];
    };
    let mut live = vec![false; graph.num_values()];
    for gradient in gradients {
        live[gradient.index()] = true;
    }
    let mut saved = Vec::new();
    let mut seen = vec![false; graph.num_values()];
    let mut consider = |value: ValueId| {
        let value = origin(value);
        let is_input = producers[value.index()].is_none();
        if !is_input && worth_saving[value.index()] && !seen[value.index()] {
            seen[value.index()] = true;
            saved.push(value);
        }
    };
    for node in graph.nodes().iter().rev() {
        let needed = node.results.iter().any(|result| live[result.index()]);
        if !needed || !node.results.iter().any(|result| is_backward[result.index()]) {
            continue;
        }
        for operand in &node.operands {
            live[operand.index()] = true;
            if !is_backward[operand.index()] {
                consider(*operand);
            }
        }
    }
    // A gradient may itself be a forward value.
    for gradient in gradients.iter().filter(|gradient| !is_backward[gradient.index()]) {
        consider(*gradient);
    }
    saved.sort_unstable();
    saved
}

/// The sharding constraint on a value, if there is one.
pub(crate) fn placement(graph: &Graph, value: ValueId) -> Option<mt_shape::PartitionSpec> {
    let producers = graph.producers();
    let mut value = value;
    loop {
        let node = &graph.nodes()[producers[value.index()]?];
        match &node.op {
            Op::Constrain(spec) => return Some(spec.clone()),
            Op::Name(_) | Op::StopGradient | Op::Transfer(_) => value = node.operands[0],
            _ => return None,
        }
    }
}
