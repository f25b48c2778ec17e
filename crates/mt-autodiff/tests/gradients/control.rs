//! Scans, branches, recomputation and custom derivatives, and their nesting.

use mt_shape::{Axis, DType, axis};
use mt_trace::{Memory, Region, SavePolicy, ScanOptions, Tensor};

use crate::harness::{
    Case, Leaf, any, array, assert_close, case, check, check_narrow, evaluate, integers, leaves, tensors,
};

const A: Axis = axis("a", 3);
const B: Axis = axis("b", 2);
const LAYERS: Axis = axis("layers", 4);
const STEPS: Axis = axis("steps", 3);
const ONE: Axis = axis("one", 1);
const NONE: Axis = axis("none", 0);

fn reversed(axis: Axis) -> ScanOptions {
    ScanOptions { reverse: true, ..ScanOptions::over(axis) }
}

fn names(names: &[&str]) -> SavePolicy {
    SavePolicy::Names(names.iter().map(|name| ((*name).to_owned(), Memory::Device)).collect())
}

/// A layer with two products, of which the first is named.
fn layer<'t>(x: Tensor<'t>, weights: &[Tensor<'t>]) -> Tensor<'t> {
    let hidden = weights[0].dot(x, &["a"]).tanh().named("hidden");
    x + weights[1].dot(hidden.silu(), &["b"]).named("out")
}

/// Layers with stacked weights, a captured scale, and the sum of each state as a second result.
fn layers<'t>(region: Region<'t>, x: &[Tensor<'t>], options: ScanOptions) -> Vec<Tensor<'t>> {
    let scale = x[3];
    let ([last], [sums]) = region.scan(options, [x[0]], &leaves(&x[1..3]), |_, [state], weights| {
        let next = layer(state * scale, &tensors(&weights));
        ([next], [next.sum(&["a"])])
    });
    vec![last, sums]
}

fn layer_inputs() -> Vec<crate::harness::Argument> {
    vec![any(&[B.renamed("batch"), A]), any(&[LAYERS, A, B]), any(&[LAYERS, B, A]), any(&[A])]
}

fn scans() -> Vec<Case> {
    vec![
        case("layers", layer_inputs(), |region, x| layers(region, x, ScanOptions::over(LAYERS))),
        case("reverse", layer_inputs(), |region, x| layers(region, x, reversed(LAYERS))),
        case("save_nothing", layer_inputs(), |region, x| {
            layers(region, x, ScanOptions::over(LAYERS).saving(names(&[])))
        }),
        case("save_names", layer_inputs(), |region, x| {
            layers(region, x, ScanOptions::over(LAYERS).saving(names(&["hidden", "absent"])))
        }),
        case("save_names_reverse", layer_inputs(), |region, x| {
            layers(region, x, reversed(LAYERS).saving(names(&["hidden", "out"])))
        }),
        case("unrolled", layer_inputs(), |_, x| {
            let mut state = x[0];
            let mut sums: Option<Tensor<'_>> = None;
            for index in 0..LAYERS.size {
                state = layer(state * x[3], &[x[1].at("layers", index), x[2].at("layers", index)]);
                let sum = state.sum(&["a"]).unsqueeze("layers");
                sums = Some(sums.map_or(sum, |sums| sums.concatenate(&[sum], "layers")));
            }
            vec![state, sums.unwrap()]
        }),
        case("sums", vec![any(&[STEPS, A])], |region, x| {
            let zero = region.full(x[0].dtype(), &[A], 0.0);
            let ([_], [sums]) = region.scan(ScanOptions::over(STEPS), [zero], &leaves(x), |_, [sum], x| {
                let next = sum + x[0].value;
                ([next], [next])
            });
            vec![sums]
        })
        .like(|x| {
            let x = &x[0];
            let second: Vec<f64> = (0..3).map(|i| x[i] + x[3 + i]).collect();
            let third: Vec<f64> = (0..3).map(|i| second[i] + x[6 + i]).collect();
            vec![[&x[..3], &second, &third].concat()]
        }),
        case("several_results", vec![any(&[A]), any(&[STEPS, A]), any(&[STEPS])], |region, x| {
            let ([state, product], [first, second, third]) =
                region.scan(reversed(STEPS), [x[0], x[0]], &leaves(&x[1..]), |_, [state, product], x| {
                    let next = state * x[0].value + product;
                    ([next, product * x[1].value], [next.square(), x[1].value.exp(), state * product])
                });
            vec![state, product, first, second, third]
        }),
        case("integer_carry", vec![any(&[A]), integers(&[], &[2])], |region, x| {
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([state, count], [counts]) =
                region.scan(ScanOptions::over(STEPS), [x[0], x[1]], &nothing, |_, [state, count], _| {
                    let next = state * (count.cast(state.dtype()) * 0.5).sin();
                    ([next, count + 1.0], [count])
                });
            vec![state, count.cast(x[0].dtype()), counts.cast(x[0].dtype())]
        }),
        case("unchanged_carry", vec![any(&[A]), any(&[STEPS, A])], |region, x| {
            let ([same, sum], [products]) =
                region.scan(ScanOptions::over(STEPS), [x[0], x[0]], &leaves(&x[1..]), |_, [same, sum], x| {
                    ([same, sum + x[0].value * same], [x[0].value * same])
                });
            vec![same, sum, products]
        }),
        case("swapped_carry", vec![any(&[A]), any(&[A])], |region, x| {
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([first, second], []) =
                region.scan(ScanOptions::over(STEPS), [x[0], x[1]], &nothing, |_, [first, second], _| {
                    ([second.sin(), first * second], [])
                });
            vec![first, second]
        }),
        case("no_carry", vec![any(&[STEPS, A]), any(&[A])], |region, x| {
            let (scale, inputs) = (x[1], leaves(&x[..1]));
            let ([], [products, powers]) = region.scan(ScanOptions::over(STEPS), [], &inputs, |_, [], x| {
                ([], [x[0].value * scale, (x[0].value * scale).exp()])
            });
            vec![products, powers]
        }),
        case("unused_start", vec![any(&[A]), any(&[STEPS, A])], |region, x| {
            let ([last], []) =
                region.scan(ScanOptions::over(STEPS), [x[0]], &leaves(&x[1..]), |_, [_], x| {
                    ([x[0].value.square()], [])
                });
            vec![last]
        }),
        case("only_stacked", vec![any(&[A]), any(&[STEPS, A])], |region, x| {
            let ([_], [states]) =
                region.scan(ScanOptions::over(STEPS), [x[0]], &leaves(&x[1..]), |_, [state], x| {
                    ([state * x[0].value], [state])
                });
            vec![states]
        }),
        case("replaced_carry", vec![any(&[A])], |region, x| {
            // Only the first step reads values that depend on the argument.
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([_], [sines]) =
                region.scan(ScanOptions::over(STEPS), [x[0]], &nothing, |body, [state], _| {
                    ([body.full(state.dtype(), &[A], 2.0)], [state.sin()])
                });
            vec![sines]
        }),
        case("one_step", vec![any(&[A]), any(&[ONE, A])], |region, x| {
            let ([last], [states]) =
                region.scan(ScanOptions::over(ONE), [x[0]], &leaves(&x[1..]), |_, [state], x| {
                    let next = (state * x[0].value).sin();
                    ([next], [next])
                });
            vec![last, states]
        }),
        case("no_step", vec![any(&[A]), any(&[NONE, A])], |region, x| {
            let ([last], [states]) =
                region.scan(ScanOptions::over(NONE), [x[0]], &leaves(&x[1..]), |_, [state], x| {
                    let next = (state * x[0].value).sin();
                    ([next], [next])
                });
            vec![last, states]
        })
        .like(|x| vec![x[0].clone(), vec![]]),
        case("constants", vec![any(&[A])], |region, x| {
            // A constant of the outer region, one of the body, and an outer value that depends on the argument.
            let outer = region.full(x[0].dtype(), &[A], 0.7);
            let half = x[0] * 0.5;
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([last], []) = region.scan(ScanOptions::over(STEPS), [x[0]], &nothing, |body, [state], _| {
                let inner = body.full(state.dtype(), &[], 1.3).broadcast(&[A]);
                ([state.sin() * outer + inner * half.square()], [])
            });
            vec![last]
        }),
        case("inactive_start", vec![any(&[A])], |region, x| {
            // The carry starts as a constant and comes to depend on the argument later.
            let start = region.full(x[0].dtype(), &[A], 1.0);
            let weight = x[0];
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([first, _], []) =
                region.scan(ScanOptions::over(LAYERS), [start, start], &nothing, |_, [first, second], _| {
                    ([first + second, second * weight], [])
                });
            vec![first]
        }),
    ]
}

fn inner_scan<'t>(region: Region<'t>, x: Tensor<'t>, steps: Tensor<'t>, save: SavePolicy) -> Tensor<'t> {
    let options = ScanOptions::over(STEPS).saving(save);
    let ([state], [sums]) = region.scan(options, [x], &leaves(&[steps]), |_, [state], steps| {
        let next = (state * steps[0].value).sin().named("hidden");
        ([next + state], [next * 0.5])
    });
    state + sums.sum(&["steps"])
}

fn nested<'t>(region: Region<'t>, x: &[Tensor<'t>], outer: SavePolicy, inner: SavePolicy) -> Vec<Tensor<'t>> {
    let options = ScanOptions::over(LAYERS).saving(outer);
    let shared = x[2];
    let ([last], [states]) = region.scan(options, [x[0]], &leaves(&x[1..2]), |body, [state], x| {
        let next = inner_scan(*body, state * shared, x[0].value, inner);
        ([next.tanh()], [next])
    });
    vec![last, states]
}

fn nested_inputs() -> Vec<crate::harness::Argument> {
    vec![any(&[A]), any(&[LAYERS, STEPS, A]), any(&[A])]
}

/// `x·sin(y)` with a recognizable derivative: three times the true one with respect to `x`, and none for the third
/// argument.
fn marked<'t>(region: Region<'t>, x: Tensor<'t>, y: Tensor<'t>) -> Tensor<'t> {
    let [product, _] = region.custom_vjp(
        "marked",
        [x, y, x],
        [true, true, false],
        |_, [x, y, _]| [x * y.sin(), x.square()],
        |_, [x, y, _]| ([x * y.sin(), x.square()], vec![x, y.sin(), y.cos()]),
        |_, residuals, [g, h]| {
            let [x, sin, cos] = residuals.try_into().unwrap();
            vec![g * sin * 3.0 + h * x * 2.0, g * x * cos]
        },
    );
    product
}

fn regions() -> Vec<Case> {
    vec![
        case("nested", nested_inputs(), |region, x| {
            nested(region, x, SavePolicy::Everything, SavePolicy::Everything)
        }),
        case("nested_names", nested_inputs(), |region, x| {
            nested(region, x, names(&["hidden"]), SavePolicy::Everything)
        }),
        case("nested_nothing", nested_inputs(), |region, x| nested(region, x, names(&[]), names(&[]))),
        case("nested_mixed", nested_inputs(), |region, x| {
            nested(region, x, SavePolicy::Everything, names(&["hidden"]))
        }),
        case("remat", vec![any(&[B.renamed("batch"), A]), any(&[A, B]), any(&[B, A])], |region, x| {
            let [y] = region.remat(names(&[]), [x[0]], &leaves(&x[1..]), |_, [x], weights| {
                [layer(x, &tensors(&weights))]
            });
            vec![y]
        }),
        case("remat_names", vec![any(&[B.renamed("batch"), A]), any(&[A, B]), any(&[B, A])], |region, x| {
            let scale = x[0].sum(&["a"]);
            let [y, z] = region.remat(names(&["hidden"]), [x[0]], &leaves(&x[1..]), |_, [x], weights| {
                let y = layer(x, &tensors(&weights));
                [y, y.sin() * scale]
            });
            vec![y, z]
        }),
        case(
            "remat_everything",
            vec![any(&[B.renamed("batch"), A]), any(&[A, B]), any(&[B, A])],
            |region, x| {
                let [y] =
                    region.remat(SavePolicy::Everything, [x[0]], &leaves(&x[1..]), |_, [x], weights| {
                        [layer(x, &tensors(&weights))]
                    });
                vec![y]
            },
        ),
        case("remat_in_scan", layer_inputs(), |region, x| {
            let scale = x[3];
            let ([last], []) = region.scan(
                ScanOptions::over(LAYERS),
                [x[0]],
                &leaves(&x[1..3]),
                |body, [state], weights| {
                    let [next] =
                        body.remat(names(&["hidden"]), [state * scale], &weights, |_, [x], weights| {
                            [layer(x, &tensors(&weights))]
                        });
                    ([next], [])
                },
            );
            vec![last]
        }),
        case("scan_in_remat", nested_inputs(), |region, x| {
            let [last, states] =
                region.remat(names(&["hidden"]), [x[0]], &leaves(&x[1..]), |body, [start], rest| {
                    let all = [start, rest[0].value, rest[1].value];
                    let results = nested(*body, &all, SavePolicy::Everything, names(&[]));
                    [results[0], results[1]]
                });
            vec![last, states]
        }),
        case("remat_in_remat", vec![any(&[A])], |region, x| {
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let [y] = region.remat(names(&[]), [x[0]], &nothing, |body, [x], nothing| {
                let [y] = body.remat(names(&[]), [x.sin()], &nothing, |_, [x], _| [(x * 2.0).sin()]);
                [y * x]
            });
            vec![y]
        }),
        case(
            "case",
            vec![any(&[A]), any(&[A]), integers(&[], &[0]), integers(&[], &[1]), integers(&[], &[7])],
            |region, x| {
                let (left, right) = (x[0], x[1]);
                let mut results = Vec::new();
                for index in &x[2..] {
                    let [first, second] = region.case(
                        *index,
                        &[
                            &|_| [left.sin() * right, left],
                            &|body| [(left * left.exp()).exp(), body.full(DType::F64, &[A], 3.0)],
                            &|_| [right.square(), right.cos() * left],
                        ],
                    );
                    results.extend([first, second]);
                }
                results
            },
        )
        .like(|x| {
            let both =
                |f: fn(f64, f64) -> f64| x[0].iter().zip(&x[1]).map(|(x, y)| f(*x, *y)).collect::<Vec<f64>>();
            vec![
                both(|x, y| x.sin() * y),
                x[0].clone(),
                both(|x, _| (x * x.exp()).exp()),
                vec![3.0; 3],
                both(|_, y| y * y),
                both(|x, y| y.cos() * x),
            ]
        }),
        case(
            "case_in_scan",
            vec![any(&[A]), any(&[LAYERS, A]), integers(&[LAYERS], &[1, 0, 2, 1])],
            |region, x| {
                let start = x[0];
                let ([last], []) =
                    region.scan(ScanOptions::over(LAYERS), [start], &leaves(&x[1..]), |body, [state], x| {
                        let [next] = body.case(
                            x[1].value,
                            &[&|_| [state.sin() * x[0].value], &|_| [state + x[0].value.exp()], &|_| {
                                [state * start]
                            }],
                        );
                        ([next], [])
                    });
                vec![last]
            },
        ),
        case("barrier", vec![any(&[A]), any(&[B])], |region, x| {
            let [first, second] = region.optimization_barrier([x[0].sin(), x[1].cos()]);
            vec![first, second.exp()]
        }),
        case("while_without_gradient", vec![any(&[A]), integers(&[], &[4])], |region, x| {
            let (limit, growth) = (x[1], x[0].stop_gradient());
            let [count, power] = region.while_loop(
                None,
                [region.integer(DType::I32, 0), growth],
                |_, [count, _]| count.less(limit),
                |_, [count, power]| [count + 1.0, power * growth],
            );
            vec![power.stop_gradient() * 0.0 + x[0], count.cast(DType::F64)]
        })
        .like(|x| vec![x[0].clone(), vec![4.0]]),
        case("second_order", vec![any(&[A]), any(&[A, B])], |region, x| {
            // The gradient of a gradient, through the result of a step of gradient descent.
            let weight = x[1];
            let (value, [], gradients) = region.value_and_grad(&leaves(&x[..1]), |_, x| {
                (weight.dot(x[0].value.sin(), &["a"]).tanh().square().sum_all(), [])
            });
            vec![value, gradients[0].value * weight.sum(&["b"])]
        }),
        case("second_order_scan", layer_inputs(), |region, x| {
            let rest = [x[1], x[2], x[3]];
            let (value, [], gradients) = region.value_and_grad(&leaves(&x[..1]), |body, x| {
                let options = ScanOptions::over(LAYERS).saving(names(&["hidden"]));
                let results = layers(*body, &[&[x[0].value], rest.as_slice()].concat(), options);
                (results[0].square().sum_all() + results[1].sum_all(), [])
            });
            vec![value, gradients[0].value]
        }),
    ]
}

#[test]
fn scanned_layers() {
    let cases = scans();
    let evaluated = check("scans", &cases);
    // All policies, and unrolling, give the same numbers.
    let expected = cases.iter().position(|case| case.name == "unrolled").unwrap();
    for name in ["layers", "save_nothing", "save_names"] {
        let index = cases.iter().position(|case| case.name == name).unwrap();
        assert!((evaluated[index].loss - evaluated[expected].loss).abs() < 1e-12, "loss of `{name}`");
        for (actual, expected) in evaluated[index].gradients.iter().zip(&evaluated[expected].gradients) {
            assert_close(name, actual, &expected.to_f64(), 1e-12);
        }
    }
    check_narrow("scans", &cases, DType::F32, 1e-5);
}

#[test]
fn nested_regions() {
    check("regions", &regions());
}

#[test]
fn custom_derivatives() {
    let inputs = || vec![any(&[A]), any(&[A])];
    let cases = [
        case("marked", inputs(), |region, x| vec![marked(region, x[0], x[1])]),
        case("marked_in_remat", inputs(), |region, x| {
            let [y] = region
                .remat(names(&[]), [x[0]], &leaves(&x[1..]), |body, [x], y| [marked(*body, x, y[0].value)]);
            vec![y]
        }),
        case("marked_in_scan", inputs(), |region, x| {
            let y = x[1].unsqueeze("one");
            let zero = region.full(DType::F64, &[A], 0.0);
            let first = x[0];
            let ([sum], []) = region.scan(ScanOptions::over(ONE), [zero], &leaves(&[y]), |body, [sum], y| {
                ([sum + marked(*body, first, y[0].value)], [])
            });
            vec![sum]
        }),
        case("marked_in_scan_by_names", inputs(), |region, x| {
            let second = x[1];
            let nothing: Vec<Leaf<Tensor<'_>>> = Vec::new();
            let ([product], []) =
                region.scan(ScanOptions::over(ONE).saving(names(&[])), [x[0]], &nothing, |body, [x], _| {
                    ([marked(*body, x, second)], [])
                });
            vec![product]
        }),
    ];
    let weights: Vec<f64> = (0..3).map(|index| (1.0 + 1.7 * f64::from(index)).cos()).collect();
    for (case, evaluated) in cases.iter().zip(evaluate("custom", &cases)) {
        let (x, y) = (&case.inputs[0].values, &case.inputs[1].values);
        let by_x: Vec<f64> = (0..3).map(|i| 3.0 * weights[i] * y[i].sin()).collect();
        let by_y: Vec<f64> = (0..3).map(|i| weights[i] * x[i] * y[i].cos()).collect();
        assert_close(case.name, &evaluated.gradients[0], &by_x, 1e-12);
        assert_close(case.name, &evaluated.gradients[1], &by_y, 1e-12);
    }
}

/// Gradients of captured weights are summed over steps in `f32`, not in the narrow type.
#[test]
fn sums_over_steps_are_wide() {
    const MANY: Axis = axis("many", 1024);
    let weight = any(&[]);
    let steps = crate::harness::given(&[MANY], &[1.0; 1024]);
    let sum = case("sum", vec![weight, steps], |region, x| {
        let weight = x[0];
        let zero = region.full(weight.dtype(), &[], 0.0);
        let ([sum], []) = region.scan(ScanOptions::over(MANY), [zero], &leaves(&x[1..]), |_, [sum], x| {
            ([sum + x[0].value * weight], [])
        });
        vec![sum / region.full(weight.dtype(), &[], 1.0_f64.cos())]
    });
    let narrow = Case {
        inputs: sum
            .inputs
            .iter()
            .map(|input| crate::harness::Argument { dtype: DType::BF16, ..input.clone() })
            .collect(),
        ..sum
    };
    let evaluated = evaluate("wide_sums", &[narrow]);
    assert_eq!(evaluated[0].gradients[0], array(DType::BF16, &[], &[1024.0]));
}
