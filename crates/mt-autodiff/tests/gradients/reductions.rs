//! Reductions and cumulative sums.

use mt_ir::{Op, Reduction};
use mt_shape::{Axis, DType, axis};
use mt_trace::Tensor;

use crate::harness::{COMPUTED, Case, Compiled, any, array, case, check, check_narrow, given, options};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 5);
const C: Axis = axis("c", 2);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

/// Combines the rows, or the columns, of a 3×5 array.
fn rows(x: &[f64], start: f64, combine: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    x.chunks(5).map(|row| row.iter().copied().fold(start, &combine)).collect()
}

fn columns(x: &[f64], start: f64, combine: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    (0..5).map(|column| (0..3).map(|row| x[row * 5 + column]).fold(start, &combine)).collect()
}

fn reverse_sum<'t>(x: Tensor<'t>, dimension: usize) -> Tensor<'t> {
    x.apply_one(Op::CumulativeSum { dimension, reverse: true }, &[], &x.axes())
}

fn cases() -> Vec<Case> {
    let x = || vec![any(&[A, B])];
    vec![
        case("sum", x(), |_, x| vec![x[0].sum(&["b"]), x[0].sum(&["a"])])
            .like(|x| vec![rows(&x[0], 0.0, |x, y| x + y), columns(&x[0], 0.0, |x, y| x + y)]),
        case("sum_all", x(), |_, x| vec![x[0].square().sum_all()])
            .like(|x| vec![vec![x[0].iter().map(|x| x * x).sum()]]),
        case("sum_outer", vec![any(&[A, B, C])], |_, x| vec![x[0].square().sum(&["c", "a"])]),
        case("sum_none", vec![any(&[A, NONE])], |_, x| vec![x[0].sum(&["none"]) + 1.0, x[0].sum(&["a"])])
            .like(|_| vec![vec![1.0; 3], vec![]]),
        case("sum_one", vec![any(&[A, ONE])], |_, x| vec![x[0].square().sum(&["one"])]),
        case("mean", x(), |_, x| vec![x[0].mean(&["b"])])
            .like(|x| vec![rows(&x[0], 0.0, |x, y| x + y / 5.0)]),
        case("product", x(), |_, x| vec![x[0].product(&["b"])])
            .like(|x| vec![rows(&x[0], 1.0, |x, y| x * y)]),
        case(
            "product_zeros",
            vec![given(
                &[A, B],
                &[1.5, 0.0, -2.0, 0.5, 3.0, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            )],
            |_, x| vec![x[0].product(&["b"]), x[0].product(&["a"])],
        )
        .like(|x| vec![rows(&x[0], 1.0, |x, y| x * y), columns(&x[0], 1.0, |x, y| x * y)]),
        case("max", x(), |_, x| vec![x[0].max(&["b"]), x[0].max(&["a"])]).like(|x| {
            vec![rows(&x[0], f64::NEG_INFINITY, f64::max), columns(&x[0], f64::NEG_INFINITY, f64::max)]
        }),
        case("min", x(), |_, x| vec![x[0].min(&["a", "b"])])
            .like(|x| vec![vec![x[0].iter().copied().fold(f64::INFINITY, f64::min)]]),
        case("cumulative_sum", x(), |_, x| vec![x[0].cumulative_sum("b"), x[0].cumulative_sum("a")]).like(
            |x| {
                let mut along = x[0].clone();
                let mut down = x[0].clone();
                for index in 0..15 {
                    if index % 5 > 0 {
                        along[index] += along[index - 1];
                    }
                    if index >= 5 {
                        down[index] += down[index - 5];
                    }
                }
                vec![along, down]
            },
        ),
        case("reverse_sum", x(), |_, x| vec![reverse_sum(x[0].square(), 1)]).like(|x| {
            let mut sums: Vec<f64> = x[0].iter().map(|x| x * x).collect();
            for index in (0..15).rev() {
                if index % 5 < 4 {
                    sums[index] += sums[index + 1];
                }
            }
            vec![sums]
        }),
        case("cumulative_one", vec![any(&[ONE, A])], |_, x| vec![x[0].cumulative_sum("one")]),
        case("cumulative_none", vec![any(&[NONE, A])], |_, x| vec![x[0].cumulative_sum("none")]),
        case("softmax", x(), |_, x| vec![x[0].softmax("b")]),
        case("log_sum_exp", x(), |_, x| vec![x[0].log_sum_exp("b")]),
    ]
}

#[test]
fn reductions() {
    let cases = cases();
    check("reductions", &cases);
    check_narrow("reductions", &cases, DType::F32, 1e-5);
    check_narrow("reductions", &cases, DType::BF16, 5e-2);
}

/// Equal extremes share the cotangent, which finite differences cannot show.
#[test]
fn ties_share() {
    let case = case("ties", vec![given(&[A, C], &[1.0, 1.0, 2.0, 3.0, 4.0, 4.0])], |_, x| {
        vec![x[0].max(&["c"]).sum_all(), x[0].min(&["c"]).sum_all()]
    });
    let evaluated = crate::harness::evaluate("ties", &[case]);
    // The weights of the two results.
    let (max, min) = (1.0_f64.cos(), 1.0_f64.cos());
    let half = (max + min) / 2.0;
    crate::harness::assert_close(
        "ties",
        &evaluated[0].gradients[0],
        &[half, half, min, max, half, half],
        1e-12,
    );
}

/// Every reduction of every supported type, over elements and over an empty range.
#[test]
fn every_type() {
    let program = mt_trace::program(&options("every_type"), |inputs| {
        let mut outputs = Vec::new();
        for dtype in COMPUTED {
            let name = dtype.name();
            let x = inputs.input(name, dtype, &[A], &[None], false);
            let empty = inputs.region().full(dtype, &[NONE], 0.0);
            let kinds: &[Reduction] = if dtype == DType::Bool {
                &[Reduction::And, Reduction::Or]
            } else {
                &[Reduction::Sum, Reduction::Product, Reduction::Maximum, Reduction::Minimum]
            };
            for (value, kind) in
                [x, empty].into_iter().flat_map(|value| kinds.iter().map(move |kind| (value, *kind)))
            {
                let reduced = value.apply_one(Op::Reduce { kind, dimensions: vec![0] }, &[], &[]);
                outputs.push(inputs.replicated(name, reduced.cast(DType::F64)));
            }
        }
        outputs
    })
    .unwrap();
    let arrays: Vec<_> = COMPUTED.iter().map(|dtype| array(*dtype, &[3], &[3.0, 0.0, 5.0])).collect();
    let results: Vec<f64> =
        Compiled::new(program).run(&arrays).iter().map(|array| array.to_f64()[0]).collect();
    let mut expected: Vec<f64> = Vec::new();
    for dtype in COMPUTED {
        let bits = 8 * dtype.byte_size() as i32;
        let (low, high) = match dtype {
            DType::Bool => {
                expected.extend([0.0, 1.0, 1.0, 0.0]);
                continue;
            }
            _ if dtype.is_float() => (f64::NEG_INFINITY, f64::INFINITY),
            _ if dtype.is_unsigned() => (0.0, 2.0_f64.powi(bits) - 1.0),
            _ => (-2.0_f64.powi(bits - 1), 2.0_f64.powi(bits - 1) - 1.0),
        };
        expected.extend([8.0, 0.0, 5.0, 0.0, 0.0, 1.0, low, high]);
    }
    assert_eq!(results, expected);
}
