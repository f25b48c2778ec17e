//! The activities of a run's main thread.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// An activity of the main thread. Each moment of a run belongs to exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Starting the devices, tracing, and reading checkpoints' descriptions.
    Startup,
    /// Opening the data and training a tokenizer.
    DataPreparation,
    Compile,
    /// Loading or drawing the first state.
    Restore,
    /// Dispatching a step, and the loop's own work.
    Step,
    /// Waiting for a step's metrics, and so for the devices.
    Metrics,
    /// Waiting for a batch.
    DataWait,
    Evaluation,
    /// Copying the state to the host, and waiting for an earlier checkpoint to be written.
    Checkpoint,
}

impl Activity {
    const COUNT: usize = 9;

    pub const ALL: [Self; Self::COUNT] = [
        Self::Startup,
        Self::DataPreparation,
        Self::Compile,
        Self::Restore,
        Self::Step,
        Self::Metrics,
        Self::DataWait,
        Self::Evaluation,
        Self::Checkpoint,
    ];

    /// The activity's name in records and profiles.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Startup => "startup",
            Self::DataPreparation => "data_preparation",
            Self::Compile => "compile",
            Self::Restore => "restore",
            Self::Step => "step",
            Self::Metrics => "metrics",
            Self::DataWait => "data_wait",
            Self::Evaluation => "evaluation",
            Self::Checkpoint => "checkpoint",
        }
    }

    /// Whether training progresses meanwhile.
    pub const fn is_productive(self) -> bool {
        matches!(self, Self::Step | Self::Metrics)
    }
}

/// Tells the time since the Unix epoch. It never goes backwards.
pub(crate) type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The system's time of the call, continued by the monotonic clock.
pub(crate) fn system_clock() -> Clock {
    let (epoch, start) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), Instant::now());
    Arc::new(move || epoch + start.elapsed())
}

/// Seconds of each activity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent([f64; Activity::COUNT]);

impl Spent {
    pub fn of(&self, activity: Activity) -> f64 {
        self.0[activity as usize]
    }

    pub fn add(&mut self, activity: Activity, seconds: f64) {
        self.0[activity as usize] += seconds;
    }

    pub fn add_all(&mut self, other: &Self) {
        Activity::ALL.into_iter().for_each(|activity| self.add(activity, other.of(activity)));
    }

    /// The seconds in which training progressed.
    pub fn productive(&self) -> f64 {
        Activity::ALL.into_iter().filter(|activity| activity.is_productive()).map(|of| self.of(of)).sum()
    }
}

/// An activity from its begin to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Span {
    pub activity: Activity,
    /// The step that the loop works on, once it runs.
    pub step: Option<u64>,
    pub begin: Duration,
    pub end: Duration,
}

/// The activities of the main thread, one after another. Clones share them, so that another thread can read how the time
/// is spent.
#[derive(Clone)]
pub(crate) struct Timeline {
    clock: Clock,
    started: Duration,
    state: Arc<Mutex<State>>,
}

struct State {
    activity: Activity,
    step: Option<u64>,
    since: Duration,
    spent: Spent,
    /// Activities since recording began, if they are recorded.
    spans: Option<Vec<Span>>,
}

impl Timeline {
    /// A timeline that begins with [`Activity::Startup`].
    pub fn start(clock: Clock) -> Self {
        let started = clock();
        let state = State {
            activity: Activity::Startup,
            step: None,
            since: started,
            spent: Spent::default(),
            spans: None,
        };
        Self { clock, started, state: Arc::new(Mutex::new(state)) }
    }

    /// When it began.
    pub fn started(&self) -> Duration {
        self.started
    }

    pub fn now(&self) -> Duration {
        (self.clock)()
    }

    /// Ends the activity and begins another. Returns the one that ended, so that a caller can go back to it.
    pub fn begin(&self, activity: Activity) -> Activity {
        std::mem::replace(&mut self.closed().activity, activity)
    }

    /// Says which step the loop works on from now on.
    pub fn at_step(&self, step: u64) {
        self.closed().step = Some(step);
    }

    /// The seconds of each activity since [`Timeline::take_spent`] was last called, and now.
    pub fn spent(&self) -> (Spent, Duration) {
        let state = self.closed();
        (state.spent, state.since)
    }

    /// As [`Timeline::spent`]. Counts from now on.
    pub fn take_spent(&self) -> (Spent, Duration) {
        let mut state = self.closed();
        (std::mem::take(&mut state.spent), state.since)
    }

    /// Records activities from now on.
    pub fn record(&self) {
        self.closed().spans = Some(Vec::new());
    }

    /// The activities since recording began, which ends.
    pub fn take_spans(&self) -> Vec<Span> {
        self.closed().spans.take().unwrap_or_default()
    }

    /// The state, with the present activity accounted for up to now.
    fn closed(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { activity, step, since: begin, .. } = *state;
        let end = self.now();
        state.spent.add(activity, end.saturating_sub(begin).as_secs_f64());
        if let Some(spans) = state.spans.as_mut().filter(|_| end > begin) {
            spans.push(Span { activity, step, begin, end });
        }
        state.since = end;
        state
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A clock that stands still until it is moved.
    #[derive(Clone, Default)]
    pub(crate) struct FakeClock(Arc<AtomicU64>);

    impl FakeClock {
        pub(crate) fn clock(&self) -> Clock {
            let milliseconds = self.0.clone();
            Arc::new(move || Duration::from_millis(milliseconds.load(Ordering::Relaxed)))
        }

        pub(crate) fn advance(&self, seconds: f64) {
            self.0.fetch_add((seconds * 1e3) as u64, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_moment_belongs_to_one_activity() {
        let clock = FakeClock::default();
        let timeline = Timeline::start(clock.clock());
        for (activity, seconds) in [
            (Activity::Compile, 2.0),
            (Activity::Step, 3.0),
            (Activity::DataWait, 0.5),
            (Activity::Metrics, 1.0),
            (Activity::Step, 0.25),
        ] {
            clock.advance(seconds);
            timeline.begin(activity);
        }
        clock.advance(4.0);
        let (spent, now) = timeline.take_spent();
        assert_eq!(now, Duration::from_millis(10_750));
        let seconds = Activity::ALL.map(|activity| spent.of(activity));
        assert_eq!(seconds, [2.0, 0.0, 3.0, 0.0, 4.5, 0.25, 1.0, 0.0, 0.0]);
        assert_eq!(spent.productive(), 4.75);
        assert_eq!(timeline.take_spent().0, Spent::default());
    }

    #[test]
    fn spans_are_recorded_on_request() {
        let clock = FakeClock::default();
        let timeline = Timeline::start(clock.clock());
        clock.advance(1.0);
        timeline.begin(Activity::Step);
        timeline.record();
        timeline.at_step(7);
        clock.advance(1.0);
        timeline.begin(Activity::DataWait);
        clock.advance(0.5);
        let [begin, middle, end] = [1000, 2000, 2500].map(Duration::from_millis);
        let span = |activity, begin, end| Span { activity, step: Some(7), begin, end };
        let expected = [span(Activity::Step, begin, middle), span(Activity::DataWait, middle, end)];
        assert_eq!(timeline.take_spans(), expected);
        timeline.begin(Activity::Step);
        assert_eq!(timeline.take_spans(), []);
    }
}
