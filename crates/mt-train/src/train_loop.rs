//! The loop over steps.
//!
//! The device is given a step before the metrics of the one before are read (of earlier ones, where
//! `max_inflight_computations` is more than 2), and batches are made on another thread, so that it never waits for the
//! host. Checkpoints are copied to the host while the loop waits, and written by
//! another thread.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use mt_checkpoint::CheckpointManager;
use mt_data::{Batch, BatchSource, HeldOut, Position, Prefetcher};

use crate::{
    TrainError, Trainer,
    measured::PendingMetrics,
    metrics::{MetricLogger, StepMeasurements, names},
    run::{Ending, EvaluationSummary, Schedule},
    signals::StopSignal,
};

/// How many batches are made ahead.
const PREFETCH: usize = 4;

/// Everything the loop works with.
pub(crate) struct Loop {
    // These are dropped before the trainer, which may have to wait for a compiler.
    pub logger: MetricLogger,
    pub manager: CheckpointManager,
    pub trainer: Trainer,
    pub schedule: Schedule,
    pub evaluation: Option<Box<dyn HeldOut>>,
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
    metrics: PendingMetrics,
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

/// Where the loop is.
struct State {
    batches: Prefetcher,
    /// The data's position behind the last batch that was used.
    position: Position,
    /// The batch of every step, if one is to be used again and again.
    reused: Option<Batch>,
    /// The oldest first.
    in_flight: VecDeque<InFlight>,
    health: Health,
    first_evaluation: Option<EvaluationSummary>,
    last_evaluation: Option<EvaluationSummary>,
    /// The steps before which the last evaluation was.
    evaluated: Option<u64>,
    /// The last step that was saved.
    saved: Option<u64>,
}

impl Loop {
    /// Runs to the last step, the end of the data or a signal.
    pub fn run(
        mut self,
        data: Box<dyn BatchSource>,
        position: Option<Position>,
    ) -> Result<Progress, TrainError> {
        let progress = self.steps(data, position);
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
        mut data: Box<dyn BatchSource>,
        position: Option<Position>,
    ) -> Result<Progress, TrainError> {
        if let Some(position) = &position {
            data.seek(position)?;
        }
        let position = data.position();
        let (sizes, first_step) = (self.schedule.batches.clone(), self.step());
        let rows = (first_step..).map(move |step| sizes.rows_at(step));
        let mut state = State {
            batches: Prefetcher::new(data, PREFETCH, rows)?,
            position,
            reused: None,
            in_flight: VecDeque::new(),
            health: Health::Finite,
            first_evaluation: None,
            last_evaluation: None,
            evaluated: None,
            saved: None,
        };
        let ending = loop {
            if let Some(ending) = self.turn(&mut state)? {
                break ending;
            }
        };
        self.end(state, ending, first_step)
    }

    /// One turn of the loop: an evaluation and a checkpoint if they are due, and a step in between.
    fn turn(&mut self, state: &mut State) -> Result<Option<Ending>, TrainError> {
        let (step, steps) = (self.step(), self.trainer.plan.settings.run.steps);
        let evaluates = self.evaluation.is_some()
            && Schedule::evaluates_before(&self.trainer.plan.settings, step)
            && step < steps;
        if evaluates {
            self.finish_steps(state, 0)?;
            if let Some(reached) = self.evaluate(state)? {
                return Ok(Some(reached));
            }
        }
        if step >= steps {
            return Ok(Some(Ending::Completed));
        }
        // A save that failed in the background is told now, not when the next one is due.
        self.manager.poll()?;
        if let Some(signal) = self.stop.received() {
            return Ok(Some(Ending::Stopped { signal }));
        }
        let began = Instant::now();
        if let Some(before) = state.in_flight.back_mut() {
            before.ended = Some(began);
        }
        let Some(batch) = self.next_batch(state)? else {
            return if step == 0 { Err(TrainError::NoBatch) } else { Ok(Some(Ending::DataEnded)) };
        };
        let data_wait = state.batches.take_waited();
        let metrics = self.trainer.step_checked(&batch)?;
        if let Some(larger) = self.schedule.batches.next_rows(step, steps) {
            self.trainer.prepare(larger);
        }
        let started = InFlight { step, rows: batch.rows, metrics, data_wait, began, ended: None };
        state.in_flight.push_back(started);
        self.finish_steps(state, self.trainer.plan.settings.run.max_inflight_computations - 1)?;
        if Schedule::saves_after(&self.trainer.plan.settings, step) {
            self.finish_steps(state, 0)?;
            if state.health == Health::Finite {
                self.save(state, step)?;
            }
        }
        Ok(None)
    }

    /// The next batch, and the data's position behind it.
    fn next_batch(&self, state: &mut State) -> Result<Option<Batch>, TrainError> {
        if let Some(batch) = &state.reused {
            return Ok(Some(batch.clone()));
        }
        let Some((batch, after)) = state.batches.next()? else { return Ok(None) };
        if self.trainer.plan.settings.data.reuse_example_batch > 0 {
            // The data stays before this batch, so that a resumed run finds the same one.
            state.reused = Some(batch.clone());
        } else {
            state.position = after;
        }
        Ok(Some(batch))
    }

    /// The last evaluation and the last checkpoint.
    fn end(&mut self, mut state: State, mut ending: Ending, first_step: u64) -> Result<Progress, TrainError> {
        self.finish_steps(&mut state, 0)?;
        let step = self.step();
        let plan = self.trainer.plan.clone();
        let (run, checkpoint) = (&plan.settings.run, &plan.settings.checkpoint);
        let is_over = !matches!(ending, Ending::Stopped { .. });
        let is_due = run.eval_interval.is_some() && step >= run.eval_start_step;
        if is_over && state.evaluated != Some(step) && is_due {
            ending = self.evaluate(&mut state)?.unwrap_or(ending);
        }
        let last = step.checked_sub(1).filter(|last| state.saved != Some(*last) && *last >= first_step);
        let wants_save = checkpoint.save_checkpoint_on_completion || matches!(ending, Ending::Stopped { .. });
        if let Some(last) = last
            && checkpoint.enable_checkpointing
            && wants_save
            && state.health == Health::Finite
        {
            self.save(&mut state, last)?;
        }
        self.manager.wait_until_finished()?;
        let State { first_evaluation, last_evaluation, .. } = state;
        Ok(Progress { ending, steps: step, first_evaluation, last_evaluation })
    }

    /// The number of steps that were started.
    fn step(&self) -> u64 {
        self.trainer.steps_done()
    }

    /// What ends a run whose evaluation came down to the target.
    fn target_reached(&self, evaluation: EvaluationSummary) -> Option<Ending> {
        let (loss, target) = (evaluation.loss, self.trainer.plan.settings.run.target_loss()?);
        (loss <= target).then_some(Ending::TargetReached { loss, target })
    }

    /// Waits for the oldest steps until at most so many are under way.
    fn finish_steps(&mut self, state: &mut State, most: usize) -> Result<(), TrainError> {
        while state.in_flight.len() > most
            && let Some(done) = state.in_flight.pop_front()
        {
            state.health = self.finish_step(done)?;
        }
        Ok(())
    }

    /// Waits for a step's metrics and records them.
    ///
    /// A step's time is that of its turn of the loop, which waits for the device once in each turn, whether the
    /// platform runs programs while they are dispatched or afterwards.
    fn finish_step(&mut self, done: InFlight) -> Result<Health, TrainError> {
        let values = done.metrics.read()?;
        let step_time = done.ended.unwrap_or_else(Instant::now).duration_since(done.began);
        let num_devices = self.trainer.runtime.num_devices() as f64;
        let plan = self.trainer.plan.clone();
        let [rows, length] = plan.objective().sequences(done.rows);
        let measurements = StepMeasurements {
            step: done.step,
            values,
            step_time,
            data_wait: done.data_wait,
            tflops_per_device: plan.model().flops().training_step(rows, length) / 1e12 / num_devices,
            tokens_per_device: (rows * length) as f64 / num_devices,
            peak_tflops_per_device: self.peak_tflops,
            is_cross_entropy: plan.objective().is_cross_entropy(),
        };
        let record = measurements.record();
        // Every step reports these.
        let [loss, raw_gradient_norm, parameter_norm] =
            [names::LOSS, names::RAW_GRADIENT_NORM, names::PARAMETER_NORM]
                .map(|name| record.metrics.get(name).unwrap_or(f64::NAN));
        let is_skipped = record.metrics.get(names::STEP_SKIPPED) == Some(1.0);
        self.logger.log_step(record)?;
        let run = &plan.settings.run;
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

    /// Evaluates the parameters, if there is held-out data. Returns what ends the run if the loss came down to the target.
    fn evaluate(&mut self, state: &mut State) -> Result<Option<Ending>, TrainError> {
        let Some(set) = &self.evaluation else { return Ok(None) };
        let measured = self.trainer.evaluate_checked(set.batches()?)?;
        self.logger.log_evaluation(measured.record())?;
        let summary = EvaluationSummary { loss: measured.loss(), bits_per_byte: measured.bits_per_byte() };
        state.evaluated = Some(self.step());
        state.first_evaluation = state.first_evaluation.or(Some(summary));
        state.last_evaluation = Some(summary);
        Ok(self.target_reached(summary))
    }

    /// Saves the state after step `step`, whose metrics have been recorded and are finite.
    fn save(&mut self, state: &mut State, step: u64) -> Result<(), TrainError> {
        let barrier = self.logger.barrier();
        let gate = Box::new(move || barrier.flush().map_err(Into::into));
        self.trainer.save(&mut self.manager, Some(&state.position), Some(gate))?;
        state.saved = Some(step);
        Ok(())
    }
}
