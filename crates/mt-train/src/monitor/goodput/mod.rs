//! Goodput: the share of a run's time in which training progressed, over all of the run's processes.
//!
//! The record is a file of JSON lines in the run's directory, to which each process appends from the moment it has
//! locked the directory. A line holds the seconds of each activity since the line before, so the time between the last
//! line of a process and the first of the next is the time in which nothing ran. A thread writes lines while the main
//! thread compiles, waits or hangs, so a process that is killed leaves at most [`INTERVAL`] unaccounted. The file grows
//! with time and not with steps: one line holds all steps that ended since the line before. Steps that a resumed run
//! repeats are lost work: their seconds count as badput.

mod ledger;

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::timeline::{Spent, Timeline};
use crate::{Observer, TrainError, events};

use ledger::{Event, Ledger, Line};

pub use ledger::GoodputSummary;

/// The time between two lines, except for those of events.
const INTERVAL: Duration = Duration::from_secs(5);

/// The record of a run. Dropping it ends the record of this process.
pub(crate) struct Goodput {
    record: Arc<Mutex<Record>>,
    /// The thread that writes lines as time passes, and the channel whose end stops it.
    writer: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Goodput {
    /// Opens the record, or makes it, for the process of a timeline. A later failure to write is reported to the
    /// observer and ends the record.
    pub fn open(path: &Path, timeline: &Timeline, observer: &Observer) -> Result<Self, TrainError> {
        Self::open_every(INTERVAL, path, timeline, observer)
    }

    fn open_every(
        interval: Duration,
        path: &Path,
        timeline: &Timeline,
        observer: &Observer,
    ) -> Result<Self, TrainError> {
        let record = Arc::new(Mutex::new(Record::open(interval, path, timeline, observer)?));
        let (stop, stopped) = channel();
        let shared = record.clone();
        let write = move || {
            while stopped.recv_timeout(interval / 5) == Err(RecvTimeoutError::Timeout) {
                locked(&shared).write_if_due();
            }
        };
        let thread = thread::Builder::new().name("goodput".to_owned()).spawn(write);
        let thread = thread.map_err(TrainError::io("start", "a thread"))?;
        Ok(Self { record, writer: Some((stop, thread)) })
    }

    /// The loop begins with a step. The work of earlier processes on this step and later ones is lost.
    pub fn begin_loop(&self, first_step: u64) {
        locked(&self.record).append_spent(Event::Loop { first_step });
    }

    /// A step's turn of the loop is over.
    pub fn end_step(&self, step: u64) {
        let mut record = locked(&self.record);
        record.end_step(step);
        record.write_if_due();
    }

    /// The state after a step is about to be saved. A resumed run can continue after this step, so its lines tell the
    /// steps before from those after.
    pub fn save_step(&self, step: u64) {
        let mut record = locked(&self.record);
        record.end_step(step);
        record.write_complete();
    }

    /// How the run's time was spent up to now. `None` after a failure.
    pub fn summary(&self) -> Option<GoodputSummary> {
        locked(&self.record).summary()
    }

    /// The process is done with the run.
    pub fn end(mut self) -> Option<GoodputSummary> {
        self.finish();
        self.summary()
    }

    fn finish(&mut self) {
        let Some((stop, thread)) = self.writer.take() else { return };
        drop(stop);
        // A failure to record is no failure of the run.
        let _ = thread.join();
        let mut record = locked(&self.record);
        record.write_complete();
        record.append_spent(Event::End);
    }
}

impl Drop for Goodput {
    fn drop(&mut self) {
        self.finish();
    }
}

fn locked(record: &Mutex<Record>) -> MutexGuard<'_, Record> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The file, the sums of its lines, and the steps that are still to be written.
struct Record {
    interval: Duration,
    path: PathBuf,
    /// `None` after a failure.
    file: Option<File>,
    ledger: Ledger,
    timeline: Timeline,
    observer: Observer,
    /// When the last line was written.
    written: Duration,
    complete: Option<Complete>,
}

/// The steps since the last line.
struct Complete {
    last: u64,
    ended: Duration,
    spent: Spent,
}

impl Record {
    fn open(
        interval: Duration,
        path: &Path,
        timeline: &Timeline,
        observer: &Observer,
    ) -> Result<Self, TrainError> {
        let ledger = Ledger::read(path)?;
        let open = || {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            OpenOptions::new().create(true).append(true).open(path)
        };
        let mut record = Self {
            interval,
            path: path.to_owned(),
            file: Some(open().map_err(TrainError::io("open", path))?),
            ledger,
            timeline: timeline.clone(),
            observer: observer.clone(),
            written: timeline.now(),
            complete: None,
        };
        record.append(Line::new(Event::Start, timeline.started(), &Spent::default()));
        Ok(record)
    }

    fn end_step(&mut self, step: u64) {
        let (spent, now) = self.timeline.take_spent();
        let complete =
            self.complete.get_or_insert(Complete { last: step, ended: now, spent: Spent::default() });
        complete.spent.add_all(&spent);
        (complete.last, complete.ended) = (step, now);
    }

    /// Writes a line if the last one is [`Record::interval`] old.
    fn write_if_due(&mut self) {
        if self.timeline.now().saturating_sub(self.written) < self.interval {
            return;
        }
        match self.complete {
            Some(_) => self.write_complete(),
            None => self.append_spent(Event::Time),
        }
    }

    /// Writes the steps that are complete.
    fn write_complete(&mut self) {
        if let Some(complete) = self.complete.take() {
            self.append(Line::new(Event::Step { step: complete.last }, complete.ended, &complete.spent));
        }
    }

    /// Writes the time since the last line or step.
    fn append_spent(&mut self, event: Event) {
        let (spent, now) = self.timeline.take_spent();
        self.append(Line::new(event, now, &spent));
    }

    fn append(&mut self, line: Line) {
        self.written = self.timeline.now();
        let Some(file) = &mut self.file else { return };
        self.ledger.add(&line);
        let mut text = serde_json::to_string(&line).expect("a line is JSON");
        text.push('\n');
        // One call for the whole line, so that a kill leaves whole lines.
        if let Err(error) = file.write_all(text.as_bytes()) {
            self.file = None;
            let error = TrainError::io("write", &self.path)(error);
            events::warn(&self.observer, format!("goodput is no longer recorded: {error}"));
        }
    }

    fn summary(&self) -> Option<GoodputSummary> {
        self.file.as_ref()?;
        let (mut spent, _) = self.timeline.spent();
        if let Some(complete) = &self.complete {
            spent.add_all(&complete.spent);
        }
        Some(self.ledger.summary(&spent))
    }
}

#[cfg(test)]
mod tests;
