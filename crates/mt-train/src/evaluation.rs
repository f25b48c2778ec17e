//! Evaluation on held-out data.

use mt_data::EvaluationSet;
use mt_nn::SequenceOrder;
use mt_runtime::{Array, Executable, Input, PendingArray, Runtime};

use crate::{
    TrainError,
    measured::Measured,
    metrics::{EvaluationMeasurements, Metrics},
    state::batch_arrays,
};

/// How many batches may be on the device at once.
const IN_FLIGHT: usize = 2;

/// Runs the evaluation program over the evaluation set.
pub(crate) struct Evaluator {
    program: Measured<Executable>,
    set: EvaluationSet,
    vocab_size: usize,
    order: SequenceOrder,
}

impl Evaluator {
    pub fn new(
        program: Measured<Executable>,
        set: EvaluationSet,
        vocab_size: usize,
        order: SequenceOrder,
    ) -> Self {
        Self { program, set, vocab_size, order }
    }

    /// Evaluates the parameters as they are before step `step`.
    pub fn run(
        &self,
        runtime: &Runtime,
        parameters: &[Array],
        step: u64,
    ) -> Result<EvaluationMeasurements, TrainError> {
        let program = &self.program.program;
        // Evaluation may have a placement of its own.
        let moved: Vec<Option<Array>> = parameters
            .iter()
            .zip(program.inputs())
            .map(|(array, argument)| array.moved(runtime, &argument.sharding))
            .collect::<Result<_, _>>()?;
        let parameters: Vec<&Array> =
            moved.iter().zip(parameters).map(|(moved, own)| moved.as_ref().unwrap_or(own)).collect();
        let mut sums = Metrics::default();
        let mut pending: Vec<PendingArray> = Vec::new();
        let mut bytes = 0_u64;
        let add = |sums: &mut Metrics, metrics: PendingArray| -> Result<(), TrainError> {
            for (name, value) in self.program.read(metrics)? {
                sums.set(name.clone(), sums.get(&name).unwrap_or(0.0) + value);
            }
            Ok(())
        };
        for batch in self.set.batches()? {
            let batch = batch?;
            bytes += batch.target_bytes;
            let arrays = batch_arrays(
                runtime,
                &program.inputs()[parameters.len()..],
                &batch,
                self.vocab_size,
                self.order,
            )?;
            let own = parameters.iter().copied().map(Input::Borrow);
            let arguments = own.chain(arrays.iter().map(Input::Borrow)).collect();
            pending.push(program.run(arguments)?[0].to_host_async()?);
            if pending.len() > IN_FLIGHT {
                add(&mut sums, pending.remove(0))?;
            }
        }
        for metrics in pending {
            add(&mut sums, metrics)?;
        }
        Ok(EvaluationMeasurements { step, sums, total_bytes: (bytes > 0).then_some(bytes as f64) })
    }
}
