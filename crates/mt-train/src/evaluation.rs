//! Evaluation on held-out data.

use mt_data::EvaluationSet;
use mt_runtime::{Array, Executable, Input, PendingArray, Runtime};

use crate::{TrainError, metrics::EvaluationMeasurements, state::batch_arrays};

/// How many batches may be on the device at once.
const IN_FLIGHT: usize = 2;

/// Runs the evaluation program over the evaluation set.
pub(crate) struct Evaluator {
    program: Executable,
    set: EvaluationSet,
    vocab_size: usize,
}

impl Evaluator {
    pub fn new(program: Executable, set: EvaluationSet, vocab_size: usize) -> Self {
        Self { program, set, vocab_size }
    }

    /// Evaluates the parameters as they are before step `step`.
    pub fn run(
        &self,
        runtime: &Runtime,
        parameters: &[Array],
        step: u64,
    ) -> Result<EvaluationMeasurements, TrainError> {
        let mut total =
            EvaluationMeasurements { step, total_loss: 0.0, total_weights: 0.0, total_bytes: Some(0.0) };
        let mut pending: Vec<PendingArray> = Vec::new();
        let mut bytes = 0_u64;
        let add = |total: &mut EvaluationMeasurements, metrics: PendingArray| -> Result<(), TrainError> {
            let values = metrics.wait()?.to_f64();
            total.total_loss += values[0];
            total.total_weights += values[1];
            Ok(())
        };
        for batch in self.set.batches()? {
            let batch = batch?;
            bytes += batch.target_bytes;
            let arrays =
                batch_arrays(runtime, &self.program.inputs()[parameters.len()..], &batch, self.vocab_size)?;
            let arguments =
                parameters.iter().map(Input::Borrow).chain(arrays.iter().map(Input::Borrow)).collect();
            pending.push(self.program.run(arguments)?[0].to_host_async()?);
            if pending.len() > IN_FLIGHT {
                add(&mut total, pending.remove(0))?;
            }
        }
        for metrics in pending {
            add(&mut total, metrics)?;
        }
        total.total_bytes = (bytes > 0).then_some(bytes as f64);
        Ok(total)
    }
}
