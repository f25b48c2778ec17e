//! Programs partitioned over 8 virtual devices.

use std::sync::Arc;

use mt_ir::{Collective, CollectiveKind, Graph, ManualComputation, Op, Program, TensorType, Unary};
use mt_shape::{Axis, DType, HostArray, LogicalAxis, PartitionSpec, axis};
use mt_trace::{Memory, ProgramOptions, SavePolicy, ScanOptions, Tensor, program};

use crate::harness::{
    Compiled, array, assert_close, column_axis, leaves, mesh, numbers, options, options_on, row_axis, tensors,
};

const BATCH: Axis = axis("batch", 8);
const EMBED: Axis = axis("embed", 8);
const MLP: Axis = axis("mlp", 6);
const LAYERS: Axis = axis("layers", 3);

/// One step of gradient descent on scanned layers, with constraints inside and outside of the scan.
fn step(options: &ProgramOptions) -> Compiled {
    let program = program(options, |inputs| {
        let x = inputs.input("x", DType::F32, &[BATCH, EMBED], &[row_axis(), None], false);
        let logical: [&[Option<LogicalAxis>]; 2] =
            [&[None, row_axis(), column_axis()], &[None, column_axis(), row_axis()]];
        let shapes = [[LAYERS, EMBED, MLP], [LAYERS, MLP, EMBED]];
        let weights: Vec<Tensor<'_>> = (0..2)
            .map(|index| inputs.input("weight", DType::F32, &shapes[index], logical[index], true))
            .collect();
        let (loss, [], gradients) = inputs.region().value_and_grad(&leaves(&weights), |body, weights| {
            let options = ScanOptions::over(LAYERS)
                .saving(SavePolicy::Names([("hidden".to_owned(), Memory::Device)].into()));
            let ([last], []) = body.scan(options, [x], &weights, |_, [x], weights| {
                let up = weights[0].value.constrain(&[row_axis(), column_axis()]);
                let down = weights[1].value.constrain(&[column_axis(), row_axis()]);
                let hidden = up.dot(x, &["embed"]).constrain(&[row_axis(), column_axis()]).named("hidden");
                let next = x + down.dot(hidden.silu(), &["mlp"]);
                ([next.constrain(&[row_axis(), None])], [])
            });
            (last.square().mean(&["batch", "embed"]), [])
        });
        let mut outputs = vec![inputs.replicated("loss", loss)];
        for ((weight, gradient), logical) in weights.iter().zip(tensors(&gradients)).zip(logical) {
            outputs.push(inputs.output("weight", *weight - gradient * 0.1, logical));
        }
        outputs
    });
    Compiled::new(program.unwrap())
}

#[test]
fn sharded_steps_equal_those_of_one_device() {
    let inputs = [
        array(DType::F32, &[8, 8], &numbers(64, -1.0, 1.0)),
        array(DType::F32, &[3, 8, 6], &numbers(144, -0.5, 0.5)),
        array(DType::F32, &[3, 6, 8], &numbers(145, -0.5, 0.5)[..144]),
    ];
    let single = step(&options("single"));
    let sharded = step(&options_on("sharded", mesh()));
    let expected = single.run(&inputs);
    for (actual, expected) in sharded.run(&inputs).iter().zip(&expected) {
        assert_close("sharded", actual, &expected.to_f64(), 1e-6);
    }
    // Donated weights share memory with the new ones: the whole array on one device, an eighth on each of 8.
    assert_eq!(single.aliased_bytes(), 2 * 144 * 4);
    assert_eq!(sharded.aliased_bytes(), 2 * 144 * 4 / 8);
}

fn axes(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Runs a collective over `mesh_axes` inside a manual computation over those axes and the axes that the shardings name.
/// The argument, 8×6, and the result have the given shardings.
#[track_caller]
fn collective(
    name: &str,
    (kind, mesh_axes): (CollectiveKind, &[&str]),
    [input, output]: [[&[&str]; 2]; 2],
    result: [Axis; 2],
) -> Vec<f64> {
    let mut options = options_on(name, mesh());
    options.name = name.to_owned();
    let program = program(&options, |inputs| {
        let shape = [axis("rows", 8), axis("columns", 6)];
        let x = inputs.input("x", DType::F32, &shape, &[row_axis(), column_axis()], false);
        let sizes = |axes: &[&str]| -> usize {
            axes.iter().map(|axis| if *axis == "fsdp" { 4 } else { 2 }).product()
        };
        let mut body = Graph::new();
        let local = body.input(TensorType::new(DType::F32, [8 / sizes(input[0]), 6 / sizes(input[1])]));
        let group_size = sizes(mesh_axes);
        let mut manual = mesh_axes.to_vec();
        manual.extend(input.iter().chain(&output).flat_map(|axes| axes.iter()));
        manual.sort_unstable();
        manual.dedup();
        let kind = Collective { kind, mesh_axes: axes(mesh_axes), group_size };
        let sent = body.emit(Op::Unary(Unary::Negate), &[local]);
        let received = body.emit(Op::Collective(kind), &[sent]);
        body.set_outputs(vec![received]);
        let op = ManualComputation {
            body: Arc::new(body),
            manual_axes: manual.into_iter().map(|axis| (axis.to_owned(), sizes(&[axis]))).collect(),
            input_specs: vec![PartitionSpec(input.map(axes).to_vec())],
            output_specs: vec![PartitionSpec(output.map(axes).to_vec())],
        };
        vec![inputs.replicated("y", x.apply_one(Op::ManualComputation(op), &[], &result))]
    });
    let values: Vec<f64> = (0..48).map(f64::from).collect();
    Compiled::new(program.unwrap()).run(&[array(DType::F32, &[8, 6], &values)])[0].to_f64()
}

const SPLIT: [&[&str]; 2] = [&["fsdp"], &["tensor"]];
const ROWS: Axis = axis("rows", 8);
const COLUMNS: Axis = axis("columns", 6);

/// Element `index` of the argument, after the body negated it.
fn sent(row: usize, column: usize) -> f64 {
    -((row * 6 + column) as f64)
}

#[test]
fn all_reduce() {
    // Rows are summed over the four shards, so the result has two rows.
    let actual = collective(
        "all_reduce",
        (CollectiveKind::AllReduceSum, &["fsdp"]),
        [SPLIT, [&[], &["tensor"]]],
        [axis("pair", 2), COLUMNS],
    );
    let sum = |row: usize, column: usize| (0..4).map(|device| sent(device * 2 + row, column)).sum::<f64>();
    assert_eq!(actual, (0..12).map(|index| sum(index / 6, index % 6)).collect::<Vec<_>>());
}

#[test]
fn all_reduce_over_two_axes() {
    let actual = collective(
        "all_reduce_both",
        (CollectiveKind::AllReduceSum, &["tensor", "fsdp"]),
        [SPLIT, [&[], &[]]],
        [axis("pair", 2), axis("triple", 3)],
    );
    let sum = |row: usize, column: usize| {
        (0..8).map(|device| sent(device / 2 * 2 + row, device % 2 * 3 + column)).sum::<f64>()
    };
    assert_eq!(actual, (0..6).map(|index| sum(index / 3, index % 3)).collect::<Vec<_>>());
}

#[test]
fn all_gather() {
    let kind = CollectiveKind::AllGather { dimension: 0 };
    let actual = collective("all_gather", (kind, &["fsdp"]), [SPLIT, [&[], &["tensor"]]], [ROWS, COLUMNS]);
    assert_eq!(actual, (0..48).map(|index| sent(index / 6, index % 6)).collect::<Vec<_>>());
}

#[test]
fn reduce_scatter() {
    // Each device starts with all rows; each of a row's four copies adds to the sum.
    let kind = CollectiveKind::ReduceScatterSum { dimension: 0 };
    let actual =
        collective("reduce_scatter", (kind, &["fsdp"]), [[&[], &["tensor"]], SPLIT], [ROWS, COLUMNS]);
    assert_eq!(actual, (0..48).map(|index| 4.0 * sent(index / 6, index % 6)).collect::<Vec<_>>());
}

#[test]
fn all_to_all() {
    // From sharded columns to sharded rows: the array itself does not change.
    let kind = CollectiveKind::AllToAll { split_dimension: 0, concat_dimension: 1 };
    let actual = collective(
        "all_to_all",
        (kind, &["tensor"]),
        [[&[], &["tensor"]], [&["tensor"], &[]]],
        [ROWS, COLUMNS],
    );
    assert_eq!(actual, (0..48).map(|index| sent(index / 6, index % 6)).collect::<Vec<_>>());
}

#[test]
fn permute() {
    // Every shard of rows moves to the next device; the first device receives none.
    let kind = CollectiveKind::Permute { pairs: vec![(0, 1), (1, 2), (2, 3)] };
    let actual = collective("permute", (kind, &["fsdp"]), [SPLIT, SPLIT], [ROWS, COLUMNS]);
    let moved = |row: usize, column: usize| if row < 2 { 0.0 } else { sent(row - 2, column) };
    assert_eq!(actual, (0..48).map(|index| moved(index / 6, index % 6)).collect::<Vec<_>>());
}

#[test]
fn arrays_are_split_and_joined() {
    let program = program(&options_on("copy", mesh()), |inputs| {
        let x = inputs.input("x", DType::F32, &[ROWS, COLUMNS], &[column_axis(), row_axis()], false);
        vec![inputs.output("y", x * 2.0, &[row_axis(), column_axis()])]
    });
    let values: Vec<f64> = (0..48).map(f64::from).collect();
    let input: HostArray = array(DType::F32, &[8, 6], &values);
    let doubled: Vec<f64> = values.iter().map(|value| value * 2.0).collect();
    assert_eq!(Compiled::new(program.unwrap()).run(&[input])[0].to_f64(), doubled);
}

/// Axes that are not manual belong to the partitioner, inside the body too.
#[test]
fn other_axes_stay_automatic() {
    let rows: [&[&str]; 2] = [&["fsdp"], &[]];
    let gather = CollectiveKind::AllGather { dimension: 0 };
    let actual = collective("gather_rows", (gather, &["fsdp"]), [rows, [&[], &[]]], [ROWS, COLUMNS]);
    assert_eq!(actual, (0..48).map(|index| sent(index / 6, index % 6)).collect::<Vec<_>>());

    let scatter = CollectiveKind::ReduceScatterSum { dimension: 0 };
    let actual = collective("scatter_rows", (scatter, &["fsdp"]), [[&[], &[]], rows], [ROWS, COLUMNS]);
    assert_eq!(actual, (0..48).map(|index| 4.0 * sent(index / 6, index % 6)).collect::<Vec<_>>());
}

/// Per-device code written with handles: the device number, the sum over the group, and the device's shard of the
/// total.
#[test]
fn each_device_runs_its_shard() {
    let program = program(&options_on("shards", mesh()), |inputs| {
        let x = inputs.input("x", DType::F32, &[ROWS, COLUMNS], &[row_axis(), column_axis()], false);
        let shards = x.shards(&[row_axis(), column_axis()]).with_axes_like("rows", &["device"]);
        let rows = shards.along("rows").unwrap();
        assert_eq!(
            (rows.size(), shards.along("columns").unwrap().size(), shards.along("batch")),
            (4, 2, None)
        );
        let numbers = inputs.region().iota(DType::F32, axis("device", 4));
        let [weighted, sums, scattered] = shards.run([x, numbers], |[x, number]| {
            assert_eq!((x.axes()[0].size, x.axes()[1].size), (2, 3));
            // Constraints have no effect on a single device.
            let weighted = (x * number.squeeze("device")).constrain(&[row_axis(), None]);
            let sums = rows.all_reduce(x).rename("rows", "pair");
            [weighted, sums, rows.reduce_scatter(rows.all_gather(x, "rows"), "rows")]
        });
        [weighted, sums, scattered].map(|tensor| inputs.replicated("y", tensor)).into()
    });
    let values: Vec<f64> = (0..48).map(f64::from).collect();
    let input: HostArray = array(DType::F32, &[8, 6], &values);
    let results: Vec<Vec<f64>> =
        Compiled::new(program.unwrap()).run(&[input]).iter().map(HostArray::to_f64).collect();
    let weighted: Vec<f64> =
        values.iter().enumerate().map(|(index, value)| value * (index / 12) as f64).collect();
    assert_eq!(results[0], weighted);
    let sum = |index: usize| (0..4).map(|device| values[device * 12 + index]).sum::<f64>();
    assert_eq!(results[1], (0..12).map(sum).collect::<Vec<_>>());
    assert_eq!(results[2], values.iter().map(|value| value * 4.0).collect::<Vec<_>>());
}

/// Per-device code has a derivative only if one is given.
#[test]
fn shards_are_of_one_size() {
    let error = program(&options_on("uneven", mesh()), |inputs| {
        let x = inputs.input("x", DType::F32, &[ROWS, COLUMNS], &[row_axis(), None], false);
        let shards = x.shards(&[row_axis(), None]).with_axes_like("rows", &["odd"]);
        let odd = inputs.region().iota(DType::F32, axis("odd", 6));
        let [odd] = shards.run([odd], |[odd]| [odd]);
        vec![inputs.replicated("odd", odd)]
    })
    .unwrap_err();
    assert!(error.to_string().contains("axis `odd=6` is not divisible by 4 devices"), "{error}");
}

fn layer<'t>(x: Tensor<'t>, weight: Tensor<'t>) -> Tensor<'t> {
    let hidden = weight.dot(x, &["embed"]).silu();
    hidden.contract(weight, &["mlp"])
}

/// The loss of a layer and the gradients of its input and weight. The layer is per-device code if there are several
/// devices: it gathers rows, sums over columns, and scatters the sums over rows.
fn manual_layer(options: &ProgramOptions) -> Compiled {
    let program = program(options, |inputs| {
        let x = inputs.input("x", DType::F32, &[BATCH, EMBED], &[row_axis(), None], false);
        let weight = inputs.input("weight", DType::F32, &[EMBED, MLP], &[None, column_axis()], false);
        let (loss, [], gradients) = inputs.region().value_and_grad(&leaves(&[x, weight]), |_, leaves| {
            let [x, weight] = [leaves[0].value, leaves[1].value];
            let shards = x.shards(&[row_axis(), None]).and(weight.shards(&[None, column_axis()]));
            let (rows, columns) = (shards.along("batch").cloned(), shards.along("mlp").cloned());
            let output = match (rows, columns) {
                (Some(rows), Some(columns)) => {
                    let [output] = shards.run([x, weight], |[x, weight]| {
                        let partial = layer(rows.all_gather(x, "batch"), weight);
                        // All rows of devices compute the same sums.
                        [rows.reduce_scatter(columns.all_reduce(partial), "batch") / rows.size() as f64]
                    });
                    output
                }
                _ => layer(x, weight),
            };
            let [scaled] = shards.run([output], |[output]| [(output * 1.5).sin()]);
            (scaled.square().sum_all(), [])
        });
        let gradients = tensors(&gradients);
        vec![
            inputs.replicated("loss", loss),
            inputs.replicated("of_x", gradients[0]),
            inputs.replicated("of_weight", gradients[1]),
        ]
    });
    Compiled::new(program.unwrap())
}

#[test]
fn gradients_of_per_device_code_equal_those_of_one_device() {
    let inputs = [
        array(DType::F32, &[8, 8], &numbers(64, -1.0, 1.0)),
        array(DType::F32, &[8, 6], &numbers(48, -0.5, 0.5)),
    ];
    let expected = manual_layer(&options("single_manual")).run(&inputs);
    let actual = manual_layer(&options_on("sharded_manual", mesh())).run(&inputs);
    for (name, (actual, expected)) in ["loss", "x", "weight"].iter().zip(actual.iter().zip(&expected)) {
        assert_close(name, actual, &expected.to_f64(), 1e-5);
    }
}

/// The loss of a recomputed layer and its gradients, as above, with the named tensors of its per-device code kept.
fn recomputed_layer(options: &ProgramOptions, kept: &[&str]) -> Program {
    let save = SavePolicy::Names(kept.iter().map(|name| ((*name).to_owned(), Memory::Device)).collect());
    let program = program(options, |inputs| {
        let x = inputs.input("x", DType::F32, &[BATCH, EMBED], &[row_axis(), None], false);
        let weight = inputs.input("weight", DType::F32, &[EMBED, MLP], &[None, column_axis()], false);
        let (loss, [], gradients) =
            inputs.region().value_and_grad(&leaves(&[x, weight]), |region, leaves_of| {
                let weight = leaves(&[leaves_of[1].value]);
                let [output] = region.remat(save, [leaves_of[0].value], &weight, |_, [x], weights| {
                    let weight = weights[0].value;
                    let shards = x.shards(&[row_axis(), None]).and(weight.shards(&[None, column_axis()]));
                    let (rows, columns) = (shards.along("batch").cloned(), shards.along("mlp").cloned());
                    shards.run([x, weight], |[x, weight]| {
                        let x = rows.as_ref().map_or(x, |rows| rows.all_gather(x, "batch"));
                        let hidden = weight.dot(x, &["embed"]).named("hidden");
                        let active = (hidden.silu() * 3.0).named("active").sin();
                        let partial = active.contract(weight, &["mlp"]);
                        match (&rows, &columns) {
                            // All rows of devices compute the same sums.
                            (Some(rows), Some(columns)) => [rows
                                .reduce_scatter(columns.all_reduce(partial), "batch")
                                / rows.size() as f64],
                            _ => [partial],
                        }
                    })
                });
                (output.square().sum_all(), [])
            });
        let gradients = tensors(&gradients);
        vec![
            inputs.replicated("loss", loss),
            inputs.replicated("of_x", gradients[0]),
            inputs.replicated("of_weight", gradients[1]),
        ]
    });
    program.unwrap()
}

/// Tensors with a name inside per-device code are kept, whatever depends on each other, and not computed again.
#[test]
fn named_tensors_of_per_device_code_are_kept() {
    let inputs = [
        array(DType::F32, &[8, 8], &numbers(64, -1.0, 1.0)),
        array(DType::F32, &[8, 6], &numbers(48, -0.5, 0.5)),
    ];
    let expected = Compiled::new(recomputed_layer(&options("single_kept"), &[])).run(&inputs);
    let mut products = Vec::new();
    for kept in [&[][..], &["hidden"], &["active"], &["hidden", "active"], &["other"]] {
        let program = recomputed_layer(&options_on("sharded_kept", mesh()), kept);
        products.push(program.text.matches("stablehlo.dot_general").count());
        let actual = Compiled::new(program).run(&inputs);
        for (name, (actual, expected)) in ["loss", "x", "weight"].iter().zip(actual.iter().zip(&expected)) {
            assert_close(&format!("{name} with {kept:?}"), actual, &expected.to_f64(), 1e-5);
        }
    }
    // Without `hidden` its product is computed again, for the derivative of the activation. `active` alone spares nothing.
    let [none, hidden, active, both, other] = products[..] else { unreachable!() };
    assert_eq!((hidden, active, both, other), (none - 1, none, none - 1, none));
}
