//! Dot products.

use mt_ir::{Dot, Op, Precision};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::harness::{Case, any, assert_close, case, check, check_narrow, evaluate, given};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 2);
const C: Axis = axis("c", 4);
const D: Axis = axis("d", 5);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

fn matrix_product(x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let element = |row: usize, column: usize| (0..4).map(|k| x[0][row * 4 + k] * x[1][k * 5 + column]).sum();
    vec![(0..15).map(|index| element(index / 5, index % 5)).collect()]
}

/// A dot by positions: batch, then contracted dimensions, of the left and of the right side.
fn positional<'t>(lhs: Tensor<'t>, rhs: Tensor<'t>, numbers: [&[usize]; 4], axes: &[Axis]) -> Tensor<'t> {
    let [lhs_batch, rhs_batch, lhs_contract, rhs_contract] = numbers.map(<[usize]>::to_vec);
    let (result, precision) = (lhs.dtype(), Precision::Highest);
    lhs.apply_one(
        Op::Dot(Dot {
            lhs_batch,
            rhs_batch,
            lhs_contract,
            rhs_contract,
            result,
            precision,
            may_round: false,
        }),
        &[rhs],
        axes,
    )
}

fn cases() -> Vec<Case> {
    vec![
        case("matrices", vec![any(&[A, C]), any(&[C, D])], |_, x| vec![x[1].dot(x[0], &["c"])])
            .like(matrix_product),
        case("contract_first", vec![any(&[C, A]), any(&[C, D])], |_, x| vec![x[0].contract(x[1], &["c"])]),
        case("contract_last", vec![any(&[A, C]), any(&[D, C])], |_, x| vec![x[0].contract(x[1], &["c"])]),
        case("two", vec![any(&[A, C, D]), any(&[C, D, B])], |_, x| vec![x[0].contract(x[1], &["c", "d"])]),
        case("two_crossed", vec![any(&[C, A, D]), any(&[D, B, C])], |_, x| {
            vec![x[0].contract(x[1], &["c", "d"]), x[0].contract(x[1], &["d", "c"])]
        }),
        case("batch", vec![any(&[B, A, C]), any(&[B, C, D])], |_, x| vec![x[0].contract(x[1], &["c"])]),
        case("batch_last", vec![any(&[A, C, B]), any(&[C, B, D])], |_, x| vec![x[0].contract(x[1], &["c"])]),
        case("two_batches", vec![any(&[A, B, C]), any(&[B, C, A, D])], |_, x| {
            vec![x[0].contract(x[1], &["c"])]
        }),
        case("crossed_batches", vec![any(&[A, C, B]), any(&[D, B, A])], |_, x| {
            vec![positional(x[0], x[1], [&[2, 0], &[1, 2], &[], &[]], &[B, A, C, D])]
        }),
        case("crossed_both", vec![any(&[C, A, D, B]), any(&[D, B, C, A, ONE])], |_, x| {
            vec![positional(x[0], x[1], [&[3, 1], &[1, 3], &[2, 0], &[0, 2]], &[B, A, ONE])]
        }),
        case("outer", vec![any(&[A]), any(&[D])], |_, x| vec![x[0].contract(x[1], &[])]),
        case("inner", vec![any(&[A, C]), any(&[C, A])], |_, x| vec![x[0].contract(x[1], &["c", "a"])]),
        case("scalar", vec![any(&[]), any(&[D])], |_, x| vec![x[0].contract(x[1], &[])]),
        case("elementwise", vec![any(&[A, C]), any(&[C, A])], |_, x| vec![x[0].contract(x[1], &[])]),
        case("one", vec![any(&[ONE, C]), any(&[C, ONE])], |_, x| {
            vec![x[0].rename("one", "other").contract(x[1], &["c"])]
        }),
        case("none", vec![any(&[A, NONE]), any(&[NONE, D])], |_, x| vec![x[0].contract(x[1], &["none"])])
            .like(|_| vec![vec![0.0; 15]]),
        case("none_free", vec![any(&[NONE, C]), any(&[C, D])], |_, x| vec![x[0].contract(x[1], &["c"])])
            .like(|_| vec![vec![]]),
        case("same", vec![any(&[A, C])], |_, x| vec![x[0].contract(x[0].rename("a", "other"), &["c"])]),
    ]
}

#[test]
fn dots() {
    let cases = cases();
    check("dots", &cases);
    check_narrow("dots", &cases, DType::F32, 1e-5);
    check_narrow("dots", &cases, DType::BF16, 3e-2);
    check_narrow("dots", &cases, DType::F16, 4e-3);
}

/// The gradient of a weight that was narrowed for its dot has the weight's own type and is not rounded.
#[test]
fn weight_gradients_are_wide() {
    // Two activations that `bf16` represents exactly, but whose sum it does not.
    let activation = given(&[axis("batch", 2), ONE], &[256.0, 1.0]);
    let mut weight = given(&[ONE], &[0.5]);
    weight.dtype = DType::F32;
    let mixed = case("mixed", vec![activation, weight], |_, x| {
        let narrow = x[1].cast(DType::BF16).named("weight");
        let product = narrow.contract(x[0].cast(DType::BF16), &["one"]);
        let direct = x[1].cast(DType::BF16).dot(x[0].cast(DType::BF16), &["one"]);
        // Cotangents of one, for any weights of the check.
        let ones = direct.cast(DType::F64).sum_all() / x[0].region().full(DType::F64, &[], 1.0_f64.cos());
        vec![ones, product.stop_gradient()]
    });
    let evaluated = evaluate("mixed", &[mixed]);
    assert_eq!(evaluated[0].gradients[1].dtype(), DType::F32);
    assert_close("weight gradient", &evaluated[0].gradients[1], &[257.0], 1e-7);
}

/// A narrow dot may return a wide result.
#[test]
fn wide_results() {
    let wide = case("wide", vec![given(&[B], &[256.0, 1.0]), given(&[B], &[1.0, 1.0])], |_, x| {
        let dot = |dtype: DType, result: DType| {
            (x[0] * 0.25).cast(dtype).contract_into((x[1] * 4.0).cast(dtype), &["b"], result)
        };
        vec![
            dot(DType::BF16, DType::F32),
            dot(DType::BF16, DType::BF16),
            dot(DType::F16, DType::F32),
            dot(DType::I8, DType::I32),
        ]
    });
    let evaluated = evaluate("wide", &[wide]);
    let results: Vec<f64> = evaluated[0].outputs.iter().map(|array| array.to_f64()[0]).collect();
    assert_eq!(results, [257.0, 256.0, 257.0, 256.0]);
}
