//! Elementwise operations, comparisons, selects and conversions.

use mt_shape::{Axis, DType, axis};

use crate::harness::{Case, any, assert_close, between, case, check, check_narrow, evaluate, given};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 5);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

fn map(values: &[Vec<f64>], function: impl Fn(f64) -> f64) -> Vec<Vec<f64>> {
    vec![values[0].iter().map(|value| function(*value)).collect()]
}

fn zip(values: &[Vec<f64>], function: impl Fn(f64, f64) -> f64) -> Vec<Vec<f64>> {
    vec![values[0].iter().zip(&values[1]).map(|(lhs, rhs)| function(*lhs, *rhs)).collect()]
}

fn unary() -> Vec<Case> {
    vec![
        case("negate", vec![any(&[A, B])], |_, x| vec![-x[0]]).like(|x| map(x, |x| -x)),
        case("abs", vec![any(&[A, B])], |_, x| vec![x[0].abs()]).like(|x| map(x, f64::abs)),
        case("sign", vec![any(&[B])], |_, x| vec![x[0].sign()]).like(|x| map(x, f64::signum)),
        case("exp", vec![any(&[A, ONE])], |_, x| vec![x[0].exp()]).like(|x| map(x, f64::exp)),
        case("exp_m1", vec![any(&[B])], |_, x| vec![x[0].exp_m1()]).like(|x| map(x, f64::exp_m1)),
        case("log", vec![between(&[B], 0.3, 4.0)], |_, x| vec![x[0].log()]).like(|x| map(x, f64::ln)),
        case("log_1p", vec![between(&[B], -0.6, 4.0)], |_, x| vec![x[0].log_1p()])
            .like(|x| map(x, f64::ln_1p)),
        case("sqrt", vec![between(&[B], 0.3, 4.0)], |_, x| vec![x[0].sqrt()]).like(|x| map(x, f64::sqrt)),
        case("rsqrt", vec![between(&[B], 0.3, 4.0)], |_, x| vec![x[0].rsqrt()])
            .like(|x| map(x, |x| 1.0 / x.sqrt())),
        case("tanh", vec![any(&[])], |_, x| vec![x[0].tanh()]).like(|x| map(x, f64::tanh)),
        case("sigmoid", vec![any(&[B])], |_, x| vec![x[0].sigmoid()])
            .like(|x| map(x, |x| 1.0 / (1.0 + (-x).exp()))),
        case("sin", vec![any(&[B])], |_, x| vec![x[0].sin()]).like(|x| map(x, f64::sin)),
        case("cos", vec![any(&[B])], |_, x| vec![x[0].cos()]).like(|x| map(x, f64::cos)),
        case("floor", vec![any(&[B])], |_, x| vec![x[0].floor()]).like(|x| map(x, f64::floor)),
        case("ceil", vec![any(&[B])], |_, x| vec![x[0].ceil()]).like(|x| map(x, f64::ceil)),
        case("round", vec![any(&[B])], |_, x| vec![x[0].round()]).like(|x| map(x, f64::round_ties_even)),
        case("erf", vec![given(&[A], &[-0.8, 0.1, 1.5])], |_, x| vec![x[0].erf()]).like(|_| {
            vec![vec![-0.742_100_964_707_660_5, 0.112_462_916_018_284_89, 0.966_105_146_475_310_7]]
        }),
        case(
            "erf_inv",
            vec![given(&[A], &[-0.742_100_964_707_660_5, 0.112_462_916_018_284_89, 0.966_105_146_475_310_7])],
            |_, x| vec![x[0].erf_inv()],
        )
        .like(|_| vec![vec![-0.8, 0.1, 1.5]]),
        case("silu", vec![any(&[B])], |_, x| vec![x[0].silu()]).like(|x| map(x, |x| x / (1.0 + (-x).exp()))),
        case("gelu", vec![any(&[B])], |_, x| vec![x[0].gelu_tanh()]),
        case("relu", vec![any(&[B])], |_, x| vec![x[0].relu()]).like(|x| map(x, |x| x.max(0.0))),
        case("clamp", vec![any(&[A, B])], |_, x| vec![x[0].clamp(-0.5, 0.7)])
            .like(|x| map(x, |x| x.clamp(-0.5, 0.7))),
        case("empty", vec![any(&[A, NONE])], |_, x| vec![x[0].exp() * 2.0 + 1.0]).like(|_| vec![vec![]]),
    ]
}

fn binary() -> Vec<Case> {
    let two = || vec![any(&[A, B]), between(&[A, B], 0.4, 2.0)];
    vec![
        case("add", two(), |_, x| vec![x[0] + x[1]]).like(|x| zip(x, |x, y| x + y)),
        case("subtract", two(), |_, x| vec![x[0] - x[1]]).like(|x| zip(x, |x, y| x - y)),
        case("multiply", two(), |_, x| vec![x[0] * x[1]]).like(|x| zip(x, |x, y| x * y)),
        case("divide", two(), |_, x| vec![x[0] / x[1]]).like(|x| zip(x, |x, y| x / y)),
        case("remainder", two(), |_, x| vec![x[0].remainder(x[1])]).like(|x| zip(x, |x, y| x % y)),
        case("power", vec![between(&[B], 0.3, 2.0), any(&[B])], |_, x| vec![x[0].power(x[1])])
            .like(|x| zip(x, f64::powf)),
        case("maximum", two(), |_, x| vec![x[0].maximum(x[1])]).like(|x| zip(x, f64::max)),
        case("minimum", two(), |_, x| vec![x[0].minimum(x[1])]).like(|x| zip(x, f64::min)),
        case("square", vec![any(&[B])], |_, x| vec![x[0] * x[0]]).like(|x| map(x, |x| x * x)),
        case("aligned", vec![any(&[A, B]), any(&[B]), any(&[])], |_, x| vec![x[1] * x[0] + x[2]]),
        case("transposed", vec![any(&[A, B]), any(&[B, A])], |_, x| vec![x[0] * x[1]]),
        case("select", two(), |_, x| vec![x[0].less(x[1]).select(x[0] * 2.0, x[1])])
            .like(|x| zip(x, |x, y| if x < y { 2.0 * x } else { y })),
        case("select_aligned", vec![any(&[A, B]), any(&[])], |_, x| {
            vec![x[0].greater(0.0).select(x[1], x[0])]
        }),
        case("comparisons", two(), |_, x| {
            let (x, y) = (x[0], x[1]);
            let all =
                [x.equals(y), x.differs(y), x.less(y), x.less_equal(y), x.greater(y), x.greater_equal(y)];
            let weights = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
            let counts = all.iter().zip(weights).map(|(truth, weight)| truth.cast(DType::F64) * weight);
            vec![counts.reduce(|sum, next| sum + next).unwrap() + x * y]
        })
        .like(|x| {
            zip(x, |x, y| {
                let all = [x == y, x != y, x < y, x <= y, x > y, x >= y];
                let weights = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0];
                all.iter().zip(weights).filter(|(truth, _)| **truth).map(|(_, weight)| weight).sum::<f64>()
                    + x * y
            })
        }),
        case("convert", vec![any(&[B])], |_, x| vec![x[0].cast(DType::F64) * 3.0]),
        case("not_a_number", vec![any(&[B])], |_, x| {
            let finite = x[0].is_finite().logical_not().select(x[0] * 5.0, x[0] * 2.0);
            vec![finite.named("finite")]
        }),
    ]
}

#[test]
fn unary_operations() {
    let cases = unary();
    check("unary", &cases);
}

#[test]
fn binary_operations() {
    let cases = binary();
    check("binary", &cases);
}

#[test]
fn narrow_types_follow_f64() {
    let cases: Vec<Case> = unary().into_iter().chain(binary()).collect();
    // Excludes functions that jump, or that keep only a few bits in a narrow type.
    let smooth = |case: &Case| !["erf_inv", "comparisons", "convert", "remainder"].contains(&case.name);
    let cases: Vec<Case> = cases.into_iter().filter(smooth).collect();
    check_narrow("elementwise", &cases, DType::F32, 1e-5);
    check_narrow("elementwise", &cases, DType::BF16, 4e-2);
    check_narrow("elementwise", &cases, DType::F16, 6e-3);
}

/// Gradients at corners of functions follow conventions on which other tests rely.
#[test]
fn corners() {
    let a = [A];
    let zeros = || given(&a, &[0.0, 0.0, 0.0]);
    let cases = [
        case("abs", vec![zeros()], |_, x| vec![x[0].abs()]),
        case("maximum", vec![zeros(), zeros()], |_, x| vec![x[0].maximum(x[1])]),
        case("minimum", vec![zeros(), zeros()], |_, x| vec![x[0].minimum(x[1])]),
        case("power", vec![zeros(), given(&a, &[0.0, 1.0, 2.0])], |_, x| vec![x[0].power(x[1])]),
        case("clamp", vec![given(&a, &[-1.0, 0.0, 1.0])], |_, x| vec![x[0].clamp(-1.0, 1.0)]),
        case("limits", vec![given(&a, &[-1.0, 0.0, 1.0])], |region, x| {
            vec![x[0].clamp(-1.0, 1.0) / region.full(DType::F64, &[A], 2.0)]
        }),
        case("stopped", vec![given(&a, &[2.0, 3.0, 5.0])], |_, x| vec![x[0].stop_gradient() * x[0]]),
    ];
    let expected: [&[[f64; 3]]; 7] = [
        &[[0.0, 0.0, 0.0]],
        &[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]],
        &[[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]],
        &[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]],
        &[[1.0, 1.0, 1.0]],
        &[[0.5, 0.5, 0.5]],
        &[[2.0, 3.0, 5.0]],
    ];
    let weights: Vec<f64> = (0..3).map(|index| (1.0 + 1.7 * f64::from(index)).cos()).collect();
    for ((case, evaluated), expected) in cases.iter().zip(evaluate("corners", &cases)).zip(expected) {
        for (gradient, expected) in evaluated.gradients.iter().zip(expected) {
            let expected: Vec<f64> = expected.iter().zip(&weights).map(|(x, weight)| x * weight).collect();
            assert_close(case.name, gradient, &expected, 1e-12);
        }
    }
}
