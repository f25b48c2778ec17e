//! The steps before and after which a run evaluates and saves, and the number of rows of each batch.

use std::time::Duration;

use mt_config::{BatchSchedule, SavePeriod, TrainConfig};

use crate::{TrainError, TrainPlan};

/// The batch size of each step of a run, and that of its evaluations.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    /// Rows of each step's batch.
    pub batches: BatchSchedule,
    pub evaluation_rows: usize,
}

impl Schedule {
    pub fn new(plan: &TrainPlan) -> Result<Self, TrainError> {
        let (data, num_devices) = (&plan.settings.data, plan.num_devices());
        Ok(Self {
            batches: data.batch_schedule(num_devices)?,
            evaluation_rows: data.eval_global_batch(num_devices)?,
        })
    }

    /// Whether an evaluation is due before step `step`: at the first step that may have one, and at each interval after
    /// it.
    pub fn evaluates_before(settings: &TrainConfig, step: u64) -> bool {
        let Some(interval) = settings.run.eval_interval else { return false };
        step.checked_sub(settings.run.eval_start_step).is_some_and(|since| since.is_multiple_of(interval))
    }

    /// Whether a checkpoint is due after step `step`. `is_idle` states that no save is in progress, and `since` is the time
    /// since the last one. The last step's checkpoint is saved after the last evaluation instead.
    pub fn saves_after(settings: &TrainConfig, step: u64, is_idle: bool, since: Duration) -> bool {
        let group = &settings.checkpoint;
        let is_due = match settings.saving.period(group) {
            SavePeriod::Steps(period) => step.is_multiple_of(period.max(1)),
            SavePeriod::Time(period) => since >= period || step == 0,
            SavePeriod::Continuous => is_idle,
        };
        group.enable_checkpointing
            && is_due
            && step + 1 < settings.run.steps
            && (step > 0 || group.save_checkpoint_on_start)
    }

    /// Whether a checkpoint on local storage is due after step `step`.
    pub fn saves_locally_after(settings: &TrainConfig, step: u64, period: u64) -> bool {
        settings.checkpoint.enable_checkpointing
            && step > 0
            && step.is_multiple_of(period)
            && step + 1 < settings.run.steps
    }
}
