//! Monitoring of a run: how its time is spent, how even its steps are, profiles, and the stacks of its threads.

mod deviation;
mod goodput;
mod profile;
mod stacks;
mod timeline;
mod trace;
mod xplane;

use std::time::Duration;

use mt_config::{MonitorGroup, RunGroup};
use mt_runtime::Runtime;

use crate::{
    Observer, TrainError, events,
    metrics::{StepRecord, names},
};

use deviation::{Deviation, Reported};
use goodput::Goodput;
use profile::Profiler;
use timeline::Clock;

pub use goodput::GoodputSummary;
pub(crate) use stacks::StackRecorder;
pub(crate) use timeline::{Activity, Timeline, system_clock};

/// Watches a run from its begin to its end.
pub(crate) struct Monitor {
    pub timeline: Timeline,
    group: MonitorGroup,
    observer: Observer,
    goodput: Option<Goodput>,
    /// When goodput was last among the metrics.
    reported: Duration,
    deviation: Option<Deviation>,
    profiler: Option<Profiler>,
}

impl Monitor {
    /// Watches a run that begins now.
    pub fn new(group: &MonitorGroup, observer: &Observer, clock: Clock) -> Self {
        let timeline = Timeline::start(clock);
        Self {
            reported: timeline.started(),
            timeline,
            group: group.clone(),
            observer: observer.clone(),
            goodput: None,
            deviation: None,
            profiler: None,
        }
    }

    /// Opens the record of goodput if the run keeps one. The run's directory must be locked until the record is dropped.
    pub fn open_record(&self, run: &RunGroup) -> Option<Goodput> {
        if !self.group.records_goodput() {
            return None;
        }
        match Goodput::open(&run.goodput_path(), &self.timeline, &self.observer) {
            Ok(goodput) => Some(goodput),
            Err(error) => {
                events::warn(&self.observer, format!("goodput is not recorded: {error}"));
                None
            }
        }
    }

    /// The loop begins.
    pub fn begin_loop(&mut self, first_step: u64, goodput: Option<Goodput>, run: &RunGroup) {
        self.timeline.begin(Activity::Step);
        let now = self.timeline.now();
        if let Some(goodput) = &goodput {
            goodput.begin_loop(first_step);
        }
        self.goodput = goodput;
        self.reported = now;
        let interval = self.group.deviation_interval();
        self.deviation = interval.map(|interval| Deviation::new(interval, now));
        self.profiler = Profiler::new(&self.group, first_step, run.tensorboard_directory());
    }

    /// A step's turn of the loop is over.
    pub fn end_step(&mut self, step: u64) {
        if self.profiler.as_ref().is_some_and(|profiler| profiler.ends_with(step)) {
            self.end_profile();
        }
        if let Some(goodput) = &self.goodput {
            goodput.end_step(step);
        }
    }

    /// The state after a step is about to be saved.
    pub fn begin_save(&self, step: u64) {
        if let Some(goodput) = &self.goodput {
            goodput.save_step(step);
        }
    }

    /// Ends the recording of profiles after a failure, which must not end the training.
    fn warn_of_profiler(&mut self, error: &TrainError) {
        self.profiler = None;
        events::warn(&self.observer, format!("no more profiles are recorded: {error}"));
    }

    /// Adds goodput and deviation to a step's record if they are due, and reports a step that is far slower than usual.
    pub fn observe(&mut self, record: &mut StepRecord, step_time: Duration) {
        let now = self.timeline.now();
        if let Some(deviation) = &mut self.deviation {
            let seconds = step_time.as_secs_f64();
            let Reported { deviation, usual_of_slow } = deviation.observe(now, seconds);
            if let Some(deviation) = deviation {
                record.metrics.set(names::STEP_TIME_DEVIATION, deviation);
            }
            if let Some(usual) = usual_of_slow {
                let text = format!(
                    "step {} took {seconds:.3} s, {:.1} times the usual {usual:.3} s",
                    record.step,
                    seconds / usual
                );
                events::warn(&self.observer, text);
            }
        }
        if let (Some(goodput), Some(interval)) = (&self.goodput, self.group.goodput_interval())
            && now.saturating_sub(self.reported) >= interval
            && let Some(summary) = goodput.summary()
        {
            summary.write_to(&mut record.metrics);
            self.reported = now;
        }
        let is_edge = self.profiler.as_ref().is_some_and(|profiler| profiler.is_edge(record.step));
        if is_edge && self.group.hide_profiler_step_metric {
            record.metrics.remove_all(names::PERFORMANCE);
        }
    }

    /// Whether a profile begins or ends with this step, so that the devices are to be waited for.
    pub fn waits_before(&self, step: u64) -> bool {
        self.group.profile_cleanly
            && self.profiler.as_ref().is_some_and(|profiler| profiler.begins_with(step))
    }

    /// As [`Monitor::waits_before`], after the step.
    pub fn waits_after(&self, step: u64) -> bool {
        self.group.profile_cleanly && self.profiler.as_ref().is_some_and(|profiler| profiler.ends_with(step))
    }

    /// The loop turns to a step. Begins a profile if one is due.
    pub fn begin_step(&mut self, step: u64, runtime: &Runtime) {
        self.timeline.at_step(step);
        let due = self.profiler.as_mut().filter(|profiler| profiler.begins_with(step));
        if let Some(Err(error)) = due.map(|profiler| profiler.begin(runtime, &self.timeline)) {
            self.warn_of_profiler(&error);
        }
    }

    /// Ends a profile, if one is being recorded.
    fn end_profile(&mut self) {
        let Some(profiler) = &mut self.profiler else { return };
        match profiler.end(&self.timeline) {
            Ok(Some(directory)) => {
                events::note(&self.observer, format!("a profile is in `{}`", directory.display()));
            }
            Ok(None) => {}
            Err(error) => self.warn_of_profiler(&error),
        }
    }

    /// The loop ended, whether all went well or not. Returns how the run's time was spent, if it is recorded.
    pub fn finish(&mut self) -> Option<GoodputSummary> {
        self.end_profile();
        if self.profiler.as_ref().is_some_and(Profiler::is_empty) {
            let skipped = self.group.skip_first_n_steps_for_profiler;
            let text = format!(
                "no step was profiled: the run did not get past the {skipped} steps that `skip_first_n_steps_for_profiler` leaves out"
            );
            events::warn(&self.observer, text);
        }
        self.goodput.take()?.end()
    }
}
