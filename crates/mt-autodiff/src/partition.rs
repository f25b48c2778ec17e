//! Cuts a joint graph into a forward and a backward region.

use mt_ir::{Graph, Op, SavePolicy, ValueId, extract};

use crate::{AutodiffError, Joint, verified};

/// The two regions of a differentiated region.
pub(crate) struct Partition {
    /// From the region's inputs to its outputs, then the saved values.
    pub forward: Graph,
    /// From the region's inputs that `uses_inputs` marks, the saved values, and the cotangents of the outputs, to the
    /// gradients that exist, in order.
    pub backward: Graph,
    /// Which of the region's inputs the backward region reads.
    pub uses_inputs: Vec<bool>,
    /// The number of saved values.
    pub num_saved: usize,
}

/// Chooses what to save by `policy` and cuts. Inputs that `varying` marks are those whose consequences are worth
/// saving: what follows from the others alone (weights, masks, random bits) is computed again.
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
    let candidates = match policy {
        SavePolicy::Names(names) => named_values(graph, cotangents, |name| names.contains(name)),
        SavePolicy::Everything => frontier(graph, inputs, cotangents, &gradients, varying),
    };
    let all = [inputs, &candidates, cotangents].concat();
    let backward = extract(graph, &all, &gradients);
    let mut used = vec![false; backward.num_values()];
    for value in backward.nodes().iter().flat_map(|node| &node.operands).chain(backward.outputs()) {
        used[value.index()] = true;
    }
    let is_used: Vec<bool> = backward.inputs().iter().map(|input| used[input.index()]).collect();
    let uses_inputs = is_used[..inputs.len()].to_vec();
    let saved: Vec<ValueId> = candidates
        .iter()
        .zip(&is_used[inputs.len()..])
        .filter(|(_, used)| **used)
        .map(|(value, _)| *value)
        .collect();
    let kept_inputs: Vec<ValueId> =
        inputs.iter().zip(&uses_inputs).filter(|(_, used)| **used).map(|(value, _)| *value).collect();
    let forward = extract(graph, inputs, &[outputs, &saved].concat());
    let backward = extract(graph, &[kept_inputs.as_slice(), &saved, cotangents].concat(), &gradients);
    Ok(Partition {
        forward: verified("partition into a forward region", forward)?,
        backward: verified("partition into a backward region", backward)?,
        uses_inputs,
        num_saved: saved.len(),
    })
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

/// The values that are given names, or what they name if that is computed: rules read the operation's own result.
fn named_values(graph: &Graph, cotangents: &[ValueId], wanted: impl Fn(&str) -> bool) -> Vec<ValueId> {
    let is_backward = depends_on(graph, cotangents.iter().copied());
    let producers = graph.producers();
    let mut values = Vec::new();
    for node in graph.nodes() {
        let value = node.operands.first();
        if let (Op::Name(name), Some(value)) = (&node.op, value)
            && wanted(name)
            && producers[value.index()].is_some()
            && !is_backward[value.index()]
            && !values.contains(value)
        {
            values.push(*value);
        }
    }
    values
}

/// The forward values that backward nodes read, less those that are cheap to compute again.
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
    // What is copied without being changed is saved once, as what it was copied from.
    let origin = |mut value: ValueId| loop {
        let Some(index) = producers[value.index()] else { return value };
        let node = &graph.nodes()[index];
        match node.op {
            Op::Name(_) | Op::StopGradient | Op::Broadcast { .. } | Op::Reshape { .. } => {
                value = node.operands[0]
            }
            _ => return value,
        }
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
    // A gradient may be a forward value itself.
    for gradient in gradients.iter().filter(|gradient| !is_backward[gradient.index()]) {
        consider(*gradient);
    }
    saved.sort_unstable();
    saved
}

/// The placement that the code gives a value, if it constrains it.
pub(crate) fn placement(graph: &Graph, value: ValueId) -> Option<mt_shape::PartitionSpec> {
    let producers = graph.producers();
    let mut value = value;
    loop {
        let node = &graph.nodes()[producers[value.index()]?];
        match &node.op {
            Op::Constrain(spec) => return Some(spec.clone()),
            Op::Name(_) | Op::StopGradient => value = node.operands[0],
            _ => return None,
        }
    }
}
