//! Goodput: the share of a run's time in which training progressed, over all of the run's processes.
//!
//! The record is a file of JSON lines in the run's directory, to which each process appends. A line holds the seconds
//! of each activity since the line before, so the time between the last line of a process and the first of the next
//! is the time in which nothing ran. Steps that a resumed run repeats are lost work: their seconds count as badput.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::timeline::{Activity, Spent};
use crate::{
    TrainError,
    metrics::{Metrics, names},
};

/// How a run's time was spent, from its first process to now.
#[derive(Clone, Debug, PartialEq)]
pub struct GoodputSummary {
    /// Seconds since the run first began.
    pub seconds: f64,
    /// The share in which training progressed.
    pub goodput: f64,
    /// The shares of everything else, by its name.
    pub badput: Vec<(&'static str, f64)>,
}

/// Badput beside the activities of one process: repeated steps, and time in which no process ran.
const LOST_WORK: &str = "lost_work";
const IDLE: &str = "idle";

impl GoodputSummary {
    /// The shares under the names of metrics.
    pub(crate) fn write_to(&self, metrics: &mut Metrics) {
        metrics.set(names::GOODPUT, self.goodput);
        for (name, share) in &self.badput {
            metrics.set(format!("{}{name}", names::BADPUT), *share);
        }
    }
}

/// The record of a run, and its sums.
pub(crate) struct Goodput {
    path: PathBuf,
    file: File,
    ledger: Ledger,
}

impl Goodput {
    /// Opens the record, or makes it, for a process that began at `start`.
    pub fn open(path: &Path, start: Duration) -> Result<Self, TrainError> {
        let ledger = Ledger::read(path)?;
        let open = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            OpenOptions::new().create(true).append(true).open(path)
        };
        let file = open().map_err(TrainError::io("open", path))?;
        let mut goodput = Self { path: path.to_owned(), file, ledger };
        goodput.append(Event::Start, start, &Spent::default())?;
        Ok(goodput)
    }

    /// The loop begins with a step. The work of earlier processes on this step and later ones is lost.
    pub fn begin_loop(&mut self, first_step: u64, (spent, now): (Spent, Duration)) -> Result<(), TrainError> {
        self.append(Event::Loop { first_step }, now, &spent)
    }

    /// A step's turn of the loop is over.
    pub fn end_step(&mut self, step: u64, (spent, now): (Spent, Duration)) -> Result<(), TrainError> {
        self.append(Event::Step { step }, now, &spent)
    }

    /// The process is done with the run.
    pub fn end(&mut self, (spent, now): (Spent, Duration)) -> Result<(), TrainError> {
        self.append(Event::End, now, &spent)
    }

    pub fn summary(&self) -> GoodputSummary {
        self.ledger.summary()
    }

    fn append(&mut self, event: Event, now: Duration, spent: &Spent) -> Result<(), TrainError> {
        let line = Line::new(event, now, spent);
        self.ledger.add(&line);
        let mut text = serde_json::to_string(&line).expect("a line is JSON");
        text.push('\n');
        // One call for the whole line, so that a kill leaves whole lines.
        self.file.write_all(text.as_bytes()).map_err(TrainError::io("write", &self.path))
    }
}

/// The occasion of a line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event {
    Start,
    Loop { first_step: u64 },
    Step { step: u64 },
    End,
}

/// A line of the record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    event: Event,
    /// Seconds since the Unix epoch.
    time: f64,
    /// Seconds of each activity since the line before.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    seconds: BTreeMap<String, f64>,
}

impl Line {
    fn new(event: Event, now: Duration, spent: &Spent) -> Self {
        // Microseconds are fine enough, and short.
        let rounded = |seconds: f64| (seconds * 1e6).round() / 1e6;
        let seconds = Activity::ALL
            .into_iter()
            .map(|activity| (activity.name().to_owned(), rounded(spent.of(activity))))
            .filter(|(_, seconds)| *seconds > 0.0)
            .collect();
        Self { event, time: rounded(now.as_secs_f64()), seconds }
    }

    fn spent(&self) -> Spent {
        let mut spent = Spent::default();
        for activity in Activity::ALL {
            spent.add(activity, self.seconds.get(activity.name()).copied().unwrap_or(0.0));
        }
        spent
    }
}

/// The sums of lines.
#[derive(Clone, Debug, Default, PartialEq)]
struct Ledger {
    /// The times of the first line and of the last.
    times: Option<[f64; 2]>,
    /// Seconds that are not productive, by activity.
    unproductive: Spent,
    /// The productive seconds of each step that stands, in order.
    steps: Vec<(u64, f64)>,
    /// Productive seconds of all steps that stand.
    productive: f64,
    lost: f64,
    idle: f64,
}

impl Ledger {
    /// Adds up the lines of a file, of none if the file is missing. A torn last line is cut off.
    fn read(path: &Path) -> Result<Self, TrainError> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(TrainError::io("read", path)(error)),
        };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut ledger = Self::default();
        for (index, line) in text[..whole].lines().enumerate() {
            let line = serde_json::from_str(line)
                .map_err(|_| TrainError::NotGoodput { path: path.to_owned(), line: index + 1 })?;
            ledger.add(&line);
        }
        if whole < text.len() {
            let file = OpenOptions::new().write(true).open(path);
            file.and_then(|file| file.set_len(whole as u64)).map_err(TrainError::io("write", path))?;
        }
        Ok(ledger)
    }

    fn add(&mut self, line: &Line) {
        let [first, last] = self.times.unwrap_or([line.time; 2]);
        match line.event {
            // The clock of a machine may be set back between processes.
            Event::Start => self.idle += (line.time - last).max(0.0),
            Event::Loop { first_step } => self.lose(first_step),
            Event::Step { .. } | Event::End => {}
        }
        self.times = Some([first, last.max(line.time)]);
        let spent = line.spent();
        for activity in Activity::ALL.into_iter().filter(|activity| !activity.is_productive()) {
            self.unproductive.add(activity, spent.of(activity));
        }
        let productive = spent.productive();
        self.productive += productive;
        match (line.event, self.steps.last_mut()) {
            (Event::Step { step }, _) => self.steps.push((step, productive)),
            // The work between steps and after the last one belongs to the step before.
            (_, Some((_, seconds))) => *seconds += productive,
            (_, None) => {}
        }
    }

    /// Counts the steps from `first_step` on as lost.
    fn lose(&mut self, first_step: u64) {
        while let Some((_, seconds)) = self.steps.pop_if(|(step, _)| *step >= first_step) {
            self.productive -= seconds;
            self.lost += seconds;
        }
    }

    fn summary(&self) -> GoodputSummary {
        let unproductive = Activity::ALL.into_iter().filter(|activity| !activity.is_productive());
        let badput: Vec<(&'static str, f64)> = unproductive
            .map(|activity| (activity.name(), self.unproductive.of(activity)))
            .chain([(LOST_WORK, self.lost), (IDLE, self.idle)])
            .collect();
        let seconds = self.productive + badput.iter().map(|(_, seconds)| seconds).sum::<f64>();
        let share = |part: f64| if seconds > 0.0 { part / seconds } else { 0.0 };
        GoodputSummary {
            seconds,
            goodput: share(self.productive),
            badput: badput.into_iter().map(|(name, seconds)| (name, share(seconds))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::{Timeline, tests::FakeClock};
    use super::*;

    /// A process of a run: starts, restores, does steps of 10 seconds with a second's wait for data each, and ends or
    /// dies.
    fn process(path: &Path, clock: &FakeClock, steps: std::ops::Range<u64>, ends: bool) -> GoodputSummary {
        let mut timeline = Timeline::start(clock.clock());
        let mut goodput = Goodput::open(path, timeline.now()).unwrap();
        clock.advance(5.0);
        timeline.begin(Activity::Restore);
        clock.advance(15.0);
        timeline.begin(Activity::Step);
        goodput.begin_loop(steps.start, timeline.take_spent()).unwrap();
        for step in steps {
            timeline.begin(Activity::DataWait);
            clock.advance(1.0);
            timeline.begin(Activity::Step);
            clock.advance(4.0);
            timeline.begin(Activity::Metrics);
            clock.advance(6.0);
            goodput.end_step(step, timeline.take_spent()).unwrap();
            timeline.begin(Activity::Step);
        }
        if ends {
            timeline.begin(Activity::Checkpoint);
            clock.advance(2.0);
            goodput.end(timeline.take_spent()).unwrap();
        }
        goodput.summary()
    }

    fn check(summary: &GoodputSummary, seconds: f64, productive: f64, badput: &[(&str, f64)]) {
        assert!((summary.seconds - seconds).abs() < 1e-6, "{summary:?}");
        assert!((summary.goodput * seconds - productive).abs() < 1e-6, "{summary:?}");
        for (name, share) in &summary.badput {
            let expected = badput.iter().find(|(of, _)| of == name).map_or(0.0, |(_, seconds)| *seconds);
            assert!((share * seconds - expected).abs() < 1e-6, "{name}: {summary:?}");
        }
    }

    #[test]
    fn time_adds_up_over_processes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("metrics/goodput.jsonl");
        let clock = FakeClock::default();
        clock.advance(1000.0);
        // Ten steps, of which the state after the sixth was the last to be saved.
        let first = process(&path, &clock, 0..10, false);
        check(&first, 130.0, 100.0, &[("startup", 5.0), ("restore", 15.0), ("data_wait", 10.0)]);
        clock.advance(50.0);
        let second = process(&path, &clock, 6..12, true);
        let badput = [
            ("startup", 10.0),
            ("restore", 30.0),
            ("data_wait", 16.0),
            ("checkpoint", 2.0),
            ("lost_work", 40.0),
            ("idle", 50.0),
        ];
        check(&second, 268.0, 120.0, &badput);
        let mut metrics = Metrics::default();
        second.write_to(&mut metrics);
        assert_eq!(metrics.get("goodput"), Some(second.goodput));
        assert!((metrics.get("badput/lost_work").unwrap() - 40.0 / 268.0).abs() < 1e-9);
        let total: f64 = metrics.iter().map(|(_, share)| share).sum();
        assert!((total - 1.0).abs() < 1e-9, "{metrics:?}");
    }

    #[test]
    fn a_torn_line_is_cut_off_and_other_text_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("goodput.jsonl");
        let clock = FakeClock::default();
        process(&path, &clock, 0..2, true);
        let whole = fs::read_to_string(&path).unwrap();
        assert!(whole.contains(
            r#"{"event":"loop","first_step":0,"time":20.0,"seconds":{"restore":15.0,"startup":5.0}}"#
        ));
        let last = whole.trim_end().rfind('\n').unwrap() + 1;
        for torn in last..whole.len() {
            fs::write(&path, &whole[..torn]).unwrap();
            Ledger::read(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), whole[..last]);
        }
        fs::write(&path, format!("{whole}notes\n")).unwrap();
        let error = Goodput::open(&path, Duration::ZERO).err().unwrap();
        assert!(matches!(error, TrainError::NotGoodput { line: 6, .. }), "{error}");
        assert!(error.is_user_error());
    }
}
