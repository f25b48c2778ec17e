//! Transforms keep graphs well formed and what they compute; the verifier finds graphs that are not.

#![forbid(unsafe_code)]

use std::{collections::HashMap, sync::Arc};

use mt_ir::{
    Binary, Comparison, Graph, Literal, Op, Reduction, Remat, SavePolicy, Scan, ShapeError, TensorType,
    Unary, ValueId, VerifyError, While, eliminate_dead_code, extract, verify,
};
use mt_shape::DType;
use proptest::prelude::*;

const SCALAR: TensorType = TensorType { dtype: DType::F64, dims: Vec::new() };

/// Runs a graph of `f64` scalars and stacks of them: enough of the operations for these tests.
fn run(graph: &Graph, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut values: HashMap<ValueId, Vec<f64>> =
        graph.inputs().iter().copied().zip(inputs.iter().cloned()).collect();
    for node in graph.nodes() {
        let operands: Vec<Vec<f64>> = node.operands.iter().map(|operand| values[operand].clone()).collect();
        let results = match &node.op {
            Op::Constant(Literal::Splat { value, .. }) => vec![vec![match value {
                mt_ir::Scalar::Float(value) => *value,
                mt_ir::Scalar::Int(value) => *value as f64,
                mt_ir::Scalar::Bool(value) => f64::from(u8::from(*value)),
            }]],
            Op::Unary(Unary::Sin) => vec![operands[0].iter().map(|x| x.sin()).collect()],
            Op::Unary(_) => vec![operands[0].iter().map(|x| -x).collect()],
            Op::Binary(Binary::Add) => vec![zip(&operands, |x, y| x + y)],
            Op::Binary(_) => vec![zip(&operands, |x, y| x * y)],
            Op::Compare(_) => vec![zip(&operands, |x, y| f64::from(u8::from(x < y)))],
            Op::Reduce { .. } => vec![vec![operands[0].iter().sum()]],
            Op::Name(_) | Op::OptimizationBarrier => operands,
            Op::Remat(remat) => run(&remat.body, &operands),
            Op::Case { branches } => {
                run(&branches[(operands[0][0] as usize).min(branches.len() - 1)], &operands[1..])
            }
            Op::Scan(scan) => run_scan(scan, &operands),
            Op::While(op) => {
                let (captured, carry) = operands.split_at(op.num_captured);
                let mut carry = carry.to_vec();
                while run(&op.condition, &[captured, &carry].concat())[0][0] != 0.0 {
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

fn zip(operands: &[Vec<f64>], function: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    operands[0].iter().zip(&operands[1]).map(|(x, y)| function(*x, *y)).collect()
}

fn run_scan(scan: &Scan, operands: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (captured, rest) = operands.split_at(scan.num_captured);
    let (carry, inputs) = rest.split_at(scan.num_carry);
    let mut carry = carry.to_vec();
    let mut stacks = vec![vec![0.0; scan.length]; scan.body.outputs().len() - scan.num_carry];
    for step in 0..scan.length {
        let at = if scan.reverse { scan.length - 1 - step } else { step };
        let slices: Vec<Vec<f64>> = inputs.iter().map(|input| vec![input[at]]).collect();
        let outputs = run(&scan.body, &[captured, &carry, &slices].concat());
        carry = outputs[..scan.num_carry].to_vec();
        for (stack, piece) in stacks.iter_mut().zip(&outputs[scan.num_carry..]) {
            stack[at] = piece[0];
        }
    }
    carry.into_iter().chain(stacks).collect()
}

/// What the next node of a random graph is: a kind, and numbers that choose operands.
type Choice = (u8, usize, usize, usize);

fn body(choices: &[Choice], num_inputs: usize, num_outputs: usize, depth: usize) -> Arc<Graph> {
    let mut graph = Graph::new();
    let inputs: Vec<ValueId> = (0..num_inputs).map(|_| graph.input(SCALAR)).collect();
    let values = grow(&mut graph, inputs, choices, depth);
    // The latest values, and others: so that some outputs depend on little.
    let outputs =
        (0..num_outputs).map(|index| values[(values.len() - 1).wrapping_sub(index * 3) % values.len()]);
    let outputs = outputs.collect();
    graph.set_outputs(outputs);
    Arc::new(graph)
}

/// Adds random nodes; returns all scalars there are.
fn grow(graph: &mut Graph, mut values: Vec<ValueId>, choices: &[Choice], depth: usize) -> Vec<ValueId> {
    for (index, (kind, a, b, c)) in choices.iter().enumerate() {
        let pick = |number: usize| values[number % values.len()];
        let (x, y, z) = (pick(*a), pick(*b), pick(*c));
        let inner = &choices[..index.min(4)];
        let results = match kind % if depth > 0 { 11 } else { 5 } {
            0 => vec![graph.unary(Unary::Sin, x)],
            1 => vec![graph.add(x, y)],
            2 => vec![graph.multiply(x, y)],
            3 => vec![graph.splat(SCALAR, 0.5)],
            4 => graph.emit_all(Op::OptimizationBarrier, &[x, y, z]),
            5 => {
                let op = Remat { body: body(inner, 3, 2, depth - 1), save: SavePolicy::Everything };
                graph.emit_all(Op::Remat(op), &[x, y, z])
            }
            6 => {
                let branches =
                    vec![body(inner, 2, 2, depth - 1), body(&choices[index / 2..index], 2, 2, depth - 1)];
                let chosen = graph.splat(TensorType::scalar(DType::I32), (a % 3) as f64);
                graph.emit_all(Op::Case { branches }, &[chosen, x, y])
            }
            7 | 8 => {
                // One captured value, two carries, no slices; one stack, which is summed.
                let scan = Scan {
                    body: body(inner, 3, 3, depth - 1),
                    length: 3,
                    reverse: kind % 2 == 0,
                    num_captured: 1,
                    num_carry: 2,
                    save: SavePolicy::Everything,
                };
                let mut results = graph.emit_all(Op::Scan(scan), &[x, y, z]);
                let stack = results.pop().expect("a scan with a stack");
                results.push(graph.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![0] }, &[stack]));
                results
            }
            9 => {
                // A first scan makes stacks, a second one slices them.
                let make = Scan {
                    body: body(inner, 1, 3, depth - 1),
                    length: 2,
                    reverse: false,
                    num_captured: 0,
                    num_carry: 1,
                    save: SavePolicy::Everything,
                };
                let made = graph.emit_all(Op::Scan(make), &[x]);
                let read = Scan {
                    body: body(inner, 4, 2, depth - 1),
                    length: 2,
                    reverse: true,
                    num_captured: 0,
                    num_carry: 2,
                    save: SavePolicy::Everything,
                };
                graph.emit_all(Op::Scan(read), &[y, z, made[1], made[2]])
            }
            _ => graph.emit_all(Op::While(counting(inner, depth)), &[x, y, z]),
        };
        values.extend(results);
    }
    values
}

/// A loop that runs three times: captures a value, and carries a counter and another value.
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
    let one = step.splat(SCALAR, 1.0);
    // Whatever the counter starts from, it grows.
    let sine = step.unary(Unary::Sin, inputs[1]);
    let squared = step.multiply(sine, sine);
    let grown = step.add(inputs[1], one);
    let count = step.add(grown, squared);
    step.set_outputs(vec![count, next]);
    While { condition: Arc::new(condition), body: Arc::new(step), num_captured: 1 }
}

fn graph(choices: &[Choice], outputs: &[usize]) -> Graph {
    let mut graph = Graph::new();
    let inputs = (0..3).map(|_| graph.input(SCALAR)).collect();
    let values = grow(&mut graph, inputs, choices, 2);
    graph.set_outputs(outputs.iter().map(|output| values[output % values.len()]).collect());
    graph
}

fn choices() -> impl Strategy<Value = Vec<Choice>> {
    prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>(), any::<usize>()), 1..14)
}

fn outputs() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 1..4)
}

/// Equal bits, with NaN equal to itself.
fn bits(values: &[Vec<f64>]) -> Vec<Vec<u64>> {
    values.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

const INPUTS: [f64; 3] = [0.7, -1.3, 2.1];

fn inputs() -> Vec<Vec<f64>> {
    INPUTS.iter().map(|value| vec![*value]).collect()
}

/// The number of nodes, regions included.
fn size(graph: &Graph) -> usize {
    let inner = |node: &mt_ir::Node| node.op.regions().iter().map(|region| size(region)).sum::<usize>();
    graph.nodes().iter().map(|node| 1 + inner(node)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dead_code_elimination_keeps_values(choices in choices(), outputs in outputs()) {
        let graph = graph(&choices, &outputs);
        prop_assert_eq!(verify(&graph), Ok(()));
        let cleaned = eliminate_dead_code(&graph);
        prop_assert_eq!(verify(&cleaned), Ok(()));
        prop_assert_eq!(cleaned.input_types(), graph.input_types());
        prop_assert!(size(&cleaned) <= size(&graph));
        prop_assert_eq!(bits(&run(&cleaned, &inputs())), bits(&run(&graph, &inputs())));
        // Once is enough.
        let again = eliminate_dead_code(&cleaned);
        prop_assert_eq!(size(&again), size(&cleaned));
    }

    /// Cut in two at any values, the parts compute together what the whole does.
    #[test]
    fn extraction_keeps_values(choices in choices(), outputs in outputs(), cut in outputs()) {
        let graph = graph(&choices, &outputs);
        let produced: Vec<ValueId> = graph.nodes().iter().flat_map(|node| node.results.clone()).collect();
        let scalars: Vec<ValueId> = produced.into_iter().filter(|value| *graph.ty(*value) == SCALAR).collect();
        prop_assume!(!scalars.is_empty());
        let mut cut: Vec<ValueId> = cut.iter().map(|index| scalars[index % scalars.len()]).collect();
        cut.sort_unstable();
        cut.dedup();
        let first = extract(&graph, graph.inputs(), &cut);
        let second = extract(&graph, &[graph.inputs(), &cut].concat(), graph.outputs());
        prop_assert_eq!(verify(&first), Ok(()));
        prop_assert_eq!(verify(&second), Ok(()));
        let middle = run(&first, &inputs());
        let actual = run(&second, &[inputs(), middle].concat());
        prop_assert_eq!(bits(&actual), bits(&run(&graph, &inputs())));
    }

    #[test]
    fn inlining_keeps_values(choices in choices(), outputs in outputs()) {
        let inner = graph(&choices, &outputs);
        let mut outer = Graph::new();
        let arguments: Vec<ValueId> = (0..3).map(|_| outer.input(SCALAR)).collect();
        let results = outer.inline(&inner, &arguments);
        outer.set_outputs(results);
        prop_assert_eq!(verify(&outer), Ok(()));
        prop_assert_eq!(bits(&run(&outer, &inputs())), bits(&run(&inner, &inputs())));
    }
}

#[test]
fn operands_that_do_not_fit_are_not_added() {
    let mut graph = Graph::new();
    let x = graph.input(SCALAR);
    let y = graph.input(TensorType::new(DType::F64, [2]));
    let error = graph.push(Op::Binary(Binary::Add), &[x, y]).unwrap_err();
    let expected =
        ShapeError::OperandType { operand: 1, expected: SCALAR, actual: TensorType::new(DType::F64, [2]) };
    assert_eq!(error, expected);
    assert!(graph.nodes().is_empty());
}

#[test]
fn the_verifier_finds_undefined_values() {
    let mut graph = Graph::new();
    let x = graph.input(SCALAR);
    let y = graph.unary(Unary::Sin, x);
    let z = graph.add(y, x);
    graph.set_outputs(vec![z]);
    assert_eq!(verify(&graph), Ok(()));

    // Copied with a map that is wrong, the sum reads its own result.
    let mut wrong = Graph::new();
    let first = wrong.input(SCALAR);
    let mut map = HashMap::from([(x, first)]);
    wrong.copy_node(&graph, &graph.nodes()[0], &mut map);
    map.insert(y, z);
    wrong.copy_node(&graph, &graph.nodes()[1], &mut map);
    let error = verify(&wrong).unwrap_err();
    assert!(matches!(error, VerifyError::UseBeforeDefinition { op: "stablehlo.add", .. }), "{error}");
}

#[test]
fn the_verifier_finds_wrong_types() {
    let mut wide = Graph::new();
    let x = wide.input(TensorType::new(DType::F64, [2]));
    wide.unary(Unary::Sin, x);
    let mut graph = Graph::new();
    let y = graph.input(SCALAR);
    // The copied result keeps the type it had.
    graph.copy_node(&wide, &wide.nodes()[0].clone(), &mut HashMap::from([(x, y)]));
    let error = verify(&graph).unwrap_err();
    assert!(matches!(error, VerifyError::ResultTypes { op: "stablehlo.sine", .. }), "{error}");

    let mut sum = Graph::new();
    let (a, b) = (sum.input(SCALAR), sum.input(SCALAR));
    sum.add(a, b);
    let mut graph = Graph::new();
    let y = graph.input(SCALAR);
    let z = graph.input(TensorType::new(DType::F64, [2]));
    graph.copy_node(&sum, &sum.nodes()[0].clone(), &mut HashMap::from([(a, y), (b, z)]));
    let error = verify(&graph).unwrap_err();
    assert!(matches!(error, VerifyError::Shape { op: "stablehlo.add", .. }), "{error}");
    assert!(error.to_string().contains("operand 1 has type `float64[2]`, expected `float64[]`"), "{error}");
}

#[test]
fn the_verifier_looks_into_regions() {
    let mut wide = Graph::new();
    let x = wide.input(TensorType::new(DType::F64, [2]));
    wide.unary(Unary::Sin, x);
    let mut body = Graph::new();
    let y = body.input(SCALAR);
    body.copy_node(&wide, &wide.nodes()[0].clone(), &mut HashMap::from([(x, y)]));
    body.set_outputs(vec![y]);
    let mut graph = Graph::new();
    let z = graph.input(SCALAR);
    let op = Op::Remat(Remat { body: Arc::new(body), save: SavePolicy::Everything });
    let result = graph.emit(op, &[z]);
    graph.set_outputs(vec![result]);
    let error = verify(&graph).unwrap_err();
    assert!(matches!(error, VerifyError::ResultTypes { op: "stablehlo.sine", .. }), "{error}");
}

#[test]
fn unused_parts_of_regions_go() {
    let mut body = Graph::new();
    // Captured: used and unused. Carry: needed, dead, and one that only the dead one reads.
    let inputs: Vec<ValueId> = (0..6).map(|_| body.input(SCALAR)).collect();
    let needed = body.multiply(inputs[2], inputs[0]);
    let helped = body.add(inputs[3], inputs[4]);
    let dead = body.add(helped, inputs[1]);
    let helper = body.unary(Unary::Sin, inputs[4]);
    let kept = body.add(needed, inputs[5]);
    let unused = body.unary(Unary::Sin, helper);
    body.set_outputs(vec![needed, dead, helper, kept, unused]);
    let mut graph = Graph::new();
    let stacked = TensorType::new(DType::F64, [3]);
    let mut operands: Vec<ValueId> = (0..5).map(|_| graph.input(SCALAR)).collect();
    operands.push(graph.input(stacked));
    let scan = Scan {
        body: Arc::new(body),
        length: 3,
        reverse: false,
        num_captured: 2,
        num_carry: 3,
        save: SavePolicy::Everything,
    };
    let results = graph.emit_all(Op::Scan(scan), &operands);
    graph.set_outputs(vec![results[3]]);
    let cleaned = eliminate_dead_code(&graph);
    assert_eq!(verify(&cleaned), Ok(()));
    assert_eq!(cleaned.inputs().len(), 6);
    let node = &cleaned.nodes()[0];
    let Op::Scan(scan) = &node.op else { panic!("the scan stays") };
    let sizes =
        (scan.num_captured, scan.num_carry, node.operands.len(), node.results.len(), scan.body.nodes().len());
    assert_eq!(sizes, (1, 1, 3, 2, 2));
}
