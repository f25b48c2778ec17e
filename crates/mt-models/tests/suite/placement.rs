//! Training on 8 devices equals training on one, and each device holds its share of the parameters.

use mt_ir::Program;
use mt_models::{Forward, Model};
use mt_nn::token_cross_entropy;
use mt_optim::{AdamW, Moments, WarmupCosine, clip_by_global_norm, global_norm};
use mt_runtime::{Array, CompileSettings, Input, testing::cpu};
use mt_shape::{DType, Placement};
use mt_trace::program;
use std::sync::Arc;

use crate::harness::{Batch, Parameters, declare, declare_batch, model, options, parameters, placement};

const NUM_STEPS: usize = 3;
const ROWS: usize = 8;
const LENGTH: usize = 24;

const OPTIMIZER: AdamW = AdamW {
    b1: 0.9,
    b2: 0.95,
    epsilon: 1e-8,
    epsilon_root: 0.0,
    weight_decay: 0.1,
    first_moment_dtype: DType::F32,
};
const SCHEDULE: WarmupCosine =
    WarmupCosine { peak: 1e-2, warmup_steps: 1, total_steps: 10, final_fraction: 0.1 };

/// A training step: state and batch to the next state and the loss.
fn step_program(model: &dyn Model, placement: &Arc<Placement>) -> Program {
    let specs = model.parameters();
    program(&options("train_step", placement.clone()), |inputs| {
        let parameters = declare(inputs, "params", &specs, true);
        let first = declare(inputs, "mu", &specs, true);
        let moments = Moments { first, second: declare(inputs, "nu", &specs, true) };
        let step = inputs.input("step", DType::I32, &[], &[], true);
        let (tokens, [targets, segmentation]) = declare_batch(inputs, ROWS, LENGTH);
        let region = inputs.region();
        let dropout = Some(region.key(4).fold_in(step));
        let (loss, [], gradients) =
            region.value_and_grad(&Parameters(parameters.clone()), |_, parameters| {
                let (logits, _) =
                    model.logits(&parameters.0, tokens, Forward { dropout, ..Forward::default() });
                (token_cross_entropy(logits, targets, segmentation).mean(), [])
            });
        let gradients: Vec<_> = gradients
            .0
            .iter()
            .zip(&specs)
            .map(|(gradient, (_, spec))| gradient.constrain(&spec.logical_axes))
            .collect();
        let clipped = clip_by_global_norm(&gradients, global_norm(&gradients), 1.0);
        let (next, moments) = OPTIMIZER.update(&parameters, &clipped, &moments, step, SCHEDULE.at(step));
        let state = next.iter().chain(&moments.first).chain(&moments.second);
        let logical = specs.iter().cycle().map(|(_, spec)| &spec.logical_axes);
        let mut outputs: Vec<_> =
            state.zip(logical).map(|(tensor, logical)| inputs.output("state", *tensor, logical)).collect();
        outputs.push(inputs.replicated("step", step + 1.0));
        outputs.push(inputs.replicated("loss", loss));
        outputs
    })
    .unwrap()
}

/// The losses of each step, and the bytes of the state, without the step's number, on each device.
fn train(model: &dyn Model, placement: &Arc<Placement>) -> (Vec<f64>, Vec<usize>) {
    let runtime = cpu(placement.mesh().num_devices());
    let step = runtime.compile(&step_program(model, placement), &CompileSettings::default()).unwrap();
    let values = parameters(model);
    let zeros: Vec<_> =
        values.iter().map(|value| mt_shape::HostArray::zeros(DType::F32, value.dims())).collect();
    let batch = Batch::packed(&[&[9, 15], &[24], &[5, 7], &[24], &[24], &[1, 23], &[20], &[24]], LENGTH, 256);
    let place = |index: usize, array: &mt_shape::HostArray| {
        Array::from_host(runtime, array, &step.inputs()[index].sharding).unwrap()
    };
    let count = mt_shape::HostArray::zeros(DType::I32, &[]);
    let state = [values, zeros.clone(), zeros, vec![count]].concat();
    let num_state = state.len();
    let mut state: Vec<Array> = state.iter().enumerate().map(|(index, array)| place(index, array)).collect();
    let batch: Vec<Array> =
        batch.arrays.iter().enumerate().map(|(index, array)| place(num_state + index, array)).collect();
    let mut losses = Vec::new();
    for _ in 0..NUM_STEPS {
        let inputs = state.into_iter().map(Input::Donate).chain(batch.iter().map(Input::Borrow)).collect();
        state = step.run(inputs).unwrap();
        losses.push(state.pop().unwrap().to_host().unwrap().to_f64()[0]);
    }
    let bytes = |device| state[..num_state - 1].iter().map(|array| array.bytes_on_device(device)).sum();
    (losses, (0..runtime.num_devices()).map(bytes).collect())
}

/// How much of a matrix and of a norm's vector a device holds.
#[derive(Clone, Copy)]
struct Share {
    matrices: usize,
    vectors: usize,
}

#[track_caller]
fn check(arguments: &[&str], mesh: &[&str], share: Share) {
    for scan in ["scan_layers=true", "scan_layers=false"] {
        let model = model(&[arguments, &[scan]].concat());
        let (expected, _) = train(&*model, &Arc::new(Placement::single()));
        let (actual, bytes) = train(&*model, &placement(mesh, 8));
        assert!(expected[NUM_STEPS - 1] < expected[0], "it learns: {expected:?}");
        for (step, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let error = (actual - expected).abs() / expected;
            assert!(error <= 1e-5, "{mesh:?} {scan}: loss {actual} of step {step} is not {expected}");
        }
        let expected: usize = model
            .parameters()
            .iter()
            .map(|(path, spec)| {
                let is_vector = path.segments().last().unwrap() == "scale";
                3 * 4 * spec.num_elements() / if is_vector { share.vectors } else { share.matrices }
            })
            .sum();
        assert!(bytes.iter().all(|bytes| *bytes == expected), "{mesh:?} {scan}: {bytes:?}, not {expected}");
    }
}

const FSDP: &[&str] = &["ici_fsdp_parallelism=8"];
const FSDP_AND_TENSOR: &[&str] = &["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"];
const DATA: &[&str] = &["ici_data_parallelism=8", "ici_fsdp_parallelism=1"];
const TENSOR: &[&str] = &["ici_tensor_parallelism=8", "ici_fsdp_parallelism=1"];

#[test]
fn fully_sharded() {
    check(&[], FSDP, Share { matrices: 8, vectors: 1 });
}

#[test]
fn fully_sharded_and_tensor_parallel() {
    check(&[], FSDP_AND_TENSOR, Share { matrices: 8, vectors: 2 });
}

#[test]
fn data_parallel() {
    check(&[], DATA, Share { matrices: 1, vectors: 1 });
}

#[test]
fn tensor_parallel() {
    let heads = ["base_num_query_heads=16", "base_num_kv_heads=8", "head_dim=8"];
    check(&heads, TENSOR, Share { matrices: 8, vectors: 8 });
}

#[test]
fn recomputed_with_dropout_and_blocks() {
    let arguments = [
        "remat_policy=full",
        "attention=flash",
        "enable_dropout=true",
        "dropout_rate=0.1",
        "logits_via_embedding=true",
    ];
    check(&arguments, FSDP_AND_TENSOR, Share { matrices: 8, vectors: 2 });
}

#[test]
fn heads_that_the_mesh_does_not_divide() {
    // Three heads on one cannot be split in two: attention's kernels are split over `fsdp` alone.
    let arguments = ["base_num_query_heads=3", "base_num_kv_heads=1"];
    let placement = placement(FSDP_AND_TENSOR, 8);
    for scan in ["scan_layers=true", "scan_layers=false"] {
        let model = model(&[&arguments[..], &[scan]].concat());
        let (expected, _) = train(&*model, &Arc::new(Placement::single()));
        let (actual, bytes) = train(&*model, &placement);
        for (actual, expected) in actual.iter().zip(&expected) {
            assert!((actual - expected).abs() <= 1e-5 * expected, "{scan}: {actual} is not {expected}");
        }
        let expected: usize = model
            .parameters()
            .iter()
            .map(|(path, spec)| {
                let is_attention = path.segments().iter().any(|segment| segment == "attention");
                let is_vector = path.segments().last().unwrap() == "scale";
                let parts = if is_attention {
                    4
                } else if is_vector {
                    2
                } else {
                    8
                };
                3 * 4 * spec.num_elements() / parts
            })
            .sum();
        assert!(bytes.iter().all(|bytes| *bytes == expected), "{scan}: {bytes:?}, not {expected}");
    }
    let noted: Vec<String> = placement.notes().iter().map(|note| note.logical_axis.clone()).collect();
    assert!(noted.contains(&"q_heads".to_owned()) && noted.contains(&"kv_heads".to_owned()), "{noted:?}");
}
