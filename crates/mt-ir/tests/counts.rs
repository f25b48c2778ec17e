//! Counts of small graphs, computed by hand.

#![forbid(unsafe_code)]

use std::{collections::BTreeMap, sync::Arc};

use mt_ir::{
    Binary, Comparison, Counts, Dot, Graph, ManualComputation, Op, Precision, Reduction, Remat, SavePolicy,
    Scan, TensorType, Unary, ValueId, While,
};
use mt_shape::{DType, PartitionSpec};

fn f32(dims: &[usize]) -> TensorType {
    TensorType::new(DType::F32, dims)
}

/// A graph of one value in one type.
fn graph(ty: TensorType, code: impl FnOnce(&mut Graph, ValueId) -> Vec<ValueId>) -> Graph {
    let mut graph = Graph::new();
    let input = graph.input(ty);
    let outputs = code(&mut graph, input);
    graph.set_outputs(outputs);
    graph
}

fn dot(batch: usize, result: DType) -> Op {
    let dimensions: Vec<usize> = (0..batch).collect();
    Op::Dot(Dot {
        lhs_batch: dimensions.clone(),
        rhs_batch: dimensions,
        lhs_contract: vec![batch + 1],
        rhs_contract: vec![batch],
        result,
        precision: Precision::Default,
        may_round: false,
    })
}

/// The square of a 4×4 matrix: 2 · 4³ operations.
fn square(graph: &mut Graph, matrix: ValueId) -> ValueId {
    graph.emit(dot(0, DType::F32), &[matrix, matrix])
}

#[track_caller]
fn check(graph: &Graph, products: &[(DType, f64)], others: f64) {
    let counts = Counts::of(graph);
    assert_eq!(counts.products, BTreeMap::from_iter(products.iter().copied()));
    assert_eq!(counts.others, others);
    assert!(!counts.is_at_least);
}

#[test]
fn products_count_two_for_each_pair() {
    let mut graph = Graph::new();
    let lhs = graph.input(TensorType::new(DType::BF16, [5, 7, 3]));
    let rhs = graph.input(TensorType::new(DType::BF16, [5, 3, 11]));
    let product = graph.emit(dot(1, DType::F32), &[lhs, rhs]);
    graph.set_outputs(vec![product]);
    check(&graph, &[(DType::BF16, 2.0 * 5.0 * 7.0 * 3.0 * 11.0)], 0.0);
    let counts = Counts::of(&graph);
    assert_eq!(counts.argument_bytes, 2.0 * (5.0 * 7.0 * 3.0 + 5.0 * 3.0 * 11.0));
    assert_eq!(counts.result_bytes, 4.0 * 5.0 * 7.0 * 11.0);
}

#[test]
fn elements_count_once() {
    let graph = graph(f32(&[6, 8]), |graph, x| {
        let exp = graph.unary(Unary::Exp, x);
        let sum = graph.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![1] }, &[exp]);
        let half = graph.convert(sum, DType::BF16);
        let sorted = graph.emit(Op::Sort { dimension: 1, descending: false }, &[x]);
        let moved = graph.emit(Op::Transpose { permutation: vec![1, 0] }, &[sorted]);
        vec![half, moved]
    });
    // Sorting eight numbers takes three comparisons of each.
    check(&graph, &[], 48.0 + (48.0 - 6.0) + 6.0 + 48.0 * 3.0);
}

#[test]
fn bodies_count_as_often_as_they_run() {
    let matrix = f32(&[4, 4]);
    let once = 2.0 * 64.0;
    let body = Arc::new(graph(matrix.clone(), |graph, x| vec![square(graph, x)]));
    let scan = Op::Scan(Scan {
        body: body.clone(),
        length: 9,
        reverse: false,
        num_captured: 0,
        num_carry: 1,
        save: SavePolicy::Everything,
    });
    let scanned = graph(matrix.clone(), |graph, x| vec![graph.emit(scan.clone(), &[x])]);
    check(&scanned, &[(DType::F32, 9.0 * once)], 0.0);
    // In a remat region inside per-device code for one of six devices.
    let remat = Op::Remat(Remat { body: Arc::new(scanned), save: SavePolicy::Everything });
    let local = graph(matrix.clone(), |graph, x| vec![graph.emit(remat, &[x])]);
    let everywhere = || PartitionSpec(vec![vec![], vec![]]);
    let manual = Op::ManualComputation(ManualComputation {
        body: Arc::new(local),
        manual_axes: vec![("data".to_owned(), 2), ("fsdp".to_owned(), 3)],
        input_specs: vec![everywhere()],
        output_specs: vec![everywhere()],
    });
    let whole = graph(matrix, |graph, x| vec![graph.emit(manual, &[x])]);
    check(&whole, &[(DType::F32, 6.0 * 9.0 * once)], 0.0);
}

/// A loop that squares a matrix until a sum is large.
fn growing(trips: Option<f64>) -> Graph {
    let matrix = f32(&[4, 4]);
    let condition = graph(matrix.clone(), |graph, x| {
        let sum = graph.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![0, 1] }, &[x]);
        let limit = graph.splat_like(sum, 10.0);
        vec![graph.emit(Op::Compare(Comparison::Less), &[sum, limit])]
    });
    let body = graph(matrix.clone(), |graph, x| vec![square(graph, x)]);
    let op = While { condition: Arc::new(condition), body: Arc::new(body), num_captured: 0, trips };
    graph(matrix, |graph, x| vec![graph.emit(Op::While(op), &[x])])
}

#[test]
fn loops_count_as_often_as_their_maker_says() {
    check(&growing(Some(2.5)), &[(DType::F32, 2.5 * 128.0)], 3.5 * 16.0);
    let unknown = Counts::of(&growing(None));
    assert!(unknown.is_at_least);
    assert_eq!(unknown.all_products(), 128.0);
}

#[test]
fn of_branches_the_largest_counts() {
    let matrix = f32(&[4, 4]);
    let cheap = Arc::new(graph(matrix.clone(), |graph, x| vec![graph.binary(Binary::Add, x, x)]));
    let dear = Arc::new(graph(matrix.clone(), |graph, x| vec![square(graph, x)]));
    let mut whole = Graph::new();
    let (index, x) = (whole.input(TensorType::scalar(DType::I32)), whole.input(matrix));
    let chosen = whole.emit(Op::Case { branches: vec![cheap.clone(), dear, cheap] }, &[index, x]);
    whole.set_outputs(vec![chosen]);
    check(&whole, &[(DType::F32, 128.0)], 0.0);
}
