//! Evaluation on held-out data.

use std::sync::Arc;

use mt_data::Batch;
use mt_nn::SequenceOrder;
use mt_runtime::{Array, Executable, Input, Runtime};

use crate::{
    TrainError, TrainPlan, batch,
    measured::{Measured, PendingMetrics},
    metrics::{EvaluationMeasurements, Metrics},
    objective::Objective,
};

/// The maximum number of batches whose results are pending on the device.
const IN_FLIGHT: usize = 2;

/// The compiled evaluation program for one batch size.
pub(crate) struct Evaluation {
    /// Rows per batch.
    pub rows: usize,
    program: Measured<Executable>,
    order: SequenceOrder,
}

impl Evaluation {
    /// Compiles the evaluation program, which may have its own mesh and placement rules.
    pub fn compile(plan: &TrainPlan, runtime: &Runtime, rows: usize) -> Result<Self, TrainError> {
        let group = plan.settings.placement.for_evaluation();
        let programs = plan.programs_at(Arc::new(group.placement(&plan.topology)?));
        let program = programs.evaluation_step(rows)?.try_map(|program| {
            runtime.compile(&program, &plan.compile_settings()).map_err(TrainError::from)
        })?;
        runtime.check_memory(&[&program.program], &plan.less_memory(&program.program)?)?;
        Ok(Self { rows, program, order: programs.order })
    }

    /// Evaluates the trained and frozen parameters as they are before step `step`.
    ///
    /// # Errors
    /// A batch has another number of rows than [`Evaluation::rows`], or reading data or running the program fails.
    pub fn run(
        &self,
        runtime: &Runtime,
        objective: &dyn Objective,
        (trained, frozen): (&[Array], &[Array]),
        step: u64,
        batches: impl Iterator<Item = Result<Batch, TrainError>>,
    ) -> Result<EvaluationMeasurements, TrainError> {
        let program = &self.program.program;
        let own: Vec<&Array> = trained.iter().chain(frozen).collect();
        // Evaluation may have its own placement.
        let moved: Vec<Option<Array>> = own
            .iter()
            .zip(program.inputs())
            .map(|(array, argument)| array.moved(runtime, &argument.sharding))
            .collect::<Result<_, _>>()?;
        let parameters: Vec<&Array> =
            moved.iter().zip(own).map(|(moved, own)| moved.as_ref().unwrap_or(own)).collect();
        let mut sums = Metrics::default();
        let mut pending: Vec<PendingMetrics> = Vec::new();
        let mut bytes = 0_u64;
        let add = |sums: &mut Metrics, metrics: PendingMetrics| -> Result<(), TrainError> {
            for (name, value) in metrics.read()? {
                sums.set(name.clone(), sums.get(&name).unwrap_or(0.0) + value);
            }
            Ok(())
        };
        for batch in batches {
            let batch = batch?;
            if batch.rows != self.rows {
                return Err(TrainError::EvaluationRows { expected: self.rows, given: batch.rows });
            }
            bytes += batch.target_bytes;
            let declared = objective.evaluation_arrays(batch.rows);
            let arguments = &program.inputs()[parameters.len()..];
            let arrays = batch::to_devices(runtime, &declared, arguments, &batch, self.order)?;
            let inputs = parameters.iter().copied().chain(&arrays).map(Input::Borrow).collect();
            pending.push(self.program.pending(program.run(inputs)?[0].to_host_async()?));
            if pending.len() > IN_FLIGHT {
                add(&mut sums, pending.remove(0))?;
            }
        }
        for metrics in pending {
            add(&mut sums, metrics)?;
        }
        Ok(EvaluationMeasurements {
            step,
            sums,
            total_bytes: (bytes > 0).then_some(bytes as f64),
            is_cross_entropy: objective.is_cross_entropy(),
        })
    }
}
