//! All optimizers and schedules compared with optax; `goldens/generate.py` generates the expected values.

use mt_ir::{Program, Target};
use mt_optim::{
    Adafactor, Adam, AdamForm, Muon, NewtonSchulz, Optimizer, Parameter, Schedule, ScheduleShape, Slot,
    StepForm, StepInputs, Values,
};
use mt_runtime::testing;
use mt_shape::{Axis, DType, HostArray, axis};
use mt_trace::{Inputs, Tensor};

use crate::{KERNELS, NUM_STEPS, SCHEDULE, assert_close, golden_of, path, traced, traced_for};

/// Name, dimensions, whether the first axis counts layers, and the number of input axes of a linear map.
const PARAMETERS: [(&str, &[usize], bool, usize); 5] = [
    ("a", &[5, 3], false, 1),
    ("b", &[7], false, 0),
    ("c", &[4, 3, 2], false, 1),
    ("e", &[2, 3, 5], false, 2),
    ("d", &[3, 4, 6], true, 1),
];
const AXES: [&str; 3] = ["x", "y", "z"];

const ADAM: Adam = Adam {
    form: AdamForm::Standard,
    b1: 0.9,
    b2: 0.95,
    epsilon: 1e-8,
    epsilon_root: 0.0,
    weight_decay: 0.1,
    first_moment_dtype: DType::F32,
};

const MUON: Muon = Muon {
    beta: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.05,
    consistent_rms: None,
    iterations: NewtonSchulz::Usual,
    momentum_dtype: DType::F32,
    adam: Adam { form: AdamForm::Nesterov, ..ADAM },
};

/// The case whose values a file of its own holds.
const HYBRID: &str = "muon_hybrid";

fn golden(name: &str) -> HostArray {
    golden_of("optimizers", name)
}

fn parameters() -> Vec<Parameter> {
    let parameter = |(name, dims, is_stacked, num_input_axes): &(&str, &[usize], bool, usize)| Parameter {
        path: path(name),
        axes: AXES.iter().zip(*dims).map(|(name, size)| axis(name, *size)).collect(),
        logical_axes: vec![None; dims.len()],
        dtype: DType::F32,
        is_stacked: *is_stacked,
        num_group_axes: 0,
        num_input_axes: *num_input_axes,
        is_trained: true,
        decays: true,
        form: StepForm::VALUE,
    };
    PARAMETERS.iter().map(parameter).collect()
}

fn slot_axes(slot: &Slot, parameters: &[Parameter]) -> Vec<Axis> {
    slot.axes.iter().map(|axis| parameters[slot.parameter].axes[*axis]).collect()
}

/// A step. Inputs: parameters, slots, the step count and gradients. Outputs: the next values of all inputs except
/// gradients.
fn step_program(target: Target, optimizer: &Optimizer, parameters: &[Parameter]) -> Program {
    traced_for(target, "step", |inputs: &Inputs<'_>| {
        let declare = |name: &str, dtype: DType, axes: &[Axis]| {
            inputs.input(name, dtype, axes, &vec![None; axes.len()], false)
        };
        let of_parameters = |name: &str| -> Vec<Tensor<'_>> {
            parameters.iter().map(|parameter| declare(name, DType::F32, &parameter.axes)).collect()
        };
        let values = Values {
            parameters: of_parameters("parameter"),
            slots: optimizer
                .slots(parameters)
                .iter()
                .map(|slot| declare(slot.name, slot.dtype, &slot_axes(slot, parameters)))
                .collect(),
        };
        let count = declare("count", DType::I32, &[]);
        let gradients = of_parameters("gradient");
        let given = StepInputs {
            gradients: &gradients,
            clipping_factor: None,
            count,
            learning_rate: SCHEDULE.at(count),
            keeps_values: false,
        };
        let next = optimizer.update(parameters, &values, &given).values;
        let results = next.parameters.into_iter().chain(next.slots).chain([count + 1.0]);
        results.map(|tensor| inputs.replicated("result", tensor)).collect()
    })
}

/// One form for each parameter.
const FORMS: [StepForm; 5] = [
    StepForm { scale: 0.35, offset: 0.0 },
    StepForm { scale: 1.0, offset: 1.0 },
    StepForm { scale: 3.5, offset: 0.0 },
    StepForm { scale: 1.0, offset: -1.0 },
    StepForm { scale: 0.25, offset: 0.5 },
];

/// Takes ten steps with and without kernels, of the values and of other forms, and compares the parameters after each
/// step.
#[track_caller]
fn check(case: &str, optimizer: &Optimizer, parameters: &[Parameter]) {
    for forms in [[StepForm::VALUE; 5], FORMS] {
        let formed =
            parameters.iter().zip(forms).map(|(parameter, form)| Parameter { form, ..parameter.clone() });
        let parameters: Vec<Parameter> = formed.collect();
        for target in [Target::CPU, KERNELS] {
            let program = step_program(target, optimizer, &parameters);
            check_program(case, &program, optimizer, &parameters);
        }
    }
}

fn mapped(array: &HostArray, map: impl Fn(f64) -> f64) -> HostArray {
    let numbers: Vec<f32> = array.to_f64().into_iter().map(|number| map(number) as f32).collect();
    HostArray::from_slice(DType::F32, array.dims(), &numbers).unwrap()
}

#[track_caller]
fn check_program(case: &str, program: &Program, optimizer: &Optimizer, parameters: &[Parameter]) {
    // The golden's parameters are the stepped forms.
    let forms: Vec<StepForm> = parameters.iter().map(|parameter| parameter.form).collect();
    let start = PARAMETERS.iter().zip(&forms).map(|((name, ..), StepForm { scale, offset })| {
        mapped(&golden(&format!("start.{name}")), |number| (number - offset) / scale)
    });
    let mut state: Vec<HostArray> = start.collect();
    for slot in optimizer.slots(parameters) {
        let dims: Vec<usize> = slot_axes(&slot, parameters).iter().map(|axis| axis.size).collect();
        state.push(HostArray::zeros(slot.dtype, &dims));
    }
    state.push(HostArray::zeros(DType::I32, &[]));
    for step in 0..NUM_STEPS {
        let gradients = PARAMETERS.iter().zip(&forms).map(|((name, ..), form)| {
            mapped(&golden(&format!("gradient.{step}.{name}")), |number| number * form.scale)
        });
        state = testing::run(program, &[state, gradients.collect()].concat()).unwrap();
        for (((name, ..), parameter), StepForm { scale, offset }) in PARAMETERS.iter().zip(&state).zip(&forms)
        {
            let file = if case == HYBRID { HYBRID } else { "optimizers" };
            let expected = golden_of(file, &format!("{case}.{step}.{name}"));
            let stepped = mapped(parameter, |number| number * scale + offset);
            assert_close(&format!("{case}: `{name}` after step {step}"), &stepped, &expected, 1e-5);
        }
    }
}

fn without_decay_of_c() -> Vec<Parameter> {
    parameters()
        .into_iter()
        .map(|parameter| Parameter { decays: parameter.path != path("c"), ..parameter })
        .collect()
}

#[test]
fn kernels_take_the_steps_of_adam() {
    let num_calls = |target: Target, optimizer: &Optimizer| {
        step_program(target, optimizer, &parameters()).text.matches("\"maxtext.adam\"").count()
    };
    let adam = Optimizer::Adam(ADAM);
    assert_eq!(num_calls(KERNELS, &adam), PARAMETERS.len());
    assert_eq!(num_calls(Target::CPU, &adam), 0);
    let narrow = Optimizer::Adam(Adam { first_moment_dtype: DType::BF16, ..ADAM });
    assert_eq!(num_calls(KERNELS, &narrow), 0);
}

#[test]
fn adam_with_a_mask_matches() {
    check("adam_masked", &Optimizer::Adam(Adam { epsilon_root: 1e-6, ..ADAM }), &without_decay_of_c());
}

#[test]
fn adam_of_nesterov_matches() {
    check("adam_nesterov", &Optimizer::Adam(Adam { form: AdamForm::Nesterov, ..ADAM }), &parameters());
}

#[test]
fn adam_of_pax_matches() {
    let adam = Adam { form: AdamForm::Pax, epsilon_root: 1e-6, ..ADAM };
    check("adam_pax", &Optimizer::Adam(adam), &without_decay_of_c());
}

#[test]
fn gradient_descent_matches() {
    check("sgd", &Optimizer::Sgd, &parameters());
    assert!(Optimizer::Sgd.slots(&parameters()).is_empty());
}

#[test]
fn muon_matches() {
    check("muon", &Optimizer::Muon(MUON), &parameters());
    // The matrices of a group, such as those of experts, are as separate as those of layers.
    let groups = parameters().into_iter().map(|parameter| match parameter.is_stacked {
        true => Parameter { is_stacked: false, num_group_axes: 1, ..parameter },
        false => parameter,
    });
    check("muon", &Optimizer::Muon(MUON), &groups.collect::<Vec<_>>());
    check("muon_rms", &Optimizer::Muon(Muon { consistent_rms: Some(0.2), ..MUON }), &parameters());
}

#[test]
fn muon_with_more_iterations_matches() {
    check(HYBRID, &Optimizer::Muon(Muon { iterations: NewtonSchulz::Hybrid, ..MUON }), &parameters());
    let stored = NewtonSchulz::Hybrid.stored();
    assert_eq!(stored.dims(), [10, 3]);
    assert_eq!(stored.to_f64()[24..27], [2.0, -1.5, 0.5]);
    assert_eq!(NewtonSchulz::Usual.stored().dims(), [3]);
}

#[test]
fn adafactor_matches() {
    let optimizer = Optimizer::Adafactor(Adafactor { min_factored_size: 2 });
    check("adafactor", &optimizer, &parameters());
    // Both factored moments of `d` have its layer axis.
    let parameters = parameters();
    let axes = |name: &str| -> Vec<Vec<usize>> {
        let slots = optimizer.slots(&parameters);
        slots.iter().filter(|slot| slot.name == name).map(|slot| slot.axes.clone()).collect()
    };
    assert_eq!(axes("v_row"), [vec![1], vec![1, 2], vec![0, 1], vec![0, 1]]);
    assert_eq!(axes("v_col"), [vec![0], vec![0, 2], vec![0, 2], vec![0, 2]]);
    assert_eq!(axes("v"), [vec![0]]);
}

#[test]
fn parameters_that_are_not_trained_stay_and_keep_nothing() {
    let parameters: Vec<Parameter> = parameters()
        .into_iter()
        .map(|parameter| {
            let is_trained = parameter.path != path("b") && parameter.path != path("e");
            Parameter { is_trained, ..parameter }
        })
        .collect();
    let optimizer = Optimizer::Adam(ADAM);
    check("frozen", &optimizer, &parameters);
    let slots = optimizer.slots(&parameters);
    assert_eq!(slots.iter().map(|slot| slot.parameter).collect::<Vec<_>>(), [0, 2, 4, 0, 2, 4]);
}

#[test]
fn muon_keeps_one_moment_of_matrices() {
    let slots = Optimizer::Muon(MUON).slots(&parameters());
    let of = |parameter: usize| -> Vec<(&str, Option<&str>)> {
        let own = slots.iter().filter(|slot| slot.parameter == parameter);
        own.map(|slot| (slot.name, slot.part)).collect()
    };
    assert_eq!(of(0), [("mu", Some(Muon::MUON))]);
    assert_eq!(of(1), [("mu", Some(Muon::ADAM)), ("nu", Some(Muon::ADAM))]);
}

#[track_caller]
fn check_rates(case: &str, schedule: Schedule) {
    let program = traced("rates", |inputs| {
        let step = inputs.input("step", DType::I32, &[], &[], false);
        vec![inputs.replicated("rate", schedule.at(step))]
    });
    for (step, expected) in golden(&format!("rates.{case}")).to_f64().iter().enumerate() {
        let step = HostArray::from_slice(DType::I32, &[], &[step as i32]).unwrap();
        let rate = testing::run(&program, &[step]).unwrap()[0].to_f64()[0];
        assert!((rate - expected).abs() <= 1e-6 * schedule.peak, "{case}: {rate} is not {expected}");
    }
}

#[test]
fn schedules_match() {
    let schedule = |warmup_steps: u64, total_steps: u64, shape: ScheduleShape| Schedule {
        peak: 0.02,
        warmup_steps,
        total_steps,
        final_fraction: 0.1,
        shape,
    };
    let linear = |fall_steps: u64| ScheduleShape::StableThenLinear { fall_steps };
    let cosine = |fall_steps: u64| ScheduleShape::StableThenCosine { fall_steps };
    check_rates("cosine", schedule(4, 21, ScheduleShape::Cosine));
    check_rates("linear", schedule(4, 21, ScheduleShape::Linear));
    check_rates("constant", schedule(4, 21, ScheduleShape::Constant));
    check_rates("wsd_linear", schedule(4, 21, linear(7)));
    check_rates("wsd_cosine", schedule(4, 21, cosine(7)));
    check_rates("cosine.short", schedule(4, 5, ScheduleShape::Cosine));
    check_rates("linear.short", schedule(4, 5, ScheduleShape::Linear));
    check_rates("constant.short", schedule(4, 5, ScheduleShape::Constant));
    check_rates("wsd_linear.short", schedule(4, 5, linear(1)));
    check_rates("wsd_cosine.short", schedule(4, 5, cosine(1)));
    let whole = Schedule { peak: 1.0, ..schedule(0, 100, ScheduleShape::Cosine) };
    check_rates("cosine.whole", whole);
}
