//! Extracting subgraphs and eliminating dead code.

use std::{collections::HashMap, sync::Arc};

use crate::{Graph, Kernel, ManualComputation, Node, Op, Scan, ValueId, While};

/// The subgraph of `graph` that computes `outputs` from `inputs`, which may be any of its values.
///
/// # Panics
/// An output depends on an input of `graph` that is not among `inputs`.
pub fn extract(graph: &Graph, inputs: &[ValueId], outputs: &[ValueId]) -> Graph {
    let mut needed = vec![false; graph.num_values()];
    let mut given = vec![false; graph.num_values()];
    for input in inputs {
        given[input.index()] = true;
    }
    for output in outputs {
        needed[output.index()] = true;
    }
    let mut kept = vec![false; graph.nodes().len()];
    for (index, node) in graph.nodes().iter().enumerate().rev() {
        kept[index] = node.results.iter().any(|result| needed[result.index()] && !given[result.index()]);
        if kept[index] {
            for operand in &node.operands {
                needed[operand.index()] = true;
            }
        }
    }
    let mut result = Graph::new();
    let mut map: HashMap<ValueId, ValueId> =
        inputs.iter().map(|value| (*value, result.input(graph.ty(*value).clone()))).collect();
    for (_, node) in graph.nodes().iter().enumerate().filter(|(index, _)| kept[*index]) {
        let before: Vec<(ValueId, ValueId)> =
            node.results.iter().filter_map(|value| map.get(value).map(|given| (*value, *given))).collect();
        result.copy_node(graph, node, &mut map);
        // A result that was given as an input stays that input.
        map.extend(before);
    }
    let outputs =
        outputs.iter().map(|value| *map.get(value).expect("outputs follow from the inputs")).collect();
    result.set_outputs(outputs);
    result
}

/// Drops nodes, and results and operands of regions, on which no output depends. Keeps all inputs.
pub fn eliminate_dead_code(graph: &Graph) -> Graph {
    let mut needed = vec![false; graph.num_values()];
    for output in graph.outputs() {
        needed[output.index()] = true;
    }
    // Backwards, so that the used results of a region are known before the region is cleaned.
    let mut kept: Vec<Node> = Vec::new();
    for node in graph.nodes().iter().rev() {
        let used: Vec<bool> = node.results.iter().map(|result| needed[result.index()]).collect();
        if used.contains(&true) {
            let node = clean_node(node, &used);
            for operand in &node.operands {
                needed[operand.index()] = true;
            }
            kept.push(node);
        }
    }
    let mut result = Graph::new();
    let mut map: HashMap<ValueId, ValueId> =
        graph.inputs().iter().map(|value| (*value, result.input(graph.ty(*value).clone()))).collect();
    for node in kept.iter().rev() {
        result.copy_node(graph, node, &mut map);
    }
    result.set_outputs(graph.outputs().iter().map(|value| map[value]).collect());
    result
}

fn pick<T: Clone>(items: &[T], keep: &[bool]) -> Vec<T> {
    items.iter().zip(keep).filter(|(_, keep)| **keep).map(|(item, _)| item.clone()).collect()
}

/// The region with only the marked outputs, and which of its inputs it then reads.
fn narrowed(region: &Graph, keep_outputs: &[bool]) -> (Graph, Vec<bool>) {
    let cleaned =
        eliminate_dead_code(&extract(region, region.inputs(), &pick(region.outputs(), keep_outputs)));
    let mut used = vec![false; cleaned.num_values()];
    for value in cleaned.nodes().iter().flat_map(|node| &node.operands).chain(cleaned.outputs()) {
        used[value.index()] = true;
    }
    let uses = cleaned.inputs().iter().map(|input| used[input.index()]).collect();
    (cleaned, uses)
}

fn with_inputs(region: &Graph, keep: &[bool]) -> Arc<Graph> {
    Arc::new(extract(region, &pick(region.inputs(), keep), region.outputs()))
}

fn clean_node(node: &Node, used: &[bool]) -> Node {
    match &node.op {
        Op::Scan(scan) => clean_scan(node, scan, used),
        Op::While(op) => clean_while(node, op, used),
        Op::Remat(remat) => {
            let (body, inputs) = narrowed(&remat.body, used);
            let mut remat = remat.clone();
            remat.body = with_inputs(&body, &inputs);
            Node {
                op: Op::Remat(remat),
                operands: pick(&node.operands, &inputs),
                results: pick(&node.results, used),
                scope: node.scope.clone(),
            }
        }
        Op::Case { branches } => {
            let narrow: Vec<(Graph, Vec<bool>)> =
                branches.iter().map(|branch| narrowed(branch, used)).collect();
            let inputs: Vec<bool> = (0..branches[0].inputs().len())
                .map(|index| narrow.iter().any(|(_, uses)| uses[index]))
                .collect();
            let branches = narrow.iter().map(|(branch, _)| with_inputs(branch, &inputs)).collect();
            let operands =
                std::iter::once(node.operands[0]).chain(pick(&node.operands[1..], &inputs)).collect();
            Node {
                op: Op::Case { branches },
                operands,
                results: pick(&node.results, used),
                scope: node.scope.clone(),
            }
        }
        Op::ManualComputation(op) => {
            let (body, inputs) = narrowed(&op.body, used);
            let op = ManualComputation {
                body: with_inputs(&body, &inputs),
                manual_axes: op.manual_axes.clone(),
                input_specs: pick(&op.input_specs, &inputs),
                output_specs: pick(&op.output_specs, used),
            };
            Node {
                op: Op::ManualComputation(op),
                operands: pick(&node.operands, &inputs),
                results: pick(&node.results, used),
                scope: node.scope.clone(),
            }
        }
        Op::CustomVjp(op) => {
            let mut op = (**op).clone();
            op.primal = Arc::new(eliminate_dead_code(&op.primal));
            op.forward = Arc::new(eliminate_dead_code(&op.forward));
            op.backward = Arc::new(eliminate_dead_code(&op.backward));
            Node { op: Op::CustomVjp(Arc::new(op)), ..node.clone() }
        }
        Op::Kernel(op) => {
            let body = Arc::new(eliminate_dead_code(&op.body));
            Node { op: Op::Kernel(Kernel { body, ..op.clone() }), ..node.clone() }
        }
        Op::OptimizationBarrier => Node {
            op: Op::OptimizationBarrier,
            operands: pick(&node.operands, used),
            results: pick(&node.results, used),
            scope: node.scope.clone(),
        },
        _ => node.clone(),
    }
}

/// The needed carries: those whose final value is used, and those on which needed outputs depend.
fn needed_carries(
    body: &Graph,
    num_captured: usize,
    mut keep: Vec<bool>,
    num_carry: usize,
) -> (Graph, Vec<bool>, Vec<bool>) {
    loop {
        let (cleaned, inputs) = narrowed(body, &keep);
        let mut grown = false;
        for index in 0..num_carry {
            if inputs[num_captured + index] && !keep[index] {
                keep[index] = true;
                grown = true;
            }
        }
        if !grown {
            return (cleaned, inputs, keep);
        }
    }
}

fn clean_scan(node: &Node, scan: &Scan, used: &[bool]) -> Node {
    let (captured, carry) = (scan.num_captured, scan.num_carry);
    let (cleaned, mut inputs, keep) = needed_carries(&scan.body, captured, used.to_vec(), carry);
    // A kept carry is an input even if the body does not read it.
    inputs[captured..captured + carry].copy_from_slice(&keep[..carry]);
    let count = |flags: &[bool]| flags.iter().filter(|flag| **flag).count();
    let scan = Scan {
        body: with_inputs(&cleaned, &inputs),
        num_captured: count(&inputs[..captured]),
        num_carry: count(&keep[..carry]),
        ..scan.clone()
    };
    Node {
        op: Op::Scan(scan),
        operands: pick(&node.operands, &inputs),
        results: pick(&node.results, &keep),
        scope: node.scope.clone(),
    }
}

fn clean_while(node: &Node, op: &While, used: &[bool]) -> Node {
    let captured = op.num_captured;
    let (condition, condition_uses) = narrowed(&op.condition, &[true]);
    let wanted: Vec<bool> =
        used.iter().zip(&condition_uses[captured..]).map(|(used, read)| *used || *read).collect();
    let (body, mut inputs, keep) = needed_carries(&op.body, captured, wanted, used.len());
    for index in 0..captured {
        inputs[index] |= condition_uses[index];
    }
    inputs[captured..].copy_from_slice(&keep);
    let op = While {
        condition: with_inputs(&condition, &inputs),
        body: with_inputs(&body, &inputs),
        num_captured: inputs[..captured].iter().filter(|flag| **flag).count(),
        trips: op.trips,
    };
    Node {
        op: Op::While(op),
        operands: pick(&node.operands, &inputs),
        results: pick(&node.results, &keep),
        scope: node.scope.clone(),
    }
}
