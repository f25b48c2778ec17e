//! The loop over steps.
//!
//! The device is given a step before the metrics of the one before are read, and batches are made on another thread,
//! so that it never waits for the host. Checkpoints are copied to the host while the loop waits, and written by
//! another thread.

use std::time::{Duration, Instant};

use mt_checkpoint::{CheckpointManager, JsonItem, SaveRequest};
use mt_config::{BatchSchedule, TrainConfig};
use mt_data::{Batch, IteratorState, Prefetcher, TrainIterator};
use mt_models::Model;
use mt_nn::SequenceOrder;
use mt_runtime::{Executable, Input, PendingArray, Runtime};
use serde_json::json;

use crate::{
    TrainError,
    evaluation::Evaluator,
    measured::{BySize, Measured},
    metrics::{MetricLogger, StepMeasurements, names},
    restore::{ITERATOR_FILE, ITERATOR_ITEM},
    run::{Ending, EvaluationSummary},
    signals::StopSignal,
    state::{StateLayout, TrainState, batch_arrays},
};

/// How many batches are made ahead.
const PREFETCH: usize = 4;

/// Everything the loop works with.
pub(crate) struct Loop<'a, 'scope, 'env> {
    pub settings: &'a TrainConfig,
    pub runtime: &'a Runtime,
    pub model: &'a dyn Model,
    pub layout: &'a StateLayout,
    pub steps: BySize<'scope, 'env, Measured<Executable>>,
    /// The rows of each step's batch.
    pub batches: BatchSchedule,
    pub evaluator: Option<Evaluator>,
    pub manager: CheckpointManager,
    pub logger: MetricLogger,
    pub length: usize,
    /// How the tokens of a batch's rows are stored on the devices.
    pub order: SequenceOrder,
    pub first_step: u64,
    pub stop: StopSignal,
    /// What one device can do in a second, in 10¹² operations.
    pub peak_tflops: Option<f64>,
}

/// What the loop did.
pub(crate) struct Progress {
    pub ending: Ending,
    pub steps: u64,
    pub first_evaluation: Option<EvaluationSummary>,
    pub last_evaluation: Option<EvaluationSummary>,
}

/// A step whose metrics are still on their way.
struct InFlight {
    step: u64,
    rows: usize,
    metrics: PendingArray,
    data_wait: Duration,
    /// When the loop began to work on it.
    began: Instant,
    /// When the loop turned to the next step; unknown while it has not.
    ended: Option<Instant>,
}

/// Whether the state after a step is finite, so that it is worth saving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    Finite,
    NotFinite,
}

impl Loop<'_, '_, '_> {
    /// Runs to the last step, the end of the data or a signal.
    pub fn run(
        mut self,
        state: TrainState,
        data: TrainIterator,
        position: Option<IteratorState>,
    ) -> Result<Progress, TrainError> {
        let progress = self.steps(state, data, position);
        if progress.is_err() {
            // A checkpoint that is still being written is of a step that went well. Only the first error is told.
            let _ = self.manager.wait_until_finished();
        }
        let progress = progress?;
        self.logger.finish()?;
        Ok(progress)
    }

    fn steps(
        &mut self,
        state: TrainState,
        mut data: TrainIterator,
        position: Option<IteratorState>,
    ) -> Result<Progress, TrainError> {
        if let Some(position) = &position {
            data.restore(position)?;
        }
        let mut position = data.state();
        let (sizes, first_step) = (self.batches.clone(), self.first_step);
        let rows = (first_step..).map(move |step| sizes.rows_at(step));
        let mut batches = Prefetcher::new(data, PREFETCH, rows)?;
        let run = &self.settings.run;
        let mut state = state;
        let mut in_flight: Option<InFlight> = None;
        let mut first_evaluation = None;
        let mut last_evaluation = None;
        let mut reused: Option<Batch> = None;
        let mut evaluated = None;
        let mut step = self.first_step;
        let mut saved = None;
        let mut health = Health::Finite;
        let mut ending = loop {
            if self.evaluates_before(step) && step < run.steps {
                if let Some(done) = in_flight.take() {
                    health = self.finish_step(done)?;
                }
                last_evaluation = self.evaluate(&state, step)?;
                first_evaluation = first_evaluation.or(last_evaluation);
                evaluated = Some(step);
                if let Some(reached) = self.target_reached(last_evaluation) {
                    break reached;
                }
            }
            if step >= run.steps {
                break Ending::Completed;
            }
            // A save that failed in the background is told now, not when the next one is due.
            self.manager.poll()?;
            if let Some(signal) = self.stop.received() {
                break Ending::Stopped { signal };
            }
            let began = Instant::now();
            if let Some(before) = &mut in_flight {
                before.ended = Some(began);
            }
            let next = match reused.clone() {
                Some(batch) => Some((batch, position.clone())),
                None => batches.next()?,
            };
            let Some((batch, after)) = next else {
                if step == 0 {
                    return Err(TrainError::NoBatch);
                }
                break Ending::DataEnded;
            };
            let data_wait = batches.take_waited();
            if self.settings.data.reuse_example_batch > 0 {
                // The data stays before this batch, so that a run that goes on finds the same one.
                reused = Some(batch.clone());
            } else {
                position = after;
            }
            let (next_state, metrics) = self.start_step(state, &batch)?;
            if let Some(larger) = self.batches.next_rows(step, run.steps) {
                self.steps.prepare(larger);
            }
            state = next_state;
            let started = InFlight { step, rows: batch.rows, metrics, data_wait, began, ended: None };
            if let Some(done) = in_flight.replace(started) {
                health = self.finish_step(done)?;
            }
            if self.saves_after(step) {
                if let Some(done) = in_flight.take() {
                    health = self.finish_step(done)?;
                }
                if health == Health::Finite {
                    self.save(&state, step, &position)?;
                    saved = Some(step);
                }
            }
            step += 1;
        };
        if let Some(done) = in_flight.take() {
            health = self.finish_step(done)?;
        }
        let is_over = !matches!(ending, Ending::Stopped { .. });
        let is_due = run.eval_interval.is_some() && step >= run.eval_start_step;
        if is_over && evaluated != Some(step) && is_due {
            last_evaluation = self.evaluate(&state, step)?.or(last_evaluation);
            first_evaluation = first_evaluation.or(last_evaluation);
            ending = self.target_reached(last_evaluation).unwrap_or(ending);
        }
        let last = step.checked_sub(1).filter(|last| saved != Some(*last) && *last >= self.first_step);
        let wants_save = self.settings.checkpoint.save_checkpoint_on_completion
            || matches!(ending, Ending::Stopped { .. });
        if let Some(last) = last
            && self.settings.checkpoint.enable_checkpointing
            && wants_save
            && health == Health::Finite
        {
            self.save(&state, last, &position)?;
        }
        self.manager.wait_until_finished()?;
        Ok(Progress { ending, steps: step, first_evaluation, last_evaluation })
    }

    /// Whether the parameters are evaluated before step `step`: before the first step that may be, and at each interval
    /// from there.
    fn evaluates_before(&self, step: u64) -> bool {
        let Some(interval) = self.settings.run.eval_interval.filter(|_| self.evaluator.is_some()) else {
            return false;
        };
        step.checked_sub(self.settings.run.eval_start_step)
            .is_some_and(|since| since.is_multiple_of(interval))
    }

    /// What ends a run whose evaluation came down to the target.
    fn target_reached(&self, evaluation: Option<EvaluationSummary>) -> Option<Ending> {
        let (loss, target) = (evaluation?.loss, self.settings.run.target_loss()?);
        (loss <= target).then_some(Ending::TargetReached { loss, target })
    }

    /// Whether a checkpoint is due after step `step`. The one after the last step comes after the last evaluation.
    fn saves_after(&self, step: u64) -> bool {
        let group = &self.settings.checkpoint;
        group.enable_checkpointing
            && step.is_multiple_of(group.checkpoint_period.max(1))
            && step + 1 < self.settings.run.steps
            && (step > 0 || group.save_checkpoint_on_start)
    }

    fn start_step(
        &mut self,
        state: TrainState,
        batch: &Batch,
    ) -> Result<(TrainState, PendingArray), TrainError> {
        let mut inputs = state.into_inputs();
        let vocab_size = self.settings.model.vocab_size;
        let step = &self.steps.of(batch.rows)?.program;
        let arrays =
            batch_arrays(self.runtime, &step.inputs()[inputs.len()..], batch, vocab_size, self.order)?;
        inputs.extend(arrays.iter().map(Input::Borrow));
        let outputs = step.run(inputs)?;
        let (state, rest) = TrainState::from_outputs(outputs, self.layout);
        Ok((state, rest[0].to_host_async()?))
    }

    /// Waits for a step's metrics and records them.
    ///
    /// A step's time is that of its turn of the loop, which waits for the device once in each turn, whether the
    /// platform runs programs while they are dispatched or afterwards.
    fn finish_step(&mut self, done: InFlight) -> Result<Health, TrainError> {
        let values = self.steps.of(done.rows)?.read(done.metrics)?;
        let step_time = done.ended.unwrap_or_else(Instant::now).duration_since(done.began);
        let num_devices = self.runtime.num_devices() as f64;
        let measurements = StepMeasurements {
            step: done.step,
            values,
            step_time,
            data_wait: done.data_wait,
            tflops_per_device: self.model.flops().training_step(done.rows, self.length) / 1e12 / num_devices,
            tokens_per_device: (done.rows * self.length) as f64 / num_devices,
            peak_tflops_per_device: self.peak_tflops,
        };
        let record = measurements.record();
        // Every step reports these.
        let [loss, raw_gradient_norm, parameter_norm] =
            [names::LOSS, names::RAW_GRADIENT_NORM, names::PARAMETER_NORM]
                .map(|name| record.metrics.get(name).unwrap_or(f64::NAN));
        let is_skipped = record.metrics.get(names::STEP_SKIPPED) == Some(1.0);
        self.logger.log_step(record)?;
        let run = &self.settings.run;
        // What was wrong with a step that was skipped is not in its state.
        if is_skipped {
            return Ok(if parameter_norm.is_finite() { Health::Finite } else { Health::NotFinite });
        }
        if (loss.is_nan() && run.abort_on_nan_loss) || (loss.is_infinite() && run.abort_on_inf_loss) {
            self.logger.flush()?;
            // One that is still being written is of a step that went well.
            self.manager.wait_until_finished()?;
            let is_saved = self.manager.latest()?.is_some();
            return Err(TrainError::NonFiniteLoss { step: done.step, loss, is_saved });
        }
        let is_finite = [loss, raw_gradient_norm, parameter_norm].iter().all(|value| value.is_finite());
        Ok(if is_finite { Health::Finite } else { Health::NotFinite })
    }

    fn evaluate(&self, state: &TrainState, step: u64) -> Result<Option<EvaluationSummary>, TrainError> {
        let Some(evaluator) = &self.evaluator else { return Ok(None) };
        let measured = evaluator.run(self.runtime, state.parameters(), step)?;
        self.logger.log_evaluation(measured.record())?;
        Ok(Some(EvaluationSummary { loss: measured.loss(), bits_per_byte: measured.bits_per_byte() }))
    }

    /// Saves the state after step `step`, whose metrics have been recorded and are finite.
    fn save(&mut self, state: &TrainState, step: u64, position: &IteratorState) -> Result<(), TrainError> {
        // One copy of the state in host memory at a time.
        self.manager.wait_until_finished()?;
        let (entries, extra_items) = state.entries(self.layout)?;
        let position = serde_json::to_value(position).expect("an iterator's state is plain data");
        let barrier = self.logger.barrier();
        let metadata = json!({
            "scan_layers": self.settings.model.scan_layers,
            "num_devices": self.runtime.num_devices(),
        });
        let request = SaveRequest {
            entries,
            extra_items,
            json: vec![JsonItem {
                item: ITERATOR_ITEM.into(),
                file: ITERATOR_FILE.into(),
                contents: position,
            }],
            custom_metadata: metadata.as_object().cloned().unwrap_or_default(),
            commit_gate: Some(Box::new(move || barrier.flush().map_err(Into::into))),
            // The next step overwrites the state.
            fetch_first: true,
        };
        self.manager.save(step, request)?;
        Ok(())
    }
}
