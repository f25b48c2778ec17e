//! Activity analysis: which values need differentiation.

use mt_ir::{Graph, Node, Op};

/// For each value: whether it is a float that depends on a differentiated input.
pub(crate) fn active_values(graph: &Graph, inputs: &[bool]) -> Vec<bool> {
    let mut active = vec![false; graph.num_values()];
    for (input, wanted) in graph.inputs().iter().zip(inputs) {
        active[input.index()] = *wanted && graph.ty(*input).dtype.is_float();
    }
    for node in graph.nodes() {
        let operands: Vec<bool> = node.operands.iter().map(|operand| active[operand.index()]).collect();
        for (result, result_active) in node.results.iter().zip(active_results(node, &operands)) {
            active[result.index()] = result_active && graph.ty(*result).dtype.is_float();
        }
    }
    active
}

fn active_results(node: &Node, operands: &[bool]) -> Vec<bool> {
    let through = |graph: &Graph, inputs: &[bool]| -> Vec<bool> {
        let active = active_values(graph, inputs);
        graph.outputs().iter().map(|output| active[output.index()]).collect()
    };
    let any = operands.contains(&true);
    if !any {
        return vec![false; node.results.len()];
    }
    match &node.op {
        Op::StopGradient | Op::RandomBits { .. } => vec![false; node.results.len()],
        Op::Scan(scan) => through(&scan.body, &active_scan_inputs(scan, operands)),
        Op::Remat(remat) => through(&remat.body, operands),
        Op::Case { branches } => {
            let each: Vec<Vec<bool>> =
                branches.iter().map(|branch| through(branch, &operands[1..])).collect();
            (0..node.results.len()).map(|index| each.iter().any(|active| active[index])).collect()
        }
        // Each result of a barrier or a sort follows its own operand.
        Op::OptimizationBarrier | Op::Sort { .. } => operands.to_vec(),
        Op::CustomVjp(op) => {
            let differentiable =
                operands.iter().zip(&op.differentiable).any(|(active, marked)| *active && *marked);
            vec![differentiable; node.results.len()]
        }
        _ => vec![true; node.results.len()],
    }
}

/// The active inputs of a scan's body: a carry is active once any step makes it so.
pub(crate) fn active_scan_inputs(scan: &mt_ir::Scan, operands: &[bool]) -> Vec<bool> {
    let mut inputs = operands.to_vec();
    loop {
        let active = active_values(&scan.body, &inputs);
        let before = inputs.clone();
        for index in 0..scan.num_carry {
            inputs[scan.num_captured + index] |= active[scan.body.outputs()[index].index()];
        }
        if inputs == before {
            return inputs;
        }
    }
}

/// For each value: whether it is active and an output with a cotangent depends on it.
pub(crate) fn needs_cotangent(graph: &Graph, active: &[bool], outputs: &[bool]) -> Vec<bool> {
    let mut needs = vec![false; graph.num_values()];
    for (output, wanted) in graph.outputs().iter().zip(outputs) {
        needs[output.index()] |= *wanted && active[output.index()];
    }
    for node in graph.nodes().iter().rev() {
        if node.results.iter().any(|result| needs[result.index()]) {
            for operand in &node.operands {
                needs[operand.index()] |= active[operand.index()];
            }
        }
    }
    needs
}
