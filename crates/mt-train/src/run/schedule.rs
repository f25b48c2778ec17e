//! When a run evaluates and saves, and how many rows its batches have.

use mt_config::{BatchSchedule, TrainConfig};
use mt_runtime::Runtime;

use crate::{TrainError, TrainPlan};

/// The batches, evaluations and checkpoints of a run, by step.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// The rows of each step's batch.
    pub batches: BatchSchedule,
    pub evaluation_rows: usize,
}

impl Schedule {
    pub fn new(plan: &TrainPlan, runtime: &Runtime) -> Result<Self, TrainError> {
        let (data, num_devices) = (&plan.settings.data, runtime.num_devices());
        Ok(Self {
            batches: data.batch_schedule(num_devices)?,
            evaluation_rows: data.eval_global_batch(num_devices)?,
        })
    }

    /// Whether an evaluation is due before step `step`: before the first step that may have one, and at each interval
    /// from there.
    pub fn evaluates_before(settings: &TrainConfig, step: u64) -> bool {
        let Some(interval) = settings.run.eval_interval else { return false };
        step.checked_sub(settings.run.eval_start_step).is_some_and(|since| since.is_multiple_of(interval))
    }

    /// Whether a checkpoint is due after step `step`. The one after the last step comes after the last evaluation.
    pub fn saves_after(settings: &TrainConfig, step: u64) -> bool {
        let group = &settings.checkpoint;
        group.enable_checkpointing
            && step.is_multiple_of(group.checkpoint_period.max(1))
            && step + 1 < settings.run.steps
            && (step > 0 || group.save_checkpoint_on_start)
    }
}
