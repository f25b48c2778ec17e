//! Training where the format of the weights holds arrays that training cannot change.

use std::{collections::BTreeMap, sync::Arc};

use mt_models::{
    Model, build_decoder,
    decoder::{Decoder, DecoderConfig},
};
use mt_nn::{Initializer, ParamSpec, WeightFormat};
use mt_runtime::{Array, Input, Platform, testing::cpu};
use mt_shape::{DType, DeviceAttributes, HostArray};
use mt_trace::Tensor;

use super::training::{NUM_ROWS, batch, compile, configuration};
use crate::{
    TrainError,
    batch::to_devices,
    metrics::names,
    objective::MetricName,
    plan::{Devices, Intended, TrainPlan},
    restore::check_sources,
};

/// Dense weights that are never trained.
#[derive(Debug)]
struct Fixed {
    is_drawn: bool,
}

static DRAWN: Fixed = Fixed { is_drawn: true };
static LOADED: Fixed = Fixed { is_drawn: false };

impl WeightFormat for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn specs(&self, dense: ParamSpec, _num_inputs: usize) -> Vec<(&'static str, ParamSpec)> {
        let initializer = if self.is_drawn { dense.initializer } else { Initializer::Loaded };
        vec![("", ParamSpec { is_trainable: false, initializer, ..dense })]
    }

    fn dense<'t>(&self, arrays: &[Tensor<'t>], dtype: DType) -> Tensor<'t> {
        arrays[0].cast(dtype)
    }
}

pub fn plan(format: &'static dyn WeightFormat, keys: &[&str]) -> Result<TrainPlan, TrainError> {
    let settings = configuration(keys, 1);
    let mut intended = Intended::new(settings)?;
    let dense = build_decoder(&intended.settings.model)?;
    let config = DecoderConfig { weight_format: format, ..dense.config().clone() };
    intended.model = Arc::new(Decoder::new(config, dense.family()));
    TrainPlan::on(
        intended,
        &Devices { platform: Platform::Cpu, number: 1, attributes: DeviceAttributes::default() },
    )
}

/// The states before and after two steps, by name, and the metrics of the second.
pub type Steps = ([BTreeMap<String, HostArray>; 2], BTreeMap<MetricName, f64>);

/// Two steps from the first values, after `change` was applied to each.
pub fn two_steps(
    format: &'static dyn WeightFormat,
    keys: &[&str],
    change: impl Fn(HostArray) -> HostArray,
) -> Steps {
    let programs = plan(format, keys).unwrap().programs();
    let first = compile(&programs.initialize().unwrap());
    let step = programs.train_step(NUM_ROWS).unwrap();
    let (executable, metrics) = (compile(&step.program), step.names);
    let changed = |(value, array): (&mt_ir::ProgramValue, Array)| {
        Array::from_host(cpu(1), &change(array.to_host().unwrap()), &value.sharding).unwrap()
    };
    let drawn = first.run(Vec::new()).unwrap();
    let mut state: Vec<Array> = first.outputs().iter().zip(drawn).map(changed).collect();
    let named = |state: &[Array]| -> BTreeMap<String, HostArray> {
        let named = first.outputs().iter().zip(state);
        named.map(|(value, array)| (value.name.clone(), array.to_host().unwrap())).collect()
    };
    let before = named(&state);
    let declared = programs.loss.objective.arrays(NUM_ROWS);
    let inputs = &executable.inputs()[state.len()..];
    let given = to_devices(cpu(1), &declared, inputs, &batch(), programs.order).unwrap();
    let mut reported = BTreeMap::new();
    for _ in 0..2 {
        let inputs = state.into_iter().map(Input::Donate).chain(given.iter().map(Input::Borrow));
        state = executable.run(inputs.collect()).unwrap();
        let last = state.pop().unwrap().to_host().unwrap().to_f64();
        reported = metrics.iter().cloned().zip(last).collect();
    }
    ([before, named(&state)], reported)
}

#[test]
fn arrays_that_cannot_be_trained_have_neither_gradients_nor_state() {
    for keys in [&[][..], &["gradient_accumulation_steps=2"], &["opt_type=muon", "scan_layers=false"]] {
        let ([before, after], reported) = two_steps(&DRAWN, keys, |value| value);
        let mut norm = 0.0;
        for (name, value) in after.iter().filter(|(name, _)| name.starts_with("params.")) {
            let path = name.strip_prefix("params.").unwrap();
            let is_fixed = path.ends_with("kernel");
            assert_eq!(before[name] == *value, is_fixed, "{keys:?}: {name}");
            assert_eq!(before.contains_key(&format!("mu.{path}")), !is_fixed, "{keys:?}: {name}");
            if !is_fixed {
                norm += value.to_f64().iter().map(|number| number * number).sum::<f64>();
            }
        }
        let found = reported[names::PARAMETER_NORM];
        assert!((found - norm.sqrt()).abs() <= 1e-4 * found, "{keys:?}: {found}, not {}", norm.sqrt());
        assert!(reported[names::GRADIENT_NORM] > 0.0);
    }
}

#[test]
fn something_is_trained_and_first_values_are_known() {
    let error = plan(&DRAWN, &["trainable_parameters_mask=['kernel$']"]).err().unwrap();
    assert!(error.is_user_error() && error.to_string().starts_with("no parameter is trained: "), "{error}");
    let check = |format| {
        let plan = plan(format, &[]).unwrap();
        let (model, layout): (&dyn Model, _) = (&*plan.model, &plan.state_rule.layout);
        check_sources(model, layout, &plan.settings.checkpoint, 10)
    };
    check(&DRAWN).unwrap();
    let error = check(&LOADED).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("`load_parameters_path="), "{error}");
}
