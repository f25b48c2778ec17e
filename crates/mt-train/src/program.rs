//! The programs of training: first values, one step, one batch of evaluation.

use std::sync::Arc;

use mt_ir::{Program, Target};
use mt_models::{Model, Tokens};
use mt_nn::{
    SequenceOrder,
    axes::{BATCH, POSITION},
    initialize,
};
use mt_shape::{DType, Placement, axis};
use mt_trace::{Inputs, Output, ProgramOptions, program};

use crate::{
    TrainError,
    measured::{Measured, reported},
    metrics::names,
    objective::{BatchTensors, LossAndGradients, Objective},
    state::StateLayout,
    update::UpdateRule,
};

/// What the programs are made from.
pub(crate) struct Programs<'a> {
    pub model: &'a dyn Model,
    pub placement: Arc<Placement>,
    pub target: Target,
    pub layout: Arc<StateLayout>,
    pub update: Arc<UpdateRule>,
    pub objective: Objective<'a>,
    pub seed: u64,
    /// How the tokens of a batch's rows are stored.
    pub order: SequenceOrder,
}

/// The arrays of a batch, in the order in which programs take them.
pub(crate) const BATCH_ARRAYS: [&str; 5] =
    ["inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation"];

impl Programs<'_> {
    fn options(&self, name: &str) -> ProgramOptions {
        ProgramOptions { name: name.to_owned(), placement: self.placement.clone(), target: self.target }
    }

    fn build<F>(&self, name: &'static str, code: F) -> Result<Program, TrainError>
    where
        F: for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>,
    {
        program(&self.options(name), code)
            .map_err(|source| TrainError::Trace { program: name, source: Box::new(source) })
    }

    /// No arguments; the state of a fresh run.
    pub fn initialize(&self) -> Result<Program, TrainError> {
        let specs = self.model.parameters();
        self.build("initialize", |inputs| {
            let region = inputs.region();
            let mut state = initialize(region, region.key(self.seed), &specs);
            let rest = &self.layout.entries[state.len()..];
            state.extend(rest.iter().map(|entry| region.full(entry.array.dtype, &entry.axes, 0.0)));
            self.layout.outputs(inputs, &state)
        })
    }

    /// The state, which is donated, and a batch; the next state and a vector of its metrics.
    pub fn train_step(&self, rows: usize, length: usize) -> Result<Measured<Program>, TrainError> {
        let specs = self.model.parameters();
        let mut names = Vec::new();
        let program = self.build("train_step", |inputs| {
            let mut state = self.layout.declare_all(inputs);
            let batch = self.batch(inputs, rows, length);
            let region = inputs.region();
            let dropout = region.key(self.seed).fold_in_name("dropout").fold_in(state.step);

            let parameters = self.layout.for_model(&specs, &state.values.parameters);
            let LossAndGradients { loss, weights, mut metrics, gradients, scores } =
                self.objective.loss_and_gradients(&specs, &parameters, batch, dropout);
            state = self.layout.on_device(state);
            let at_slots = |tensors| self.layout.at_slots(&self.placement, tensors);
            let gradients = at_slots(gradients);
            state.values.parameters = at_slots(state.values.parameters);
            let (mut next, updated) =
                region.scope("optimizer", || self.update.update(state, loss, gradients, &scores));
            // They are made in parts, then gathered once.
            next.values.parameters = at_slots(next.values.parameters);
            let mut outputs = self.layout.outputs_of(inputs, next);
            metrics.splice(0..0, [(names::LOSS, loss), (names::TOTAL_WEIGHTS, weights)]);
            metrics.extend(updated);
            let (vector, reported) = reported(inputs, &metrics);
            names = reported;
            outputs.push(vector);
            outputs
        })?;
        Ok(Measured { program, names })
    }

    /// The parameters and a batch; the sums over its tokens.
    pub fn evaluation_step(&self, rows: usize, length: usize) -> Result<Measured<Program>, TrainError> {
        let specs = self.model.parameters();
        let mut names = Vec::new();
        let program = self.build("eval_step", |inputs| {
            let parameters = self.layout.declare(inputs, 0..self.layout.num_parameters, false);
            let parameters = self.layout.for_model(&specs, &parameters);
            let batch = self.batch(inputs, rows, length);
            let (vector, reported) = reported(inputs, &self.objective.evaluate(&parameters, batch));
            names = reported;
            vec![vector]
        })?;
        Ok(Measured { program, names })
    }

    fn batch<'t>(&self, inputs: &Inputs<'t>, rows: usize, length: usize) -> BatchTensors<'t> {
        let axes = [axis(BATCH, rows), axis(POSITION, length)];
        let logical = self.objective.batch_axes.each_ref().map(|name| Some(name.as_str()));
        let [tokens, positions, segmentation, targets, targets_segmentation] =
            BATCH_ARRAYS.map(|name| inputs.input(name, DType::I32, &axes, &logical, false));
        let tokens = Tokens { tokens, positions, segmentation, order: self.order };
        BatchTensors { tokens, targets, targets_segmentation }
    }
}
