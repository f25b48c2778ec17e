//! Random graphs of `f64` scalars, and an interpreter that also computes forward-mode derivatives.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mt_ir::{
    Binary, Comparison, CustomVjp, Graph, Literal, Memory, Op, Reduction, Remat, SavePolicy, Scalar, Scan,
    TensorType, Unary, ValueId, While,
};
use mt_shape::DType;
use proptest::prelude::*;

/// The type of most values.
pub const SCALAR: TensorType = TensorType { dtype: DType::F64, dims: Vec::new() };

/// A number with its derivative along some direction of the inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dual {
    pub value: f64,
    pub tangent: f64,
}

/// A number that does not depend on the inputs.
pub fn constant(value: f64) -> Dual {
    Dual { value, tangent: 0.0 }
}

fn unary(unary: Unary, x: Dual) -> Dual {
    let (value, slope) = match unary {
        Unary::Sin => (x.value.sin(), x.value.cos()),
        Unary::Cos => (x.value.cos(), -x.value.sin()),
        Unary::Negate => (-x.value, -1.0),
        unary => panic!("`{}` is not in these tests", unary.mnemonic()),
    };
    Dual { value, tangent: slope * x.tangent }
}

fn binary(binary: Binary, x: Dual, y: Dual) -> Dual {
    match binary {
        Binary::Add => Dual { value: x.value + y.value, tangent: x.tangent + y.tangent },
        Binary::Multiply => {
            Dual { value: x.value * y.value, tangent: x.tangent * y.value + x.value * y.tangent }
        }
        binary => panic!("`{}` is not in these tests", binary.mnemonic()),
    }
}

/// Runs a graph; values are row-major elements.
pub fn run(graph: &Graph, inputs: &[Vec<Dual>]) -> Vec<Vec<Dual>> {
    let mut values: HashMap<ValueId, Vec<Dual>> =
        graph.inputs().iter().copied().zip(inputs.iter().cloned()).collect();
    for node in graph.nodes() {
        let operands: Vec<Vec<Dual>> = node.operands.iter().map(|operand| values[operand].clone()).collect();
        let size = node.results.first().map_or(0, |result| graph.ty(*result).num_elements());
        let results = match &node.op {
            Op::Constant(Literal::Splat { value, .. }) => vec![vec![
                constant(match value {
                    Scalar::Float(value) => *value,
                    Scalar::Int(value) => *value as f64,
                    Scalar::Bool(value) => f64::from(u8::from(*value)),
                });
                size
            ]],
            Op::Unary(op) => vec![operands[0].iter().map(|x| unary(*op, *x)).collect()],
            Op::Binary(op) => {
                vec![operands[0].iter().zip(&operands[1]).map(|(x, y)| binary(*op, *x, *y)).collect()]
            }
            Op::Compare(Comparison::Less) => {
                vec![vec![constant(f64::from(u8::from(operands[0][0].value < operands[1][0].value)))]]
            }
            Op::Reduce { kind: Reduction::Sum, .. } => {
                assert_eq!(size, 1, "these tests sum all elements");
                let sum = operands[0].iter().fold(constant(0.0), |sum, next| binary(Binary::Add, sum, *next));
                vec![vec![sum]]
            }
            Op::Broadcast { .. } => vec![vec![operands[0][0]; size]],
            Op::StopGradient => vec![operands[0].iter().map(|x| constant(x.value)).collect()],
            Op::Name(_) | Op::Transfer(_) | Op::OptimizationBarrier | Op::Reshape { .. } => operands,
            Op::Remat(remat) => run(&remat.body, &operands),
            Op::CustomVjp(op) => run(&op.primal, &operands),
            Op::Kernel(op) => run(&op.body, &operands),
            Op::Case { branches } => {
                run(&branches[(operands[0][0].value as usize).min(branches.len() - 1)], &operands[1..])
            }
            Op::Scan(scan) => run_scan(scan, &operands),
            Op::While(op) => {
                let (captured, carry) = operands.split_at(op.num_captured);
                let mut carry = carry.to_vec();
                while run(&op.condition, &[captured, &carry].concat())[0][0].value != 0.0 {
                    carry = run(&op.body, &[captured, &carry].concat());
                }
                carry
            }
            op => panic!("`{}` is not in these tests", op.name()),
        };
        values.extend(node.results.iter().copied().zip(results));
    }
    graph.outputs().iter().map(|output| values[output].clone()).collect()
}

fn run_scan(scan: &Scan, operands: &[Vec<Dual>]) -> Vec<Vec<Dual>> {
    let (captured, rest) = operands.split_at(scan.num_captured);
    let (carry, inputs) = rest.split_at(scan.num_carry);
    let mut carry = carry.to_vec();
    let mut stacks: Vec<Vec<Vec<Dual>>> =
        vec![vec![Vec::new(); scan.length]; scan.body.outputs().len() - scan.num_carry];
    for step in 0..scan.length {
        let at = if scan.reverse { scan.length - 1 - step } else { step };
        let slice =
            |input: &Vec<Dual>| input.chunks(input.len() / scan.length).nth(at).expect("a slice").to_vec();
        let slices: Vec<Vec<Dual>> = inputs.iter().map(slice).collect();
        let outputs = run(&scan.body, &[captured, &carry, &slices].concat());
        carry = outputs[..scan.num_carry].to_vec();
        for (stack, piece) in stacks.iter_mut().zip(&outputs[scan.num_carry..]) {
            stack[at].clone_from(piece);
        }
    }
    carry.into_iter().chain(stacks.into_iter().map(|stack| stack.concat())).collect()
}

/// The kind of the next node of a random graph, and numbers that choose its operands.
pub type Choice = (u8, usize, usize, usize);

/// Random choices for the nodes of a graph.
pub fn choices() -> impl Strategy<Value = Vec<Choice>> {
    prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>(), any::<usize>()), 1..14)
}

/// Random numbers that choose outputs.
pub fn outputs() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 1..4)
}

/// The graph of three scalars that the choices describe.
pub fn graph(choices: &[Choice], outputs: &[usize]) -> Graph {
    let mut graph = Graph::new();
    let inputs = (0..3).map(|_| graph.input(SCALAR)).collect();
    let values = grow(&mut graph, inputs, choices, 2);
    graph.set_outputs(outputs.iter().map(|output| values[output % values.len()]).collect());
    graph
}

fn policy(number: usize) -> SavePolicy {
    let kept = |memory| SavePolicy::Names(BTreeMap::from([("kept".to_owned(), memory)]));
    match number % 4 {
        0 => SavePolicy::Everything,
        1 => SavePolicy::Names(BTreeMap::new()),
        2 => kept(Memory::Device),
        _ => kept(Memory::Host),
    }
}

fn body(choices: &[Choice], num_inputs: usize, num_outputs: usize, depth: usize) -> Arc<Graph> {
    let mut graph = Graph::new();
    let inputs: Vec<ValueId> = (0..num_inputs).map(|_| graph.input(SCALAR)).collect();
    let values = grow(&mut graph, inputs, choices, depth);
    // The latest value, and others, some of which depend on little.
    let last = values.len() - 1;
    graph.set_outputs((0..num_outputs).map(|index| values[(last + index * last) % values.len()]).collect());
    Arc::new(graph)
}

fn scan(body: Arc<Graph>, length: usize, [num_captured, num_carry]: [usize; 2], number: usize) -> Op {
    let (reverse, save) = (number.is_multiple_of(2), policy(number / 2));
    Op::Scan(Scan { body, length, reverse, num_captured, num_carry, save })
}

/// Adds random nodes; returns all scalars.
fn grow(graph: &mut Graph, mut values: Vec<ValueId>, choices: &[Choice], depth: usize) -> Vec<ValueId> {
    for (index, (kind, a, b, c)) in choices.iter().enumerate() {
        let pick = |number: usize| values[number % values.len()];
        let (x, y, z) = (pick(*a), pick(*b), pick(*c));
        let inner = &choices[..index.min(4)];
        let results = match kind % if depth > 0 { 14 } else { 7 } {
            0 => vec![graph.unary(Unary::Sin, x)],
            1 => vec![graph.add(x, y)],
            2 => vec![graph.multiply(x, y)],
            3 => vec![graph.splat(SCALAR, 0.5)],
            4 => graph.emit_all(Op::OptimizationBarrier, &[x, y, z]),
            5 => {
                let sine = graph.unary(Unary::Sin, x);
                vec![graph.emit(Op::Name("kept".into()), &[sine])]
            }
            6 => vec![graph.emit(Op::StopGradient, &[x]), graph.unary(Unary::Cos, y)],
            7 => {
                let op = Remat { body: body(inner, 3, 2, depth - 1), save: policy(a / 7) };
                graph.emit_all(Op::Remat(op), &[x, y, z])
            }
            8 => {
                let branches =
                    vec![body(inner, 2, 2, depth - 1), body(&choices[index / 2..index], 2, 2, depth - 1)];
                let chosen = graph.splat(TensorType::scalar(DType::I32), (a % 3) as f64);
                graph.emit_all(Op::Case { branches }, &[chosen, x, y])
            }
            9 | 10 => {
                // One captured value, two carries, no slices; one stack, which is summed.
                let op = scan(body(inner, 3, 3, depth - 1), 3, [1, 2], a / 7);
                let mut results = graph.emit_all(op, &[x, y, z]);
                let stack = results.pop().expect("a scan with a stack");
                results.push(graph.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![0] }, &[stack]));
                results
            }
            11 => {
                // A first scan makes stacks, a second one slices them.
                let made = graph.emit_all(scan(body(inner, 1, 3, depth - 1), 2, [0, 1], b / 7), &[x]);
                let read = scan(body(inner, 4, 2, depth - 1), 2, [0, 2], a / 7);
                graph.emit_all(read, &[y, z, made[1], made[2]])
            }
            12 => {
                // Loops have no gradient, so their operands stop gradients.
                let operands = [x, y, z].map(|value| graph.emit(Op::StopGradient, &[value]));
                graph.emit_all(Op::While(counting(inner, depth)), &operands)
            }
            _ => graph.emit_all(Op::CustomVjp(Arc::new(product())), &[x, y]),
        };
        values.extend(results);
    }
    values
}

/// A loop that runs up to three times: captures a value, and carries a counter and another value.
fn counting(choices: &[Choice], depth: usize) -> While {
    let mut condition = Graph::new();
    let [_, count, _] = [SCALAR; 3].map(|ty| condition.input(ty));
    let limit = condition.splat(SCALAR, 3.0);
    let proceed = condition.emit(Op::Compare(Comparison::Less), &[count, limit]);
    condition.set_outputs(vec![proceed]);
    let inner = body(choices, 3, 1, depth - 1);
    let mut step = Graph::new();
    let inputs = [SCALAR; 3].map(|ty| step.input(ty));
    let next = step.inline(&inner, &inputs)[0];
    // From any start, the counter reaches the limit in a few steps.
    let zero = step.splat(SCALAR, 0.0);
    let limit = step.splat(SCALAR, 3.0);
    let nothing = step.multiply(inputs[2], zero);
    let count = step.add(nothing, limit);
    step.set_outputs(vec![count, next]);
    While { condition: Arc::new(condition), body: Arc::new(step), num_captured: 1, trips: None }
}

/// `x·sin(y)` and `x`, with their true derivative given by hand.
fn product() -> CustomVjp {
    let build = |num_inputs: usize, code: &dyn Fn(&mut Graph, &[ValueId]) -> Vec<ValueId>| {
        let mut graph = Graph::new();
        let inputs: Vec<ValueId> = (0..num_inputs).map(|_| graph.input(SCALAR)).collect();
        let outputs = code(&mut graph, &inputs);
        graph.set_outputs(outputs);
        Arc::new(graph)
    };
    let values = |graph: &mut Graph, inputs: &[ValueId]| -> Vec<ValueId> {
        let sine = graph.unary(Unary::Sin, inputs[1]);
        vec![graph.multiply(inputs[0], sine), inputs[0]]
    };
    CustomVjp {
        name: "product".to_owned(),
        primal: build(2, &values),
        forward: build(2, &|graph, inputs| [values(graph, inputs), inputs.to_vec()].concat()),
        backward: build(4, &|graph, inputs| {
            let [x, y, g, h] = [0, 1, 2, 3].map(|index: usize| inputs[index]);
            let (sine, cosine) = (graph.unary(Unary::Sin, y), graph.unary(Unary::Cos, y));
            let by_product = graph.multiply(g, sine);
            let scaled = graph.multiply(g, x);
            vec![graph.add(by_product, h), graph.multiply(scaled, cosine)]
        }),
        differentiable: vec![true, true],
    }
}
