//! The programs of training: first values, one step, one batch of evaluation.

use std::sync::Arc;

use mt_ir::{Program, Target};
use mt_models::{Model, Tokens};
use mt_nn::{
    ParamSpec,
    axes::{BATCH, POSITION},
    initialize,
};
use mt_optim::{AdamW, Moments, WarmupCosine, clip_by_global_norm, global_norm};
use mt_runtime::Platform;
use mt_shape::{DType, Path, Placement, axis};
use mt_trace::{Inputs, Output, ProgramOptions, Tensor, program};

use crate::{
    TrainError,
    measured::{Measured, reported},
    metrics::names,
    objective::{BatchTensors, LossAndGradients, Objective},
};

/// What the programs are made from.
pub(crate) struct Programs<'a> {
    pub model: &'a dyn Model,
    pub placement: Arc<Placement>,
    pub platform: Platform,
    pub optimizer: AdamW,
    pub schedule: WarmupCosine,
    pub clipping_norm: Option<f64>,
    pub objective: Objective<'a>,
    pub seed: u64,
    /// The logical axes of batches.
    pub batch_axes: [String; 2],
}

/// The arrays of a batch, in the order in which programs take them.
pub(crate) const BATCH_ARRAYS: [&str; 5] =
    ["inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation"];

impl Programs<'_> {
    fn options(&self, name: &str) -> ProgramOptions {
        let target = if self.platform == Platform::Cpu { Target::Cpu } else { Target::Accelerator };
        ProgramOptions { name: name.to_owned(), placement: self.placement.clone(), target }
    }

    fn build<F>(&self, name: &'static str, code: F) -> Result<Program, TrainError>
    where
        F: for<'t> FnOnce(&Inputs<'t>) -> Vec<Output<'t>>,
    {
        program(&self.options(name), code)
            .map_err(|source| TrainError::Trace { program: name, source: Box::new(source) })
    }

    /// No arguments; the parameters, both moments and the step count of a fresh run.
    pub fn initialize(&self) -> Result<Program, TrainError> {
        let specs = self.model.parameters();
        self.build("initialize", |inputs| {
            let region = inputs.region();
            let parameters = initialize(region, region.key(self.seed), &specs);
            let zeros = |dtype: Option<DType>| -> Vec<Tensor<'_>> {
                specs
                    .iter()
                    .map(|(_, spec)| region.full(dtype.unwrap_or(spec.dtype), &spec.axes, 0.0))
                    .collect()
            };
            let moments = Moments {
                first: zeros(Some(self.optimizer.first_moment_dtype)),
                second: zeros(Some(DType::F32)),
            };
            state_outputs(inputs, &specs, &parameters, &moments, region.integer(DType::I32, 0))
        })
    }

    /// The state, which is donated, and a batch; the next state and a vector of its metrics.
    pub fn train_step(&self, rows: usize, length: usize) -> Result<Measured<Program>, TrainError> {
        let specs = self.model.parameters();
        let mut names = Vec::new();
        let program = self.build("train_step", |inputs| {
            let parameters = declare(inputs, "params", &specs, None, true);
            let moments = Moments {
                first: declare(inputs, "mu", &specs, Some(self.optimizer.first_moment_dtype), true),
                second: declare(inputs, "nu", &specs, Some(DType::F32), true),
            };
            let step = inputs.input("step", DType::I32, &[], &[], true);
            let batch = self.batch(inputs, rows, length);
            let region = inputs.region();
            let dropout = region.key(self.seed).fold_in_name("dropout").fold_in(step);

            let LossAndGradients { loss, weights, mut metrics, gradients } =
                self.objective.loss_and_gradients(&specs, &parameters, batch, dropout);

            let (next, next_moments, updated) = region.scope("optimizer", || {
                let raw_norm = global_norm(&gradients);
                let (gradients, norm) = match self.clipping_norm {
                    Some(threshold) => {
                        let clipped = clip_by_global_norm(&gradients, raw_norm, threshold);
                        let norm = global_norm(&clipped);
                        (clipped, norm)
                    }
                    None => (gradients, raw_norm),
                };
                let rate = self.schedule.at(step);
                let (next, next_moments) =
                    self.optimizer.update(&parameters, &gradients, &moments, step, rate);
                let updated = [
                    (names::GRADIENT_NORM, norm),
                    (names::RAW_GRADIENT_NORM, raw_norm),
                    (names::PARAMETER_NORM, global_norm(&next)),
                    (names::LEARNING_RATE, rate),
                ];
                (next, next_moments, updated)
            });
            let mut outputs = state_outputs(inputs, &specs, &next, &next_moments, step + 1.0);
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
            let parameters = declare(inputs, "params", &specs, None, false);
            let batch = self.batch(inputs, rows, length);
            let (vector, reported) = reported(inputs, &self.objective.evaluate(&parameters, batch));
            names = reported;
            vec![vector]
        })?;
        Ok(Measured { program, names })
    }

    fn batch<'t>(&self, inputs: &Inputs<'t>, rows: usize, length: usize) -> BatchTensors<'t> {
        let axes = [axis(BATCH, rows), axis(POSITION, length)];
        let logical = self.batch_axes.each_ref().map(|name| Some(name.as_str()));
        let [tokens, positions, segmentation, targets, targets_segmentation] =
            BATCH_ARRAYS.map(|name| inputs.input(name, DType::I32, &axes, &logical, false));
        BatchTensors { tokens: Tokens { tokens, positions, segmentation }, targets, targets_segmentation }
    }
}

fn declare<'t>(
    inputs: &Inputs<'t>,
    prefix: &str,
    specs: &[(Path, ParamSpec)],
    dtype: Option<DType>,
    donated: bool,
) -> Vec<Tensor<'t>> {
    specs
        .iter()
        .map(|(path, spec)| {
            let name = format!("{prefix}.{path}");
            inputs.input(&name, dtype.unwrap_or(spec.dtype), &spec.axes, &spec.logical_axes, donated)
        })
        .collect()
}

fn state_outputs<'t>(
    inputs: &Inputs<'t>,
    specs: &[(Path, ParamSpec)],
    parameters: &[Tensor<'t>],
    moments: &Moments<'t>,
    step: Tensor<'t>,
) -> Vec<Output<'t>> {
    let mut outputs = Vec::new();
    for (prefix, tensors) in [("params", parameters), ("mu", &moments.first), ("nu", &moments.second)] {
        for ((path, spec), tensor) in specs.iter().zip(tensors) {
            outputs.push(inputs.output(&format!("{prefix}.{path}"), *tensor, &spec.logical_axes));
        }
    }
    outputs.push(inputs.replicated("step", step));
    outputs
}
