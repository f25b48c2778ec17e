//! Messages about misuse: the operation, the scope, the shapes, and the line.

use mt_autodiff::AutodiffError;
use mt_ir::{Op, ShapeError};
use mt_shape::{Axis, DType, LogicalAxis, axis, logical};
use mt_trace::{Inputs, Output, Region, SavePolicy, ScanOptions, Tensor, TraceError, TraceErrorKind};

use crate::{Leaf, leaves, mesh, options, trace};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 4);
const STEPS: Axis = axis("steps", 2);

/// The error of code that receives a tensor `f32[a=3, b=4]` and a tensor `f32[a=3]`.
#[track_caller]
fn error(code: impl for<'t> FnOnce(Region<'t>, Tensor<'t>, Tensor<'t>) -> Tensor<'t>) -> TraceError {
    trace(|inputs: &Inputs<'_>| {
        let x = inputs.input("x", DType::F32, &[A, B], &[None, None], false);
        let y = inputs.input("y", DType::F32, &[A], &[None], false);
        let result =
            inputs.region().scope("decoder", || inputs.region().scope("mlp", || code(inputs.region(), x, y)));
        vec![inputs.replicated("result", result)]
    })
    .unwrap_err()
}

/// Checks the message; its line is given relative to the caller's.
#[track_caller]
fn check(error: &TraceError, line: u32, message: &str) {
    let here = std::panic::Location::caller();
    assert_eq!((error.location.file(), error.location.line()), (file!(), line), "{error} {here}");
    assert_eq!(error.to_string(), format!("{message} ({})", error.location));
}

fn nothing<'t>() -> Vec<Leaf<Tensor<'t>>> {
    Vec::new()
}

#[test]
fn axes_that_do_not_fit() {
    let (actual, line) = (error(|_, x, y| x + y.rename("a", "c")), line!());
    let expected = "`stablehlo.add` in `decoder/mlp` on float32[a=3, b=4] and float32[c=3]: \
                    operand has no axis `c`; it has [a=3, b=4]";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, y| x * y.pad("a", 1, 0, 0.0)), line!());
    let expected = "`stablehlo.multiply` in `decoder/mlp` on float32[a=3, b=4] and float32[a=4]: \
                    axis `a` has size 3 on the left and 4 on the right";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, _| x.sum(&["c"])), line!());
    let expected = "`axis` in `decoder/mlp` on float32[a=3, b=4]: operand has no axis `c`; it has [a=3, b=4]";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, y| x.contract(y, &["b"])), line!());
    check(&actual, line, "`axis` in `decoder/mlp` on float32[a=3]: operand has no axis `b`; it has [a=3]");

    let (actual, line) = (error(|_, x, y| x.contract(y.cast(DType::BF16), &["a"])), line!());
    let expected = "`dot` in `decoder/mlp` on float32[a=3, b=4] and bfloat16[a=3]: \
                    operand 1 has type `bfloat16[3]`, expected `float32[3]`";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, _| x.broadcast(&[A])), line!());
    check(&actual, line, "`broadcast` in `decoder/mlp` on float32[a=3, b=4]: axis `b=4` is not among [a=3]");

    let (actual, line) = (error(|_, x, _| x.split("b", &[axis("c", 3)])), line!());
    let expected = "`reshape` in `decoder/mlp` on float32[a=3, b=4]: \
                    `float32[3, 4]` has 12 elements, not the 9 of `float32[3, 3]`";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, _| x.merge(&["b", "a"], "ba")), line!());
    let expected = "`merge` in `decoder/mlp` on float32[a=3, b=4]: \
                    axes [\"b\", \"a\"] do not follow each other in [a=3, b=4]";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, _| x.slice("b", 2, 7)), line!());
    let expected = "`slice` in `decoder/mlp` on float32[a=3, b=4]: \
                    slice [0, 2]..[3, 7] by [1, 1] does not fit `float32[3, 4]`";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, y| x.concatenate(&[y], "b")), line!());
    check(&actual, line, "`axis` in `decoder/mlp` on float32[a=3]: operand has no axis `b`; it has [a=3]");

    let (actual, line) = (error(|_, x, _| x.rename("a", "b")), line!());
    check(
        &actual,
        line,
        "`rename` in `decoder/mlp` on float32[a=3, b=4]: the tensor already has an axis `b`",
    );

    let (actual, line) = (error(|_, x, _| x.constrain(&[None])), line!());
    check(
        &actual,
        line,
        "`constrain` in `decoder/mlp` on float32[a=3, b=4]: 1 logical axes given for 2 axes",
    );

    let (actual, line) =
        (error(|_, x, _| x.apply_one(Op::Reverse { dimensions: vec![2] }, &[], &[A, B])), line!());
    let expected =
        "`reverse` in `decoder/mlp` on float32[a=3, b=4]: dimension 2 is out of range for `float32[3, 4]`";
    check(&actual, line, expected);

    let (actual, line) =
        (error(|_, x, _| x.apply_one(Op::Reverse { dimensions: vec![1] }, &[], &[B, A])), line!());
    let expected = "`reverse` in `decoder/mlp` on float32[a=3, b=4]: \
                    the result has dimensions [3, 4], which are not [b=4, a=3]";
    check(&actual, line, expected);
}

#[test]
fn types_that_do_not_fit() {
    let (actual, line) = (error(|_, x, _| x.cast(DType::I32).exp()), line!());
    let expected =
        "`stablehlo.exponential` in `decoder/mlp` on int32[a=3, b=4]: does not take elements of type `int32`";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, y| x.logical_and(y)), line!());
    let expected = "`stablehlo.and` in `decoder/mlp` on float32[a=3, b=4] and float32[a=3, b=4]: \
                    does not take elements of type `float32`";
    check(&actual, line, expected);

    let (actual, line) = (error(|_, x, _| x.bitcast(DType::F64)), line!());
    check(
        &actual,
        line,
        "`bitcast` in `decoder/mlp` on float32[a=3, b=4]: `float32` and `float64` differ in size",
    );
}

#[test]
fn a_handle_that_left_its_region() {
    // Lifetimes keep a body's handles inside, but an outer region used inside a body adds to the innermost one.
    let (actual, line) = (
        error(|region, _, y| {
            let mut leaked = None;
            let ([_], []) = region.scan(ScanOptions::over(STEPS), [y], &nothing(), |_, [state], _| {
                let ([inner], []) =
                    region.scan(ScanOptions::over(STEPS), [y], &nothing(), |_, [y], _| ([y.sin()], []));
                leaked = Some(inner);
                ([state * inner], [])
            });
            y + leaked.unwrap()
        }),
        line!() - 2,
    );
    let expected = "`stablehlo.add` in `decoder/mlp` on [a=3]: a tensor was used after its region ended";
    check(&actual, line, expected);
    assert_eq!(*actual.kind, TraceErrorKind::Escaped);
}

#[test]
fn a_custom_derivative_returns_all_cotangents() {
    let actual = error(|region, x, y| {
        let [sum] = region.custom_vjp(
            "fused",
            [x, y],
            [true, true],
            |_, [x, _]| [x.sum(&["b"])],
            |_, [x, _]| ([x.sum(&["b"])], vec![]),
            |_, _, [g]| vec![g.broadcast(&[A, B])],
        );
        sum
    });
    assert!(
        actual.to_string().contains(
            "`fused` in `decoder/mlp` on float32[a=3, b=4] and float32[a=3]: 1 cotangents for 2 arguments"
        ),
        "{actual}"
    );
}

#[test]
fn scans_that_do_not_fit() {
    let (actual, line) = (
        error(|region, x, y| {
            let ([last], []) =
                region.scan(ScanOptions::over(STEPS), [y], &leaves(&[x]), |_, [y], _| ([y], []));
            last
        }),
        line!() - 3,
    );
    let expected =
        "`scan` in `decoder/mlp` on float32[a=3, b=4]: an input does not have the leading axis `steps=2`";
    check(&actual, line, expected);

    let (actual, line) = (
        error(|region, _, y| {
            let ([last], []) = region
                .scan(ScanOptions::over(STEPS), [y], &nothing(), |_, [y], _| ([y.cast(DType::BF16)], []));
            last
        }),
        line!() - 3,
    );
    let expected = "`scan` in `decoder/mlp` on float32[a=3]: \
                    the body's carry has types `bfloat16[3]`, expected `float32[3]`";
    check(&actual, line, expected);
}

#[test]
fn gradients_that_do_not_exist() {
    let (actual, line) = (
        error(|region, x, _| {
            let (_, [], gradients) = region.value_and_grad(&leaves(&[x]), |body, x| {
                let start = x[0].value;
                let [last] = body.scope("search", || {
                    body.while_loop(None, [start], |_, [x]| x.sum_all().less(9.0), |_, [x]| [x * 2.0])
                });
                (last.sum_all(), [])
            });
            gradients[0].value
        }),
        line!() - 9,
    );
    let expected = "`value_and_grad` in `decoder/mlp`: `while` in `decoder/mlp/search` has no derivative, \
                    but a requested gradient passes through it";
    check(&actual, line, expected);
    assert!(matches!(
        *actual.kind,
        TraceErrorKind::Autodiff(AutodiffError::NotDifferentiable { op: "while", .. })
    ));

    let (actual, line) =
        (error(|region, x, _| region.value_and_grad(&leaves(&[x]), |_, x| (x[0].value, [])).0), line!());
    let expected =
        "`value_and_grad` in `decoder/mlp` on float32[a=3, b=4]: a loss is a floating-point scalar";
    check(&actual, line, expected);
}

#[test]
fn errors_inside_bodies_have_their_own_line() {
    let (actual, line) = (
        error(|region, _, y| {
            let [result] = region.remat(SavePolicy::Everything, [y], &nothing(), |body, [y], _| {
                body.scope("inner", || [y + y.rename("a", "c")])
            });
            result
        }),
        line!() - 4,
    );
    let expected = "`stablehlo.add` in `decoder/mlp/inner` on float32[a=3] and float32[c=3]: \
                    operand has no axis `c`; it has [a=3]";
    check(&actual, line, expected);
}

#[test]
fn a_model_fails_with_its_own_error() {
    let (actual, line) =
        (error(|region, _, _| region.fail("attention", "7 heads do not share 2 keys")), line!());
    check(&actual, line, "`attention` in `decoder/mlp`: 7 heads do not share 2 keys");
    assert!(matches!(*actual.kind, TraceErrorKind::Shape(ShapeError::Invalid(_))));
}

#[test]
fn a_logical_axis_without_a_rule_is_an_error() {
    let rows = Some(LogicalAxis::named("rows"));
    let trace = |[input, value, output]: [Option<LogicalAxis>; 3]| {
        mt_trace::program(&options(mesh()), |inputs| {
            let x = inputs.input("x", DType::F32, &[B], &[input], false).constrain(&[value]);
            vec![inputs.output("y", x, &[output])]
        })
    };
    assert!(trace([rows, rows, rows]).is_ok());
    for name in [logical::EMBED, LogicalAxis::named("made_up")] {
        let unknown = Some(name);
        for (operation, axes) in [
            ("`input`", [unknown, rows, rows]),
            ("`constrain`", [rows, unknown, rows]),
            ("`output`", [rows, rows, unknown]),
        ] {
            let error = trace(axes).unwrap_err();
            let expected = format!("no placement rule names the logical axis `{name}`");
            assert!(error.to_string().starts_with(operation), "{error}");
            assert!(error.to_string().contains(&expected), "{error}");
            assert_eq!(error.location.file(), file!());
        }
    }
}

#[test]
fn other_panics_are_passed_on() {
    let payload = std::panic::catch_unwind(|| {
        trace(|_| -> Vec<Output<'_>> { std::panic::resume_unwind(Box::new("something else")) })
    })
    .unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"something else"));
}
