//! The thread that writes records, and the handles to it.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::chart::LossChart;
use super::json_lines::{JsonLines, LossHistory};
use super::tensorboard::EventFile;
use super::{EvaluationRecord, MetricsError, StepRecord};
use crate::{Event, Observer};

/// How many records may wait for the writer before the loop does.
const QUEUE_LENGTH: usize = 1024;

/// How often the picture of the loss curves is drawn anew.
const CHART_PERIOD: Duration = Duration::from_secs(15);

/// Where records go.
#[derive(Clone)]
pub struct MetricLoggerOptions {
    /// The run's name, which the loss curve carries.
    pub run_name: String,
    /// The last step of the checkpoint that the run goes on from; what is recorded of later steps is removed.
    pub last_step: Option<u64>,
    /// Is told of each record, in order.
    pub observer: Observer,
    /// How many steps go by between flushes of TensorBoard's events.
    pub log_period: u64,
    /// The file of JSON lines.
    pub metrics_file: Option<PathBuf>,
    /// The directory of TensorBoard's event files.
    pub tensorboard_directory: Option<PathBuf>,
    /// The picture of the loss curves.
    pub chart_file: Option<PathBuf>,
}

/// Takes records and has them written elsewhere than in the training loop.
///
/// Dropping it writes what is left, as [`MetricLogger::finish`] does, but keeps failures to itself.
pub struct MetricLogger {
    queue: SyncSender<Message>,
    writer: Option<JoinHandle<()>>,
}

/// Waits for the writer of a [`MetricLogger`]; for threads that do not own the logger.
#[derive(Clone)]
pub struct MetricBarrier {
    queue: SyncSender<Message>,
}

enum Message {
    Step(StepRecord),
    Evaluation(EvaluationRecord),
    Synchronize(SyncSender<Result<(), MetricsError>>),
    Finish(SyncSender<Result<(), MetricsError>>),
}

impl MetricLogger {
    /// Opens the files, removes from them what the run is going to repeat, and starts the writer.
    ///
    /// # Errors
    /// A file cannot be opened, or holds something else than metrics.
    pub fn start(options: MetricLoggerOptions) -> Result<Self, MetricsError> {
        let (sinks, observer) = (Sinks::open(&options)?, options.observer);
        let (queue, messages) = mpsc::sync_channel(QUEUE_LENGTH);
        let writer = thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || Writer { sinks, observer, failure: None }.run(&messages))
            .map_err(|_| MetricsError::Stopped)?;
        Ok(Self { queue, writer: Some(writer) })
    }

    /// Records a training step.
    ///
    /// # Errors
    /// The writer is gone. Failures of the files come with [`MetricLogger::flush`] and [`MetricLogger::finish`].
    pub fn log_step(&self, record: StepRecord) -> Result<(), MetricsError> {
        self.send(Message::Step(record))
    }

    /// Records an evaluation.
    ///
    /// # Errors
    /// As [`MetricLogger::log_step`].
    pub fn log_evaluation(&self, record: EvaluationRecord) -> Result<(), MetricsError> {
        self.send(Message::Evaluation(record))
    }

    /// Waits until everything recorded so far is durable.
    ///
    /// # Errors
    /// The first failure of any file since the start.
    pub fn flush(&self) -> Result<(), MetricsError> {
        self.barrier().flush()
    }

    /// A handle with which another thread waits for what has been recorded.
    pub fn barrier(&self) -> MetricBarrier {
        MetricBarrier { queue: self.queue.clone() }
    }

    /// Writes what is left and the final loss curve, and ends the writer.
    ///
    /// # Errors
    /// The first failure of any file since the start.
    pub fn finish(mut self) -> Result<(), MetricsError> {
        self.stop()
    }

    fn send(&self, message: Message) -> Result<(), MetricsError> {
        self.queue.send(message).map_err(|_| MetricsError::Stopped)
    }

    fn stop(&mut self) -> Result<(), MetricsError> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        let result = request(&self.queue, Message::Finish);
        writer.join().map_err(|_| MetricsError::Stopped)?;
        result
    }
}

impl Drop for MetricLogger {
    fn drop(&mut self) {
        // Nobody is left to tell; `finish` is there for those who want to know.
        let _ = self.stop();
    }
}

impl MetricBarrier {
    /// Waits until everything recorded before this call is durable.
    ///
    /// # Errors
    /// The first failure of any file since the start.
    pub fn flush(&self) -> Result<(), MetricsError> {
        request(&self.queue, Message::Synchronize)
    }
}

/// Sends a message that is answered, and waits for the answer.
fn request(
    queue: &SyncSender<Message>,
    message: impl FnOnce(SyncSender<Result<(), MetricsError>>) -> Message,
) -> Result<(), MetricsError> {
    let (answer, answered) = mpsc::sync_channel(1);
    queue.send(message(answer)).map_err(|_| MetricsError::Stopped)?;
    answered.recv().map_err(|_| MetricsError::Stopped)?
}

/// The writing thread.
struct Writer {
    sinks: Sinks,
    observer: Observer,
    /// The first failure; nothing is written to files after it, so that a file has no gap.
    failure: Option<MetricsError>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(first) = messages.recv() {
            let mut next = Some(first);
            while let Some(message) = next {
                let last = matches!(message, Message::Finish(_));
                self.handle(message);
                if last {
                    return;
                }
                next = messages.try_recv().ok();
            }
            self.attempt(Sinks::publish);
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Step(record) => {
                self.attempt(|sinks| sinks.step(&record));
                (self.observer)(Event::Step(record));
            }
            Message::Evaluation(record) => {
                self.attempt(|sinks| sinks.evaluation(&record));
                (self.observer)(Event::Evaluation(record));
            }
            Message::Synchronize(answer) => {
                self.attempt(Sinks::synchronize);
                // Whoever asked may have given up waiting.
                let _ = answer.send(self.outcome());
            }
            Message::Finish(answer) => {
                self.attempt(Sinks::synchronize);
                self.attempt(Sinks::draw);
                (self.observer)(Event::Ended);
                let _ = answer.send(self.outcome());
            }
        }
    }

    fn attempt(&mut self, write: impl FnOnce(&mut Sinks) -> Result<(), MetricsError>) {
        if self.failure.is_none() {
            self.failure = write(&mut self.sinks).err();
        }
    }

    fn outcome(&self) -> Result<(), MetricsError> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

/// Everything that is written to.
struct Sinks {
    json_lines: Option<JsonLines>,
    events: Option<EventFile>,
    log_period: u64,
    /// Whether events were written since the last flush that are to be seen now.
    has_due_events: bool,
    chart: Option<LossChart>,
    drawn: Instant,
}

impl Sinks {
    fn open(options: &MetricLoggerOptions) -> Result<Self, MetricsError> {
        let first_step = options.last_step.map_or(0, |step| step + 1);
        let (json_lines, history) = match &options.metrics_file {
            Some(path) => {
                let (file, history) = JsonLines::open(path, options.last_step)?;
                (Some(file), history)
            }
            None => (None, LossHistory::default()),
        };
        let events = match &options.tensorboard_directory {
            Some(directory) => Some(EventFile::create(directory, first_step)?),
            None => None,
        };
        let chart = match &options.chart_file {
            Some(path) => Some(LossChart::new(path, &options.run_name, history)?),
            None => None,
        };
        Ok(Self {
            json_lines,
            events,
            log_period: options.log_period.max(1),
            has_due_events: false,
            chart,
            drawn: Instant::now(),
        })
    }

    fn step(&mut self, record: &StepRecord) -> Result<(), MetricsError> {
        if let Some(chart) = &mut self.chart {
            chart.step(record);
        }
        self.has_due_events |= record.step.is_multiple_of(self.log_period);
        self.write(record.step, &record.metrics)
    }

    fn evaluation(&mut self, record: &EvaluationRecord) -> Result<(), MetricsError> {
        if let Some(chart) = &mut self.chart {
            chart.evaluation(record);
        }
        self.has_due_events = true;
        self.write(record.step, &record.metrics)
    }

    fn write(&mut self, step: u64, metrics: &super::Metrics) -> Result<(), MetricsError> {
        if let Some(json_lines) = &mut self.json_lines {
            json_lines.write(step, metrics)?;
        }
        if let Some(events) = &mut self.events {
            events.write(step, metrics)?;
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), MetricsError> {
        if let Some(json_lines) = &mut self.json_lines {
            json_lines.publish()?;
        }
        if let Some(events) = self.events.as_mut().filter(|_| self.has_due_events) {
            events.publish()?;
            self.has_due_events = false;
        }
        if self.drawn.elapsed() >= CHART_PERIOD {
            self.draw()?;
        }
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), MetricsError> {
        if let Some(json_lines) = &mut self.json_lines {
            json_lines.synchronize()?;
        }
        self.has_due_events = true;
        self.publish()
    }

    fn draw(&mut self) -> Result<(), MetricsError> {
        self.drawn = Instant::now();
        self.chart.as_ref().map_or(Ok(()), LossChart::write)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::record::tests::{evaluation, measured_step};
    use super::*;

    fn options(directory: &Path, last_step: Option<u64>) -> MetricLoggerOptions {
        MetricLoggerOptions {
            run_name: "test".to_owned(),
            last_step,
            observer: std::sync::Arc::new(|_| {}),
            log_period: 1,
            metrics_file: Some(directory.join("metrics/metrics.jsonl")),
            tensorboard_directory: Some(directory.join("tensorboard")),
            chart_file: Some(directory.join("metrics/loss.svg")),
        }
    }

    fn recorded_steps(directory: &Path) -> Vec<u64> {
        let text = fs::read_to_string(directory.join("metrics/metrics.jsonl")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .filter(|line| line.get("learning/loss").is_some())
            .map(|line| line["step"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn flushing_makes_everything_so_far_visible() {
        let directory = tempfile::tempdir().unwrap();
        let logger = MetricLogger::start(options(directory.path(), None)).unwrap();
        for step in 0..5 {
            logger.log_step(measured_step(step, 3.0).record()).unwrap();
        }
        logger.log_evaluation(evaluation(4, 2.9)).unwrap();
        let barrier = logger.barrier();
        thread::spawn(move || barrier.flush()).join().unwrap().unwrap();
        assert_eq!(recorded_steps(directory.path()), [0, 1, 2, 3, 4]);
        logger.finish().unwrap();
        assert!(directory.path().join("metrics/loss.svg").is_file());
        assert_eq!(fs::read_dir(directory.path().join("tensorboard")).unwrap().count(), 1);
    }

    #[test]
    fn events_are_flushed_every_log_period() {
        let directory = tempfile::tempdir().unwrap();
        let mut sinks =
            Sinks::open(&MetricLoggerOptions { log_period: 3, ..options(directory.path(), None) }).unwrap();
        let file =
            fs::read_dir(directory.path().join("tensorboard")).unwrap().next().unwrap().unwrap().path();
        let mut sizes = vec![fs::metadata(&file).unwrap().len()];
        for step in 0..7 {
            sinks.step(&measured_step(step, 3.0).record()).unwrap();
            sinks.publish().unwrap();
            sizes.push(fs::metadata(&file).unwrap().len());
        }
        let grew: Vec<bool> = sizes.windows(2).map(|pair| pair[1] > pair[0]).collect();
        assert_eq!(grew, [true, false, false, true, false, false, true]);
        sinks.step(&measured_step(7, 3.0).record()).unwrap();
        sinks.evaluation(&evaluation(7, 2.9)).unwrap();
        sinks.publish().unwrap();
        assert!(fs::metadata(&file).unwrap().len() > sizes[7], "an evaluation is seen at once");
        assert_eq!(recorded_steps(directory.path()), (0..8).collect::<Vec<_>>(), "lines are not held back");
    }

    #[test]
    fn each_step_is_recorded_once_across_restarts() {
        let directory = tempfile::tempdir().unwrap();
        // The state of step 3 was the last to be saved when the process died after step 5.
        let logger = MetricLogger::start(options(directory.path(), None)).unwrap();
        for step in 0..6 {
            logger.log_step(measured_step(step, 6.0 - step as f64).record()).unwrap();
        }
        drop(logger);
        let logger = MetricLogger::start(options(directory.path(), Some(3))).unwrap();
        for step in 4..10 {
            logger.log_step(measured_step(step, 2.0).record()).unwrap();
        }
        logger.finish().unwrap();
        assert_eq!(recorded_steps(directory.path()), (0..10).collect::<Vec<_>>());
        assert_eq!(fs::read_dir(directory.path().join("tensorboard")).unwrap().count(), 2);
        // The curve shows the steps before the restart too.
        let chart = fs::read_to_string(directory.path().join("metrics/loss.svg")).unwrap();
        let curve = chart.lines().find(|line| line.contains("class=\"training\"")).unwrap();
        assert_eq!(curve.matches(',').count(), 10, "{curve}");
    }

    #[test]
    fn the_first_failure_is_kept_and_told() {
        let directory = tempfile::tempdir().unwrap();
        let full = Path::new("/dev/full");
        if !full.exists() {
            return;
        }
        let options =
            MetricLoggerOptions { metrics_file: Some(full.to_owned()), ..options(directory.path(), None) };
        let logger = MetricLogger::start(options).unwrap();
        logger.log_step(measured_step(0, 3.0).record()).unwrap();
        for _ in 0..2 {
            let error = logger.flush().unwrap_err();
            assert_eq!(error.to_string(), "cannot write `/dev/full`");
            assert!(!error.is_user_error());
        }
        // Records are still taken: the loop decides what to do at its next barrier.
        logger.log_step(measured_step(1, 3.0).record()).unwrap();
        assert!(logger.finish().is_err());
    }

    #[test]
    fn barriers_end_with_the_logger() {
        let directory = tempfile::tempdir().unwrap();
        let logger = MetricLogger::start(options(directory.path(), None)).unwrap();
        let barrier = logger.barrier();
        logger.finish().unwrap();
        assert!(matches!(barrier.flush(), Err(MetricsError::Stopped)));
    }
}
