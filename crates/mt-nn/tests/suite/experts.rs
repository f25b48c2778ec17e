//! Experts computed in different ways, compared with each other and with plain sums on the host.

use std::sync::Arc;

use mt_ir::{CpuKernels, Target};
use mt_nn::{
    Activation, Weight,
    axes::{BATCH, EMBED, EXPERT, MLP, POSITION, ROW},
    experts::{
        ExpertComputation, ExpertGroups, ExpertOptions, Experts, GatedUnit, GroupScore, Router, RouterBias,
        RouterOptions, RowGroups, Scores, grouped_dot,
    },
};
use mt_shape::{Axis, DType, HostArray, LogicalRules, Mesh, Placement, axis};
use mt_trace::{ProgramOptions, Tensor};

use crate::harness::{Argument, assert_close, gradients, gradients_by, numbers, run, text_for};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    length: usize,
    embed: usize,
    mlp: usize,
    experts: usize,
    chosen: usize,
}

const CASES: [Sizes; 6] = [
    Sizes { batch: 2, length: 13, embed: 24, mlp: 20, experts: 5, chosen: 2 },
    // More experts than tokens.
    Sizes { batch: 1, length: 3, embed: 8, mlp: 16, experts: 11, chosen: 3 },
    // One expert.
    Sizes { batch: 2, length: 7, embed: 8, mlp: 12, experts: 1, chosen: 1 },
    // All experts are chosen.
    Sizes { batch: 1, length: 9, embed: 8, mlp: 8, experts: 4, chosen: 4 },
    // One token.
    Sizes { batch: 1, length: 1, embed: 16, mlp: 8, experts: 6, chosen: 2 },
    // Groups of more rows than a tile has.
    Sizes { batch: 3, length: 301, embed: 8, mlp: 8, experts: 2, chosen: 1 },
];

impl Sizes {
    fn router(self) -> RouterOptions {
        RouterOptions {
            experts: axis(EXPERT, self.experts),
            num_chosen: self.chosen,
            scores: Scores::SoftmaxOfChosen,
            bias: RouterBias::OfLogits,
            normalized: false,
            scale: 1.0,
            groups: None,
            in_f32: true,
        }
    }

    fn options(self, computation: ExpertComputation) -> ExpertOptions {
        ExpertOptions {
            router: self.router(),
            unit: GatedUnit::Product([Activation::Silu, Activation::Linear]),
            weighs_inputs: false,
            functions_in_f32: false,
            sums_in_f32: true,
            computation,
            merges_inputs: false,
        }
    }

    /// The input, the router's weight and bias, and the weights and biases of the experts.
    fn arguments(self) -> Vec<Argument> {
        let Self { batch, length, embed, mlp, experts, .. } = self;
        let (b, p, d, f, e) = (
            axis(BATCH, batch),
            axis(POSITION, length),
            axis(EMBED, embed),
            axis(MLP, mlp),
            axis(EXPERT, experts),
        );
        let shapes: [&[Axis]; 9] =
            [&[b, p, d], &[d, e], &[e], &[e, d, f], &[e, f], &[e, d, f], &[e, f], &[e, f, d], &[e, d]];
        let argument = |(seed, axes): (usize, &&[Axis])| {
            let dims: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
            (axes.to_vec(), numbers(seed as u64, &dims))
        };
        shapes.iter().enumerate().map(argument).collect()
    }
}

fn experts<'t>(t: &[Tensor<'t>]) -> Experts<Tensor<'t>> {
    Experts {
        gate: Router { kernel: Weight::dense(t[1]), bias: Some(t[2]) },
        tid2eid: None,
        per_expert_scale: None,
        wi_0: Weight::dense(t[3]),
        wi_0_bias: Some(t[4]),
        wi_1: Weight::dense(t[5]),
        wi_1_bias: Some(t[6]),
        wo: Weight::dense(t[7]),
        wo_bias: Some(t[8]),
    }
}

fn grouped<'t>(t: &[Tensor<'t>]) -> Tensor<'t> {
    grouped_dot(t[0], t[1], RowGroups { sizes: t[2], usual_share: 1.0 }, EMBED)
}

fn output<'t>(t: &[Tensor<'t>], options: &ExpertOptions) -> Tensor<'t> {
    experts(t).forward(t[0], options).0
}

#[test]
fn all_computations_are_the_same_function() {
    for sizes in CASES {
        let arguments = sizes.arguments();
        let cotangent = numbers(99, &[sizes.batch, sizes.length, sizes.embed]);
        for weighs_inputs in [false, true] {
            for unit in [sizes.options(ExpertComputation::All).unit, GatedUnit::ClampedSwish { limit: 0.7 }] {
                let of = |computation| {
                    let options = ExpertOptions { weighs_inputs, unit, ..sizes.options(computation) };
                    gradients("experts", &arguments, &cotangent, |t| output(t, &options))
                };
                let (expected, expected_gradients) = of(ExpertComputation::All);
                // With this factor an expert has a slot for every choice.
                let unlimited = ExpertComputation::Capacity(sizes.experts as f64);
                for computation in [ExpertComputation::Sorted, unlimited] {
                    let what = format!("{computation:?} of {sizes:?}, {weighs_inputs}, {unit:?}");
                    let (result, own_gradients) = of(computation);
                    assert_close(&what, &result, &expected, 2e-5);
                    for (index, (own, expected)) in own_gradients.iter().zip(&expected_gradients).enumerate()
                    {
                        assert_close(&format!("{what}: gradient {index}"), own, expected, 2e-5);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_are_multiplied_by_the_matrices_of_their_groups() {
    let (depth, width) = (6, 5);
    for sizes in [vec![3, 0, 4, 1], vec![0, 0, 7], vec![600], vec![1], vec![130, 0, 257, 3]] {
        let count = sizes.iter().sum::<i32>() as usize;
        let experts = sizes.len();
        let rows = numbers(1, &[count, depth]);
        let matrices = numbers(2, &[experts, depth, width]);
        let arguments = vec![
            (vec![axis(ROW, count), axis(EMBED, depth)], rows.clone()),
            (vec![axis(EXPERT, experts), axis(EMBED, depth), axis(MLP, width)], matrices.clone()),
            (vec![axis(EXPERT, experts)], HostArray::from_slice(DType::I32, &[experts], &sizes).unwrap()),
        ];
        let result = run("grouped", &arguments, |_, t| vec![grouped(&t)]).remove(0).to_f64();
        let (rows, matrices) = (rows.to_f64(), matrices.to_f64());
        let groups = sizes.iter().enumerate().flat_map(|(group, size)| vec![group; *size as usize]);
        for (row, group) in groups.enumerate() {
            for column in 0..width {
                let expected: f64 = (0..depth)
                    .map(|k| rows[row * depth + k] * matrices[(group * depth + k) * width + column])
                    .sum();
                let own = result[row * width + column];
                assert!((own - expected).abs() < 1e-4, "row {row} of {sizes:?}: {own} instead of {expected}");
            }
        }
    }
}

/// Programs for TPUs name the operation that their compiler knows, with the loop over tiles as its meaning.
#[test]
fn tpus_multiply_groups_by_an_operation_of_their_own() {
    const COMPOSITE: &str = "stablehlo.composite \"chlo.ragged_dot\"";
    // The last rows belong to no group.
    for (sizes, rest) in [(vec![3, 0, 4, 1], 0), (vec![130, 0, 257, 3], 45), (vec![0, 2], 1)] {
        let (experts, count) = (sizes.len(), sizes.iter().sum::<i32>() as usize + rest);
        let arguments = vec![
            (vec![axis(ROW, count), axis(EMBED, 6)], numbers(1, &[count, 6])),
            (vec![axis(EXPERT, experts), axis(EMBED, 6), axis(MLP, 5)], numbers(2, &[experts, 6, 5])),
            (vec![axis(EXPERT, experts)], HostArray::from_slice(DType::I32, &[experts], &sizes).unwrap()),
        ];
        let cotangent = numbers(3, &[count, 5]);
        let of = |target| {
            let program = ProgramOptions::new("groups", target);
            gradients_by(&program, &arguments, &cotangent, |t| {
                grouped_dot(t[0], t[1], RowGroups { sizes: t[2], usual_share: 0.5 }, EMBED)
            })
        };
        let (expected, expected_gradients) = of(Target::CPU);
        let (result, own_gradients) = of(Target::Tpu);
        assert_close(&format!("{sizes:?}"), &result, &expected, 1e-6);
        for (index, (own, expected)) in own_gradients.iter().zip(&expected_gradients).enumerate() {
            assert_close(&format!("{sizes:?}: gradient {index}"), own, expected, 1e-6);
        }
        for (target, number) in [(Target::Tpu, 1), (Target::Gpu, 0), (Target::CPU, 0)] {
            let text = text_for(target, &arguments, |_, t| vec![grouped(&t)]);
            assert_eq!(text.matches(COMPOSITE).count(), number, "{target:?}");
        }
    }
}

/// Routes tokens whose logits are given, on the host.
fn routed(logits: &[f64], bias: &[f64], options: &RouterOptions) -> Vec<(usize, f64)> {
    let experts = options.experts.size;
    let with = |use_of_bias| if options.bias == use_of_bias { bias.to_vec() } else { vec![0.0; experts] };
    let logits: Vec<f64> = logits.iter().zip(with(RouterBias::OfLogits)).map(|(l, b)| l + b).collect();
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let scores: Vec<f64> = logits
        .iter()
        .map(|logit| match options.scores {
            Scores::Softmax => logit.exp() / total,
            Scores::SoftmaxOfChosen => logit.exp(),
            Scores::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
            Scores::SqrtSoftplus => (1.0 + logit.exp()).ln().sqrt(),
        })
        .collect();
    // The logits themselves rank the experts if their softmax is only that of the chosen ones.
    let ranks = if options.scores == Scores::SoftmaxOfChosen { &logits } else { &scores };
    let mut preference: Vec<f64> =
        ranks.iter().zip(with(RouterBias::OfChoice)).map(|(rank, bias)| rank + bias).collect();
    if let Some(groups) = options.groups {
        let members = experts / groups.count;
        let score = |group: usize| {
            let mut own = preference[group * members..(group + 1) * members].to_vec();
            own.sort_by(|a, b| b.total_cmp(a));
            match groups.score {
                GroupScore::Largest => own[0],
                GroupScore::SumOfTwo => own[0] + own[1],
            }
        };
        let mut order: Vec<usize> = (0..groups.count).collect();
        order.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
        let excluded: Vec<usize> = order[groups.num_chosen..].to_vec();
        for group in excluded {
            preference[group * members..(group + 1) * members].fill(f64::NEG_INFINITY);
        }
    }
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by(|a, b| preference[*b].total_cmp(&preference[*a]));
    order.truncate(options.num_chosen);
    let sum: f64 = order.iter().map(|expert| scores[*expert]).sum();
    let divides = options.normalized || options.scores == Scores::SoftmaxOfChosen;
    let divisor = if divides { sum } else { 1.0 };
    order.into_iter().map(|expert| (expert, scores[expert] / divisor * options.scale)).collect()
}

#[test]
fn routers_follow_their_formulas() {
    let sizes = Sizes { batch: 2, length: 9, embed: 16, mlp: 4, experts: 12, chosen: 3 };
    let arguments = sizes.arguments();
    let groups = |score| Some(ExpertGroups { count: 4, num_chosen: 2, score });
    let mut cases = Vec::new();
    for scores in [Scores::Softmax, Scores::SoftmaxOfChosen, Scores::Sigmoid, Scores::SqrtSoftplus] {
        for bias in [RouterBias::OfLogits, RouterBias::OfChoice] {
            for (normalized, scale) in [(false, 1.0), (true, 2.5)] {
                for groups in [None, groups(GroupScore::Largest), groups(GroupScore::SumOfTwo)] {
                    cases.push(RouterOptions { scores, bias, normalized, scale, groups, ..sizes.router() });
                }
            }
        }
    }
    let (x, kernel, bias) = (arguments[0].1.to_f64(), arguments[1].1.to_f64(), arguments[2].1.to_f64());
    for options in cases {
        let results = run("router", &arguments, |_, t| {
            let routing = experts(&t).gate.forward(t[0], None, None, &options);
            vec![routing.chosen, routing.weights]
        });
        let (chosen, weights) = (results[0].to_f64(), results[1].to_f64());
        for token in 0..sizes.batch * sizes.length {
            let logits: Vec<f64> = (0..sizes.experts)
                .map(|e| {
                    (0..sizes.embed).map(|d| x[token * sizes.embed + d] * kernel[d * sizes.experts + e]).sum()
                })
                .collect();
            for (choice, (expert, weight)) in routed(&logits, &bias, &options).into_iter().enumerate() {
                let place = token * sizes.chosen + choice;
                assert_eq!(chosen[place] as usize, expert, "token {token}, {options:?}");
                assert!((weights[place] - weight).abs() < 1e-5, "token {token}, {options:?}");
            }
        }
    }
}

#[test]
fn even_routing_has_a_balance_loss_of_its_number_of_choices() {
    let sizes = Sizes { batch: 2, length: 12, embed: 6, mlp: 4, experts: 6, chosen: 1 };
    let mut arguments = sizes.arguments();
    // Token `i` prefers expert `i mod 6`.
    let one_hot = |rows: usize| -> Vec<f32> {
        (0..rows * 6).map(|index| if index / 6 % 6 == index % 6 { 1.0 } else { 0.0 }).collect()
    };
    arguments[0].1 = HostArray::from_slice(DType::F32, &[2, 12, 6], &one_hot(24)).unwrap();
    arguments[1].1 = HostArray::from_slice(DType::F32, &[6, 6], &one_hot(6)).unwrap();
    arguments[2].1 = HostArray::zeros(DType::F32, &[6]);
    let loss = run("balance", &arguments, |region, t| {
        let is_token = region.full(DType::F32, &t[0].axes()[..2], 1.0);
        vec![experts(&t).gate.forward(t[0], None, None, &sizes.router()).balance_loss(is_token)]
    });
    assert!((loss[0].to_f64()[0] - 1.0).abs() < 1e-6, "{:?}", loss[0].to_f64());
}

#[test]
fn losses_and_loads_count_tokens_without_padding() {
    const CAPACITY: f64 = 0.75;
    for sizes in CASES {
        let mut arguments = sizes.arguments();
        let (rows, length) = (sizes.batch, sizes.length);
        // The last row is padding if there are several; the others end with padding.
        let is_token =
            |row: usize, position: usize| (rows == 1 || row + 1 < rows) && position <= length / (row + 1);
        let mask: Vec<f32> = (0..rows * length)
            .map(|index| if is_token(index / length, index % length) { 1.0 } else { 0.0 })
            .collect();
        let axes = arguments[0].0[..2].to_vec();
        arguments.push((axes, HostArray::from_slice(DType::F32, &[rows, length], &mask).unwrap()));
        let results = run("loads", &arguments, |_, t| {
            let routing = experts(&t).gate.forward(t[0], None, None, &sizes.router());
            let is_token = t[9];
            let losses = [routing.balance_loss(is_token), routing.z_loss(is_token)];
            let loads = [routing.loads(is_token), routing.dropped(is_token, CAPACITY)];
            [&[routing.chosen, routing.logits], losses.as_slice(), &loads].concat()
        });
        let [chosen, logits, balance, z_loss, loads, dropped] =
            [0, 1, 2, 3, 4, 5].map(|index: usize| results[index].to_f64());
        let (count, k) = (sizes.experts, sizes.chosen);
        let slots = ((length * k).div_ceil(count) as f64 * CAPACITY).max(CAPACITY).ceil().max(1.0);
        let mut expected = (0.0, 0.0, vec![0.0; count], 0.0);
        for row in 0..rows {
            let tokens: Vec<usize> =
                (0..length).filter(|position| is_token(row, *position)).map(|at| row * length + at).collect();
            let number = tokens.len().max(1) as f64;
            let (mut density, mut probability) = (vec![0.0; count], vec![0.0; count]);
            for token in &tokens {
                let own = &logits[token * count..][..count];
                let sum: f64 = own.iter().map(|logit| logit.exp()).sum();
                expected.1 += sum.ln().powi(2) / number / rows as f64;
                own.iter().zip(&mut probability).for_each(|(logit, p)| *p += logit.exp() / sum / number);
                chosen[token * k..][..k].iter().for_each(|expert| density[*expert as usize] += 1.0);
            }
            for expert in 0..count {
                expected.2[expert] += density[expert];
                expected.3 += (density[expert] - slots).max(0.0);
                let product = density[expert] / number * probability[expert];
                expected.0 += product * count as f64 / rows as f64;
            }
        }
        let (expected_balance, expected_z_loss, expected_loads, expected_dropped) = expected;
        assert!((balance[0] - expected_balance).abs() < 1e-5, "{sizes:?}: {balance:?}, {expected_balance}");
        assert!((z_loss[0] - expected_z_loss).abs() < 1e-4, "{sizes:?}: {z_loss:?}, {expected_z_loss}");
        assert_eq!(loads, expected_loads, "{sizes:?}");
        assert_eq!(dropped, [expected_dropped], "{sizes:?}");
    }
}

#[test]
fn later_choices_of_full_experts_are_dropped() {
    // All tokens choose the first expert, which has two slots for four tokens.
    let sizes = Sizes { batch: 1, length: 4, embed: 8, mlp: 4, experts: 2, chosen: 1 };
    let mut arguments = sizes.arguments();
    arguments[2].1 = HostArray::from_slice(DType::F32, &[2], &[100.0_f32, 0.0]).unwrap();
    let of = |computation| {
        let options = sizes.options(computation);
        run("capacity", &arguments, |_, t| vec![output(&t, &options)]).remove(0).to_f64()
    };
    let (all, limited) = (of(ExpertComputation::All), of(ExpertComputation::Capacity(1.0)));
    let half = 2 * sizes.embed;
    assert!(all[..half].iter().zip(&limited).all(|(a, b)| (a - b).abs() < 1e-5));
    assert!(limited[half..].iter().all(|value| *value == 0.0));
    assert!(all[half..].iter().any(|value| value.abs() > 1e-3));
}

#[test]
fn kernels_do_what_programs_do() {
    for sizes in CASES {
        let arguments = sizes.arguments();
        let cotangent = numbers(99, &[sizes.batch, sizes.length, sizes.embed]);
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 3e-2)] {
            let of = |target: Target| {
                gradients_by(&ProgramOptions::new("experts", target), &arguments, &cotangent, |t| {
                    let options = sizes.options(ExpertComputation::Sorted);
                    let weights = experts(t);
                    weights.forward(t[0].cast(dtype), &options).0
                })
            };
            let ((with, with_gradients), (without, gradients)) = (of(KERNELS), of(Target::CPU));
            let what = format!("{sizes:?} of {dtype}");
            assert_close(&what, &with, &without, tolerance);
            for (index, (with, without)) in with_gradients.iter().zip(&gradients).enumerate() {
                assert_close(&format!("{what}: gradient {index}"), with, without, tolerance);
            }
        }
        let text =
            text_for(KERNELS, &arguments, |_, t| vec![output(&t, &sizes.options(ExpertComputation::Sorted))]);
        assert_eq!(text.matches("maxtext.grouped_dot").count(), 3);
    }
}

fn placement(mesh: &[(&str, usize)]) -> Arc<Placement> {
    let mesh = Mesh::new(mesh.iter().map(|(name, size)| ((*name).to_owned(), *size))).unwrap();
    let batch: &[&str] = &["fsdp", "expert"];
    let rules: [(&str, &[&str]); 8] = [
        ("activation_batch", batch),
        ("activation_batch_moe", batch),
        ("activation_norm_length", &["context"]),
        ("activation_length_moe", &["context"]),
        ("activation_embed", &["tensor"]),
        ("activation_exp", &["expert"]),
        ("activation_mlp_moe", &["tensor"]),
        ("activation_length", &["context"]),
    ];
    let rules =
        rules.map(|(name, axes)| (name.to_owned(), axes.iter().map(|axis| (*axis).to_owned()).collect()));
    Arc::new(Placement::new(mesh, LogicalRules(rules.into())))
}

#[test]
fn experts_on_several_devices_equal_those_on_one() {
    let sizes = Sizes { batch: 8, length: 12, embed: 8, mlp: 12, experts: 8, chosen: 3 };
    // Too few sequences for the mesh axis `expert`, and experts that it does not divide.
    let (few, odd) = (Sizes { batch: 2, ..sizes }, Sizes { experts: 6, ..sizes });
    let cases: [(&[(&str, usize)], Sizes); 8] = [
        (&[("fsdp", 8)], sizes),
        (&[("expert", 8)], sizes),
        (&[("fsdp", 2), ("expert", 4)], sizes),
        (&[("fsdp", 2), ("tensor", 2), ("expert", 2)], sizes),
        (&[("context", 4), ("expert", 2)], sizes),
        (&[("expert", 4)], few),
        (&[("expert", 4), ("tensor", 2)], odd),
        (&[("tensor", 4)], sizes),
    ];
    for (mesh, sizes) in cases {
        let arguments = sizes.arguments();
        let cotangent = numbers(99, &[sizes.batch, sizes.length, sizes.embed]);
        for computation in [
            ExpertComputation::Sorted,
            ExpertComputation::All,
            ExpertComputation::Capacity(sizes.experts as f64),
        ] {
            for weighs_inputs in [false, true] {
                let options = ExpertOptions { weighs_inputs, ..sizes.options(computation) };
                let of = |placement: Arc<Placement>| {
                    let program = ProgramOptions { placement, ..ProgramOptions::new("experts", Target::CPU) };
                    gradients_by(&program, &arguments, &cotangent, |t| output(t, &options))
                };
                let (expected, expected_gradients) = of(Arc::new(Placement::single()));
                let (result, own_gradients) = of(placement(mesh));
                let what = format!("{computation:?} of {sizes:?} on {mesh:?}, {weighs_inputs}");
                assert_close(&what, &result, &expected, 1e-5);
                for (index, (own, expected)) in own_gradients.iter().zip(&expected_gradients).enumerate() {
                    assert_close(&format!("{what}: gradient {index}"), own, expected, 2e-5);
                }
            }
        }
    }
}
