//! Keys about how a run spends its time, and about profiles.

use std::time::Duration;

use super::{choices::ProfilerChoice, group};
use crate::{config::Config, error::Problem};

group! {
    /// Records and reports of how a run spends its time, and profiles.
    pub struct MonitorGroup {
        enable_goodput_recording: bool,
        monitor_goodput: bool,
        goodput_upload_interval_seconds: u64,
        monitor_step_time_deviation: bool,
        step_deviation_interval_seconds: u64,
        collect_stack_trace: bool,
        stack_trace_interval_seconds: u64,
        profiler: ProfilerChoice,
        skip_first_n_steps_for_profiler: u64,
        profiler_steps: u64,
        profile_periodically_period: Option<u64>,
        profile_cleanly: bool,
        hide_profiler_step_metric: bool,
    }
}

impl MonitorGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !self.is_profiled() {
            return;
        }
        if self.profiler_steps == 0 {
            problems.push(Problem::inconsistent(
                format!("{}, but {}", config.stated("profiler"), config.stated("profiler_steps")),
                "set `profiler_steps` to at least 1, or leave out `profiler`",
            ));
        }
        if self.profile_period().is_some_and(|period| period < self.profiler_steps) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, so that one profile would begin within another",
                    config.stated("profile_periodically_period"),
                    config.stated("profiler_steps")
                ),
                "set `profile_periodically_period` to at least `profiler_steps`",
            ));
        }
    }

    /// The time between two records of the stacks of all threads, if they are recorded.
    pub fn stack_interval(&self) -> Option<Duration> {
        self.collect_stack_trace.then(|| Duration::from_secs(self.stack_trace_interval_seconds))
    }

    /// Whether some steps are profiled.
    pub fn is_profiled(&self) -> bool {
        self.profiler == ProfilerChoice::Xplane
    }

    /// The number of steps from the start of one profile to the next, if there are several.
    pub fn profile_period(&self) -> Option<u64> {
        self.profile_periodically_period.filter(|period| *period > 0)
    }

    /// Whether the run keeps a record of how its time is spent, which reports need as well.
    pub fn records_goodput(&self) -> bool {
        self.enable_goodput_recording || self.monitor_goodput
    }

    /// The time between two reports of goodput among the metrics, if there are any.
    pub fn goodput_interval(&self) -> Option<Duration> {
        self.monitor_goodput.then(|| Duration::from_secs(self.goodput_upload_interval_seconds))
    }

    /// The time between two reports of how far step times deviate, if there are any.
    pub fn deviation_interval(&self) -> Option<Duration> {
        let is_monitored = self.monitor_goodput && self.monitor_step_time_deviation;
        is_monitored.then(|| Duration::from_secs(self.step_deviation_interval_seconds))
    }
}
