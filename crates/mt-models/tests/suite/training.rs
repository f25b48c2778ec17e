//! Gradients and training steps from imported weights, compared with PyTorch; `goldens/families/generate.py` generates
//! the values.

use std::sync::Arc;

use mt_ir::Program;
use mt_models::{Forward, ForwardPass, Model};
use mt_nn::{LayerPlace, ParamSpec};
use mt_optim::{
    Adam, AdamForm, Optimizer, Parameter, Schedule, ScheduleShape, StepForm, StepInputs, Values,
    clipping_factor, global_norm,
};
use mt_runtime::{Array, Input, testing::cpu};
use mt_shape::{DType, HostArray, Path, Placement};
use mt_trace::program;

use crate::{
    directory::Directory,
    harness::{
        Batch, Golden, Parameters, compile, cross_entropy, declare, declare_batch, from_hugging_face,
        gradients, options, relative_error,
    },
};

const OPTIMIZER: Optimizer = Optimizer::Adam(Adam {
    form: AdamForm::Standard,
    b1: 0.9,
    b2: 0.95,
    epsilon: 1e-8,
    epsilon_root: 0.0,
    weight_decay: 0.1,
    first_moment_dtype: DType::F32,
});

/// A constant learning rate.
const CONSTANT: Schedule = Schedule {
    peak: 1e-2,
    warmup_steps: 0,
    total_steps: 10,
    final_fraction: 1.0,
    shape: ScheduleShape::Cosine,
};

/// A training step: from state and batch to the next state, the loss, and the gradient norm before clipping.
fn step_program(model: &dyn Model, placement: &Arc<Placement>, batch: &Batch, schedule: Schedule) -> Program {
    let specs = model.parameters();
    program(&options("train_step", placement.clone()), |inputs| {
        let parameters = declare(inputs, "params", &specs, true);
        let slots = [declare(inputs, "mu", &specs, true), declare(inputs, "nu", &specs, true)].concat();
        let step = inputs.input("step", DType::I32, &[], &[], true);
        let (tokens, [targets, segmentation]) = declare_batch(inputs, batch.rows, batch.length);
        let region = inputs.region();
        let dropout = Some(region.key(4).fold_in(step));
        let (loss, [], gradients) =
            region.value_and_grad(&Parameters(parameters.clone()), |_, parameters| {
                let (logits, _) =
                    model.logits(&parameters.0, tokens, Forward { dropout, ..Forward::default() });
                (cross_entropy(logits, targets, segmentation), [])
            });
        let gradients: Vec<_> = gradients
            .0
            .iter()
            .zip(&specs)
            .map(|(gradient, (_, spec))| gradient.constrain(&spec.logical_axes))
            .collect();
        let norm = global_norm(&gradients);
        let described: Vec<Parameter> = specs.iter().map(described).collect();
        let given = StepInputs {
            gradients: &gradients,
            clipping_factor: Some(clipping_factor(norm, 1.0)),
            count: step,
            learning_rate: schedule.at(step),
            keeps_values: false,
        };
        let next = OPTIMIZER.update(&described, &Values { parameters, slots }, &given).values;
        let state = next.parameters.iter().chain(&next.slots);
        let logical = specs.iter().cycle().map(|(_, spec)| &spec.logical_axes);
        let mut outputs: Vec<_> =
            state.zip(logical).map(|(tensor, logical)| inputs.output("state", *tensor, logical)).collect();
        outputs.push(inputs.replicated("step", step + 1.0));
        outputs.push(inputs.replicated("loss", loss));
        outputs.push(inputs.replicated("norm", norm));
        outputs
    })
    .unwrap()
}

/// A parameter as optimizers describe it.
fn described((path, spec): &(Path, ParamSpec)) -> Parameter {
    Parameter {
        path: path.clone(),
        axes: spec.axes.clone(),
        logical_axes: spec.logical_axes.clone(),
        dtype: spec.dtype,
        is_stacked: matches!(spec.place, LayerPlace::Stacked { .. }),
        num_group_axes: spec.num_group_axes,
        num_input_axes: spec.num_input_axes,
        is_trained: spec.is_trainable,
        decays: true,
        form: StepForm::VALUE,
    }
}

/// The results of training steps.
pub struct Trained {
    pub losses: Vec<f64>,
    /// Gradient norms before clipping.
    pub norms: Vec<f64>,
    pub parameters: Vec<Array>,
    /// The bytes of parameters and moments on each device.
    pub bytes: Vec<usize>,
}

/// Takes `num_steps` steps from parameters on the devices.
pub fn train(
    model: &dyn Model,
    placement: &Arc<Placement>,
    parameters: Vec<Array>,
    batch: &Batch,
    schedule: Schedule,
    num_steps: usize,
) -> Trained {
    let runtime = cpu(placement.mesh().num_devices());
    let program = step_program(model, placement, batch, schedule);
    let step = compile(&program);
    let place = |index: usize, array: &HostArray| {
        Array::from_host(runtime, array, &step.inputs()[index].sharding).unwrap()
    };
    let num_parameters = parameters.len();
    let mut state = parameters;
    for index in num_parameters..3 * num_parameters {
        let zeros = HostArray::zeros(DType::F32, state[index - num_parameters].dims());
        state.push(place(index, &zeros));
    }
    state.push(place(3 * num_parameters, &HostArray::zeros(DType::I32, &[])));
    let num_state = state.len();
    let batch: Vec<Array> =
        batch.arrays.iter().enumerate().map(|(index, array)| place(num_state + index, array)).collect();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..num_steps {
        let inputs = state.into_iter().map(Input::Donate).chain(batch.iter().map(Input::Borrow)).collect();
        state = step.run(inputs).unwrap();
        norms.push(state.pop().unwrap().to_host().unwrap().to_f64()[0]);
        losses.push(state.pop().unwrap().to_host().unwrap().to_f64()[0]);
    }
    let bytes = |device| state[..num_state - 1].iter().map(|array| array.bytes_on_device(device)).sum();
    let bytes = (0..runtime.num_devices()).map(bytes).collect();
    state.truncate(num_parameters);
    Trained { losses, norms, parameters: state, bytes }
}

/// Copies parameters to the devices with the shardings of a model's specifications.
pub fn placed(model: &dyn Model, placement: &Arc<Placement>, parameters: &[HostArray]) -> Vec<Array> {
    let runtime = cpu(placement.mesh().num_devices());
    let place = |(spec, array): (&ParamSpec, &HostArray)| {
        let sharding = placement.sharding(&spec.logical_axes, &spec.dims());
        Array::from_host(runtime, array, &sharding).unwrap()
    };
    let specs = model.parameters();
    specs.iter().map(|(_, spec)| spec).zip(parameters).map(place).collect()
}

/// The reference's tokens. Each token's target is the next token of its row.
fn batch(directory: &Directory) -> Batch {
    let mut batch = directory.batch();
    let (rows, length) = (batch.rows, batch.length);
    let tokens = batch.arrays[0].as_slice::<i32>().unwrap().to_vec();
    let is_last = |index: usize| (index + 1).is_multiple_of(length);
    let next = |index: usize| if is_last(index) { 0 } else { tokens[index + 1] };
    let targets: Vec<i32> = (0..rows * length).map(next).collect();
    let counts: Vec<i32> = (0..rows * length).map(|index| i32::from(!is_last(index))).collect();
    let array = |values: &[i32]| HostArray::from_slice(DType::I32, &[rows, length], values).unwrap();
    (batch.arrays[3], batch.arrays[4]) = (array(&targets), array(&counts));
    batch
}

/// Each pair of values of different keys occurs together in one of these.
const WAYS: &[&[&str]] = &[
    &["scan_layers=true", "remat_policy=none", "attention=dot_product"],
    &["scan_layers=true", "remat_policy=full", "attention=flash"],
    &["scan_layers=false", "remat_policy=none", "attention=flash"],
    &["scan_layers=false", "remat_policy=full", "attention=dot_product"],
];

const TRAINED: &[&str] = &[
    "llama_six_on_two",
    "gemma2_even",
    "qwen3_untied",
    "mixtral_two_of_five",
    "gpt_oss_two_of_four",
    "llama4_every_second",
    "qwen3_next_cycle",
    "mamba2_two_groups",
    "bamba_every_second",
    "deepseek3_groups",
    "deepseek32_groups",
];

/// Models whose exact gradients are known, but no steps: Adam amplifies the noise of small gradients.
const DIFFERENTIATED: &[&str] = &["deepseek4_two_cycles"];

/// Models without blocks of queries: compressed attention has none, and Mamba-2 has no queries.
const WITHOUT_BLOCKS: &[&str] = &["deepseek4_two_cycles", "mamba2_two_groups"];

/// The model's parameters from the golden's tensors.
fn in_layout(model: &mt_models::decoder::Decoder, golden: &Golden) -> Vec<HostArray> {
    from_hugging_face(model, &|name| golden.array(name))
}

#[test]
fn gradients_match() {
    for name in TRAINED.iter().chain(DIFFERENTIATED) {
        let directory = Directory::open(name);
        let (golden, batch) = (directory.values("gradients"), batch(&directory));
        let loss = golden.array("loss").to_f64()[0];
        let is_dense = WITHOUT_BLOCKS.contains(name);
        for way in WAYS.iter().filter(|way| !(is_dense && way.contains(&"attention=flash"))) {
            let model = directory.model(way);
            let results = gradients(&model, &directory.parameters(&model), &batch);
            let error = (results.loss - loss).abs() / loss;
            assert!(error <= 1e-5, "{name} {way:?}: loss {} is not {loss}", results.loss);
            let expected = in_layout(&model, &golden);
            let trained = model.parameters().into_iter().zip(&results.gradients).zip(&expected);
            for (((path, _), actual), expected) in trained.filter(|(((_, spec), _), _)| spec.is_trainable) {
                if expected.to_f64().iter().all(|value| value.abs() < 1e-7) {
                    let is_zero = actual.to_f64().iter().all(|value| value.abs() < 1e-6);
                    assert!(is_zero, "{name} {way:?}: gradient of `{path}`");
                    continue;
                }
                let error = relative_error(&actual.to_f64(), &expected.to_f64());
                assert!(error <= 1e-4, "{name} {way:?}: gradient of `{path}` differs by {error:e}");
            }
        }
    }
}

#[test]
fn three_steps_match() {
    let placement = Arc::new(Placement::single());
    // The last models have parameters without moments, which this file's loop does not know.
    for name in &TRAINED[..TRAINED.len() - 2] {
        let directory = Directory::open(name);
        let (golden, batch) = (directory.values("adamw"), batch(&directory));
        let (losses, norms) = (golden.array("losses").to_f64(), golden.array("gradient_norms").to_f64());
        assert!(norms.iter().any(|norm| *norm > 1.0), "{name}: nothing is clipped: {norms:?}");
        for scan in directory.scans() {
            let model = directory.model(&[scan]);
            let first = directory.parameters(&model);
            let arrays = placed(&model, &placement, &first);
            let trained = train(&model, &placement, arrays, &batch, CONSTANT, losses.len());
            for (actual, expected) in [(&trained.losses, &losses), (&trained.norms, &norms)] {
                let error = relative_error(actual, expected);
                assert!(error <= 1e-4, "{name} {scan}: {actual:?}, not {expected:?}");
            }
            let expected = in_layout(&model, &golden);
            let specs = model.parameters();
            for (index, (path, _)) in specs.iter().enumerate().filter(|(_, (_, spec))| spec.is_trainable) {
                let first = first[index].to_f64();
                let update = |last: Vec<f64>| -> Vec<f64> {
                    last.iter().zip(&first).map(|(last, first)| last - first).collect()
                };
                let actual = update(trained.parameters[index].to_host().unwrap().to_f64());
                let error = relative_error(&actual, &update(expected[index].to_f64()));
                assert!(error <= 1e-3, "{name} {scan}: update of `{path}` differs by {error:e}");
            }
        }
    }
}
