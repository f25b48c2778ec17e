//! The programs of training: initialization, the training step, and the evaluation of a batch.

use std::sync::Arc;

use mt_ir::{Program, Target};
use mt_models::{Model, statistics};
use mt_nn::{SequenceOrder, initialize};
use mt_shape::Placement;
use mt_trace::{Inputs, Output, ProgramOptions, Tensor, program};

use crate::{
    TrainError, expert_loads,
    gradients::{LossAndGradients, LossRule, ModelTensors},
    measured::{Measured, reported},
    metrics::names,
    objective::{BatchTensors, FrozenModel, FrozenSource},
    state::StateLayout,
    update::UpdateRule,
};

const INITIALIZE: &str = "initialize";
const INITIALIZE_PARAMETERS: &str = "initialize_parameters";
const TRAIN_STEP: &str = "train_step";
const EVALUATION_STEP: &str = "eval_step";

/// The names of all programs.
pub(crate) const NAMES: [&str; 4] = [INITIALIZE, INITIALIZE_PARAMETERS, TRAIN_STEP, EVALUATION_STEP];

/// The inputs from which programs are traced.
#[derive(Clone)]
pub(crate) struct Programs {
    pub model: Arc<dyn Model>,
    pub placement: Arc<Placement>,
    pub target: Target,
    pub layout: Arc<StateLayout>,
    pub update: Arc<UpdateRule>,
    pub loss: LossRule,
    pub seed: u64,
    /// The order in which the tokens of a row are stored.
    pub order: SequenceOrder,
}

impl Programs {
    fn options(&self, name: &str) -> ProgramOptions {
        ProgramOptions {
            name: name.to_owned(),
            placement: self.placement.clone(),
            target: self.target,
            precision: self.model.precision(),
        }
    }

    fn build<F>(&self, name: &'static str, code: F) -> Result<Program, TrainError>
    where
        F: for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>,
    {
        program(&self.options(name), code)
            .map_err(|source| TrainError::Trace { program: name, source: Box::new(source) })
    }

    /// Traces the program that creates the state of a fresh run. It takes no arguments.
    pub fn initialize(&self) -> Result<Program, TrainError> {
        let specs = self.model.parameters();
        self.build(INITIALIZE, |inputs| {
            let region = inputs.region();
            let mut state = initialize(region, region.key(self.seed), &specs);
            let rest = &self.layout.entries[state.len()..];
            state.extend(rest.iter().map(|entry| region.full(entry.array.dtype, &entry.axes, 0.0)));
            self.layout.outputs(inputs, &state)
        })
    }

    /// Traces the program that creates the `wanted` parameters of a fresh run, selected by index. It takes no arguments.
    pub fn initialize_parameters(&self, wanted: impl Fn(usize) -> bool) -> Result<Program, TrainError> {
        let specs = self.model.parameters();
        self.build(INITIALIZE_PARAMETERS, |inputs| {
            let region = inputs.region();
            let all = self.layout.outputs(inputs, &initialize(region, region.key(self.seed), &specs));
            all.into_iter()
                .enumerate()
                .filter(|(index, _)| wanted(*index))
                .map(|(_, output)| output)
                .collect()
        })
    }

    /// Traces a training step for `rows` rows. It takes the state (donated), the arrays of frozen models and a batch,
    /// and returns the next state and a vector of metrics.
    pub fn train_step(&self, rows: usize) -> Result<Measured<Program>, TrainError> {
        let specs = self.model.parameters();
        let mut names = Vec::new();
        let program = self.build(TRAIN_STEP, |inputs| {
            let mut state = self.layout.declare_all(inputs);
            let frozen = self.frozen(inputs, &state.values.parameters);
            let batch = self.batch(inputs, rows);
            let region = inputs.region();
            let dropout = region.key(self.seed).fold_in_name("dropout").fold_in(state.step);

            let trained = self.layout.for_model(&specs, &state.values.parameters);
            let models = ModelTensors { trained, frozen };
            let LossAndGradients { loss, weights, mut metrics, gradients, layer_outputs } =
                self.loss.loss_and_gradients(&specs, &models, &batch, dropout);
            state = self.layout.on_device(state);
            let at_slots = |tensors| self.layout.at_slots(&self.placement, tensors);
            let gradients = at_slots(gradients);
            state.values.parameters = at_slots(state.values.parameters);
            let (mut next, updated) =
                region.scope("optimizer", || self.update.update(state, loss, gradients, &layer_outputs));
            let bias_norms = self.update.routing_biases.norms(&next.values.parameters);
            // The new parameters are computed in shards and gathered once.
            next.values.parameters = at_slots(next.values.parameters);
            let mut outputs = self.layout.outputs_of(inputs, next);
            metrics.splice(0..0, [(names::LOSS.into(), loss), (names::TOTAL_WEIGHTS.into(), weights)]);
            metrics.extend(updated.into_iter().map(|(name, value)| (name.into(), value)));
            metrics.extend(expert_loads::metrics(&layer_outputs));
            metrics.extend(bias_norms);
            metrics.extend(statistics(&layer_outputs).into_iter().map(|(name, value)| (name.into(), value)));
            let (vector, reported) = reported(inputs, &metrics);
            names = reported;
            outputs.push(vector);
            outputs
        })?;
        Ok(Measured { program, names: names.into() })
    }

    /// Traces an evaluation step for `rows` rows. It takes the parameters, the arrays of frozen models and a batch, and
    /// returns a vector of sums over the rows.
    pub fn evaluation_step(&self, rows: usize) -> Result<Measured<Program>, TrainError> {
        let specs = self.model.parameters();
        let mut names = Vec::new();
        let program = self.build(EVALUATION_STEP, |inputs| {
            let parameters = self.layout.declare(inputs, self.layout.parameters(), false);
            let frozen = self.frozen(inputs, &parameters);
            let trained = self.layout.for_model(&specs, &parameters);
            let batch = self.batch(inputs, rows);
            let models = ModelTensors { trained, frozen };
            let (vector, reported) = reported(inputs, &self.loss.evaluate(&specs, &models, &batch));
            names = reported;
            vec![vector]
        })?;
        Ok(Measured { program, names: names.into() })
    }

    /// Whether a frozen model uses the array of the trained model's parameter `index` instead of its own.
    pub fn shares(&self, frozen: &FrozenModel, index: usize) -> bool {
        matches!(frozen.source, FrozenSource::FirstValues) && !self.update.parameters[index].is_trained
    }

    /// Declares the arrays of frozen models as inputs, except those shared with the trained model.
    fn frozen<'t>(&self, inputs: &Inputs<'t>, trained: &[Tensor<'t>]) -> Vec<Vec<Tensor<'t>>> {
        let of_model = |frozen: &FrozenModel| {
            let declare = |(index, (path, spec)): (usize, &(mt_shape::Path, mt_nn::ParamSpec))| {
                if self.shares(frozen, index) {
                    return trained[index];
                }
                let name = format!("{}.{path}", frozen.name);
                inputs.input(&name, spec.dtype, &spec.axes, &spec.logical_axes, false)
            };
            frozen.model(&*self.model).parameters().iter().enumerate().map(declare).collect()
        };
        self.loss.frozen.iter().map(of_model).collect()
    }

    fn batch<'t>(&self, inputs: &Inputs<'t>, rows: usize) -> BatchTensors<'t> {
        let arrays = self.loss.objective.arrays(rows);
        let tensors: Vec<Tensor<'t>> = arrays
            .iter()
            .map(|array| {
                let logical = self.loss.logical_axes(array);
                inputs.input(array.name, array.dtype, &array.axes, &logical, false)
            })
            .collect();
        BatchTensors::new(arrays.iter().map(|array| array.name), tensors, self.order)
    }
}
