//! AdamW and its schedule on the CPU plugin, compared with optax; `goldens/generate.py` generates the expected values.

mod optimizers;
mod spikes;

use mt_ir::{CpuKernels, Program, Target};
use mt_optim::{
    Adam, AdamForm, Optimizer, Parameter, Schedule, ScheduleShape, StepForm, StepInputs, Values,
    clipping_factor, global_norm,
};
use mt_runtime::testing;
use mt_shape::{Axis, DType, HostArray, Path, axis};
use mt_testing::{Golden, assert_within, largest};
use mt_trace::{Inputs, Output, ProgramOptions, Tensor, program};

const KERNELS: Target = Target::Cpu(CpuKernels { f32: true, bf16: true, ..CpuKernels::NONE });

const NUM_STEPS: usize = 10;
const PARAMETERS: [(&str, &[usize]); 3] = [("a", &[5, 3]), ("b", &[7]), ("c", &[2, 3, 2])];
const AXES: [&str; 3] = ["x", "y", "z"];

const SCHEDULE: Schedule = Schedule {
    peak: 0.02,
    warmup_steps: 3,
    total_steps: 8,
    final_fraction: 0.1,
    shape: ScheduleShape::Cosine,
};

fn golden_of(file: &str, name: &str) -> HostArray {
    Golden::open(env!("CARGO_MANIFEST_DIR"), &format!("{file}.safetensors")).array(name)
}

/// Asserts that differences are at most `tolerance` of the largest element.
#[track_caller]
fn assert_close(what: &str, actual: &HostArray, expected: &HostArray, tolerance: f64) {
    assert_within(what, actual, expected, tolerance * largest(&expected.to_f64()));
}

fn golden(name: &str) -> HostArray {
    golden_of("adamw", name)
}

fn traced<F>(name: &str, code: F) -> Program
where
    F: for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>,
{
    traced_for(Target::CPU, name, code)
}

fn traced_for<F>(target: Target, name: &str, code: F) -> Program
where
    F: for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>,
{
    let options = ProgramOptions::new(name, target);
    program(&options, code).unwrap()
}

fn axes(dims: &[usize]) -> Vec<Axis> {
    AXES.iter().zip(dims).map(|(name, size)| axis(name, *size)).collect()
}

/// The parameters as optimizers see them.
fn described() -> Vec<Parameter> {
    let parameter = |(name, dims): &(&str, &[usize])| Parameter {
        path: path(name),
        axes: axes(dims),
        logical_axes: vec![None; dims.len()],
        dtype: DType::F32,
        is_stacked: false,
        num_group_axes: 0,
        num_input_axes: 0,
        is_trained: true,
        decays: true,
        form: StepForm::VALUE,
    };
    PARAMETERS.iter().map(parameter).collect()
}

fn path(name: &str) -> Path {
    let mut path = Path::default();
    path.within(name, |path| path.clone())
}

/// Declares one input per parameter.
fn declare<'t>(inputs: &Inputs<'t>, prefix: &str, dtype: DType) -> Vec<Tensor<'t>> {
    PARAMETERS
        .iter()
        .map(|(name, dims)| {
            inputs.input(&format!("{prefix}.{name}"), dtype, &axes(dims), &vec![None; dims.len()], false)
        })
        .collect()
}

/// A step of clipping and AdamW. Inputs: parameters, both moments, the step count and gradients. Outputs: the next
/// values of all inputs except gradients, and the gradient norm.
fn step_program(target: Target, optimizer: &Adam) -> Program {
    traced_for(target, "step", |inputs| {
        let parameters = declare(inputs, "parameter", DType::F32);
        let first = declare(inputs, "first", optimizer.first_moment_dtype);
        let slots = [first, declare(inputs, "second", DType::F32)].concat();
        let step = inputs.input("step", DType::I32, &[], &[], false);
        let gradients = declare(inputs, "gradient", DType::F32);
        let norm = global_norm(&gradients);
        let given = StepInputs {
            gradients: &gradients,
            clipping_factor: Some(clipping_factor(norm, 1.0)),
            count: step,
            learning_rate: SCHEDULE.at(step),
            keeps_values: false,
        };
        let values = Values { parameters, slots };
        let next = Optimizer::Adam(*optimizer).update(&described(), &values, &given).values;
        let results = next.parameters.into_iter().chain(next.slots).chain([step + 1.0, norm]);
        results.map(|tensor| inputs.replicated("result", tensor)).collect()
    })
}

#[track_caller]
fn check(case: &str, target: Target, first_moment_dtype: DType, tolerance: f64, moment_tolerance: f64) {
    let optimizer = Adam {
        form: AdamForm::Standard,
        b1: 0.9,
        b2: 0.95,
        epsilon: 1e-8,
        epsilon_root: 1e-9,
        weight_decay: 0.1,
        first_moment_dtype,
    };
    let program = step_program(target, &optimizer);
    let start = PARAMETERS.map(|(name, _)| golden(&format!("{case}.start.{name}")));
    let zeros = |dtype: DType| PARAMETERS.map(|(_, dims)| HostArray::zeros(dtype, dims));
    let mut state: Vec<HostArray> =
        start.into_iter().chain(zeros(first_moment_dtype)).chain(zeros(DType::F32)).collect();
    state.push(HostArray::zeros(DType::I32, &[]));
    for step in 0..NUM_STEPS {
        let gradients = PARAMETERS.map(|(name, _)| golden(&format!("{case}.gradient.{step}.{name}")));
        let mut results = testing::run(&program, &[state, gradients.to_vec()].concat()).unwrap();
        let norm = results.pop().unwrap();
        assert_close("norm", &norm, &golden(&format!("{case}.norm.{step}")), 1e-5);
        for ((name, _), parameter) in PARAMETERS.iter().zip(&results) {
            let expected = golden(&format!("{case}.parameter.{step}.{name}"));
            assert_close(
                &format!("{case}: parameter {name} after step {step}"),
                parameter,
                &expected,
                tolerance,
            );
        }
        state = results;
    }
    for (index, (name, _)) in PARAMETERS.iter().enumerate() {
        let [first, second] = [&state[3 + index], &state[6 + index]];
        assert_eq!(first.dtype(), first_moment_dtype);
        let first: Vec<f32> = first.to_f64().iter().map(|value| *value as f32).collect();
        let expected = golden(&format!("{case}.mu.{name}"));
        let first = HostArray::from_slice(DType::F32, expected.dims(), &first).unwrap();
        assert_close(&format!("{case}: mu of {name}"), &first, &expected, moment_tolerance);
        assert_close(&format!("{case}: nu of {name}"), second, &golden(&format!("{case}.nu.{name}")), 1e-5);
    }
    assert_eq!(state[9].to_f64(), [NUM_STEPS as f64]);
}

#[test]
fn ten_steps_match_optax() {
    check("f32", Target::CPU, DType::F32, 1e-5, 1e-5);
}

#[test]
fn ten_steps_by_kernels_match_optax() {
    check("f32", KERNELS, DType::F32, 1e-5, 1e-5);
}

#[test]
fn ten_steps_with_narrow_moments_match_optax() {
    // optax also multiplies the narrow moment by its decay in `bf16`. Here only the stored value is rounded, so each
    // step may round differently.
    check("bf16_moments", Target::CPU, DType::BF16, 1e-2, NUM_STEPS as f64 / 256.0);
}

#[test]
fn learning_rates_match() {
    let program = traced("rates", |inputs| {
        let step = inputs.input("step", DType::I32, &[], &[], false);
        vec![inputs.replicated("rate", SCHEDULE.at(step))]
    });
    let expected = golden("rates").to_f64();
    for (step, expected) in expected.iter().enumerate() {
        let step = HostArray::from_slice(DType::I32, &[], &[step as i32]).unwrap();
        let rate = testing::run(&program, &[step]).unwrap()[0].to_f64()[0];
        assert!((rate - expected).abs() <= 1e-6 * 0.02, "{rate} is not {expected}");
    }
}

#[test]
fn schedules_without_warmup_or_end_are_numbers() {
    let rate = |schedule: Schedule, step: i32| {
        let program = traced("rate", |inputs| {
            let step = inputs.input("step", DType::I32, &[], &[], false);
            vec![inputs.replicated("rate", schedule.at(step))]
        });
        testing::run(&program, &[HostArray::from_slice(DType::I32, &[], &[step]).unwrap()]).unwrap()[0]
            .to_f64()[0]
    };
    let peak = f64::from(0.02_f32);
    let without_warmup = Schedule { warmup_steps: 0, ..SCHEDULE };
    assert!((rate(without_warmup, 0) - peak).abs() < 1e-8);
    let only_warmup = Schedule { warmup_steps: 8, ..SCHEDULE };
    assert!((rate(only_warmup, 4) - peak / 2.0).abs() < 1e-8);
    assert_eq!(rate(only_warmup, 8), 0.0);
    // A cosine of one step takes its last value.
    let single = Schedule { warmup_steps: 0, total_steps: 1, ..SCHEDULE };
    assert!((rate(single, 0) - peak * SCHEDULE.final_fraction).abs() < 1e-8);
}

#[test]
fn gradients_within_the_threshold_stay_the_same_bits() {
    let program = traced("clip", |inputs| {
        let gradients = declare(inputs, "gradient", DType::F32);
        let clipped = |threshold: f64| -> Vec<Tensor<'_>> {
            let factor = clipping_factor(global_norm(&gradients), threshold);
            gradients.iter().map(|gradient| *gradient * factor).collect()
        };
        let norm = global_norm(&clipped(0.5));
        clipped(1e3).into_iter().chain([norm]).map(|tensor| inputs.replicated("clipped", tensor)).collect()
    });
    let gradients = PARAMETERS.map(|(name, _)| golden(&format!("f32.gradient.0.{name}")));
    let results = testing::run(&program, &gradients).unwrap();
    assert_eq!(results[..3], gradients);
    assert!((results[3].to_f64()[0] - 0.5).abs() < 1e-6);
}
