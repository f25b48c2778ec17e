//! The printed precision of products.

#![forbid(unsafe_code)]

#[path = "support/printing.rs"]
mod support;

use mt_ir::{CpuKernels, Dot, Graph, Op, Precision, Reduction, Target, TensorType};
use mt_shape::{DType, Mesh};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

fn printed(graph: &Graph, target: Target, precision: Precision) -> String {
    support::printed(graph, Mesh::single(), target, precision)
}

/// Products of the same left operand, one for each precision.
fn products(dtype: DType, rows: usize, precisions: &[Precision]) -> Graph {
    let mut graph = Graph::new();
    let lhs = graph.input(TensorType::new(dtype, [rows, 64]));
    let multiply = |precision: &Precision| {
        let rhs = graph.input(TensorType::new(dtype, [64, 256]));
        let dot = Dot {
            lhs_batch: Vec::new(),
            rhs_batch: Vec::new(),
            lhs_contract: vec![1],
            rhs_contract: vec![0],
            result: dtype,
            precision: *precision,
            may_round: false,
        };
        graph.emit(Op::Dot(dot), &[lhs, rhs])
    };
    let results = precisions.iter().map(multiply).collect();
    graph.set_outputs(results);
    graph
}

/// Checks the printed product of this type and precision: StableHLO's precision, and the kernel's arithmetic.
#[track_caller]
fn check(dtype: DType, own: Precision, option: Precision, stablehlo: &str, arithmetic: usize) {
    let graph = products(dtype, 32, &[own]);
    let config =
        format!("precision_config = [#stablehlo<precision {stablehlo}>, #stablehlo<precision {stablehlo}>]");
    for target in [Target::Tpu, Target::CPU] {
        let text = printed(&graph, target, option);
        assert!(text.contains(&config), "{target:?}, not `{config}`:\n{text}");
    }
    let text = printed(&graph, KERNELS, option);
    let attribute = format!("arithmetic = {arithmetic} : i64");
    assert!(text.contains(&attribute), "not `{attribute}`:\n{text}");
}

#[test]
fn products_without_a_precision_have_that_of_the_program() {
    use Precision::{Default, High, Highest};
    check(DType::F32, Default, Default, "DEFAULT", 0);
    check(DType::F32, Default, High, "HIGH", 2);
    check(DType::F32, Default, Highest, "HIGHEST", 0);
    // A product's own precision counts before the program's.
    check(DType::F32, High, Default, "HIGH", 2);
    check(DType::F32, High, Highest, "HIGH", 2);
    check(DType::F32, Highest, High, "HIGHEST", 0);
    // Products of `bf16` are exact.
    for option in [Default, High, Highest] {
        check(DType::BF16, Default, option, "DEFAULT", 1);
    }
}

#[test]
fn a_call_has_products_of_one_precision() {
    let check = |precisions: &[Precision], option: Precision, num_calls: usize| {
        let text = printed(&products(DType::F32, 4, precisions), KERNELS, option);
        assert_eq!(text.matches("maxtext.dot").count(), num_calls, "{precisions:?}, {option:?}:\n{text}");
    };
    use Precision::{Default, High, Highest};
    check(&[Default, Default, Default], High, 1);
    check(&[Default, High], High, 1);
    check(&[Default, High, Default], Default, 2);
    check(&[Default, Highest], High, 2);
}

#[test]
fn sums_of_kernels_keep_f32() {
    let mut graph = Graph::new();
    let input = graph.input(TensorType::new(DType::F32, [300, 65]));
    let sum = graph.emit(Op::Reduce { kind: Reduction::Sum, dimensions: vec![0] }, &[input]);
    graph.set_outputs(vec![sum]);
    let text = printed(&graph, KERNELS, Precision::High);
    assert!(text.contains("arithmetic = 0 : i64"), "{text}");
}
