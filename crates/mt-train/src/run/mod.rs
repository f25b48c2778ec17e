//! A training run from its configuration to its last checkpoint, in stages.

mod directory;
mod schedule;

use std::{path::PathBuf, sync::Arc};

use mt_config::{RunRecord, TrainConfig};
use mt_data::{DataError, Position, Watch};
use mt_runtime::{Runtime, start_runtime};

use crate::{
    Event, Intended, Observer, TrainError, TrainPlan, Trainer,
    data::{DataRequest, RunData},
    metrics::{MetricLogger, MetricLoggerOptions},
    peak::peak_tflops,
    plan::Devices,
    restore::Resumed,
    signals::StopSignal,
    train_loop::Loop,
};

use directory::RunDirectory;
pub(crate) use schedule::Schedule;

/// Choices of a run's caller beside its configuration.
#[derive(Clone)]
pub struct TrainOptions {
    /// Receives the events of the run.
    pub observer: Observer,
    /// The clone of this repository, whose files the quick start trains on.
    pub repository: PathBuf,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// All steps are done.
    Completed,
    /// They were done before; nothing was.
    AlreadyComplete,
    /// The evaluation loss came down to the target.
    TargetReached { loss: f64, target: f64 },
    /// The data ended first.
    DataEnded,
    /// A signal asked the run to stop.
    Stopped { signal: i32 },
}

/// Loss on held-out text, in nats a token, and bits a byte where the text's size is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationSummary {
    pub loss: f64,
    pub bits_per_byte: Option<f64>,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct TrainReport {
    pub ending: Ending,
    /// Steps done since the run's beginning.
    pub steps: u64,
    pub run_directory: PathBuf,
    pub first_evaluation: Option<EvaluationSummary>,
    pub last_evaluation: Option<EvaluationSummary>,
    /// Bits a byte of a model that only knows how often each token occurs.
    pub unigram_bits_per_byte: Option<f64>,
    /// The picture of the loss curves, if a step was ever recorded.
    pub chart: Option<PathBuf>,
}

/// Trains until the steps are done, the data ends or a signal asks to stop. Resumes a run that has checkpoints. `record`
/// is the configuration that `settings` were read from.
///
/// # Errors
/// The configuration, the data or a checkpoint does not fit; the loss became infinite; the machine failed.
pub fn train(
    settings: TrainConfig,
    record: &RunRecord,
    options: &TrainOptions,
) -> Result<TrainReport, TrainError> {
    // Before the long work of compiling, so that no signal is lost.
    let stop = StopSignal::listen()?;
    let (runtime, plan) = hardware(settings)?;
    // Tracing finds what is wrong with model and placement before the run's directory is made.
    let traced = plan.programs().train_step(plan.rows())?;
    plan.settings.placement.check_use(&plan.placement)?;

    let mut directory = RunDirectory::open(&plan, &runtime, record)?;
    if let Some(report) = directory.finished_before(&plan)? {
        return Ok(report);
    }
    let schedule = Schedule::new(&plan, &runtime)?;
    let data = match (data(&plan, &schedule, &directory, options, &stop), stop.received()) {
        (Err(TrainError::Data(DataError::Stopped)), Some(signal)) => return Ok(directory.stopped(signal)),
        (data, _) => data?,
    };
    (options.observer)(Event::Accepted);

    let observer = &options.observer;
    let evaluation_rows = data.evaluation.is_some().then_some(schedule.evaluation_rows);
    let resume = directory.resume();
    let (trainer, resumed) =
        Trainer::begin(plan.clone(), runtime.clone(), traced, evaluation_rows, resume, observer)?;
    if let Some(signal) = stop.received() {
        return Ok(directory.stopped(signal));
    }
    let position = say_where_it_begins(&plan, &trainer, &directory, resumed, record, observer)?;
    directory.save_config(record)?;
    directory.keep();

    let RunData { train, evaluation, baseline } = data;
    let logger = start_logger(&trainer, &directory, observer)?;
    let peak_tflops = peak_tflops(&runtime, plan.settings.model.dtype, plan.model.precision());
    let (manager, finished) = directory.into_manager();
    let progress =
        Loop { trainer, schedule, evaluation, manager, logger, stop, peak_tflops }.run(train, position)?;
    let is_quick_start = record.is_quick_start() && progress.ending == Ending::Completed;
    let baseline = baseline.filter(|_| is_quick_start);
    let unigram_bits_per_byte = baseline.map(|baseline| baseline.bits_per_byte()).transpose()?.flatten();
    Ok(finished.report(progress, unigram_bits_per_byte))
}

/// Starts the devices, and plans the run on them.
fn hardware(settings: TrainConfig) -> Result<(Runtime, Arc<TrainPlan>), TrainError> {
    let intended = Intended::new(settings)?;
    let runtime = start_runtime(&intended.settings.run, &intended.settings.debug)?;
    let plan = TrainPlan::on(intended, &Devices::of(&runtime))?;
    Ok((runtime, Arc::new(plan)))
}

/// Opens the data, and makes the tokenizer unless the run has one.
fn data(
    plan: &TrainPlan,
    schedule: &Schedule,
    directory: &RunDirectory,
    options: &TrainOptions,
    stop: &StopSignal,
) -> Result<RunData, TrainError> {
    let settings = &plan.settings;
    let report = |progress| (options.observer)(Event::Progress(progress));
    let is_stopped = || stop.received().is_some();
    let request = DataRequest {
        data: &settings.data,
        tokenizer: &settings.tokenizer,
        run_directory: &directory.path,
        repository: &options.repository,
        rows: schedule.batches.full_rows(),
        evaluation_rows: schedule.evaluation_rows,
        evaluation_steps: settings.run.eval_steps,
        evaluates: settings.run.eval_interval.is_some(),
        inherited_tokenizer: settings.inherited_tokenizer(),
        resumes: directory.newest.is_some(),
        observer: &options.observer,
        watch: Watch::new(&report, &is_stopped),
    };
    plan.objective().data(&request)
}

/// Reports from where a resumed run continues and what changed since, and the placements if a key requests them.
/// Returns the data's position.
fn say_where_it_begins(
    plan: &TrainPlan,
    trainer: &Trainer,
    directory: &RunDirectory,
    resumed: Option<Resumed>,
    record: &RunRecord,
    observer: &Observer,
) -> Result<Option<Position>, TrainError> {
    let position = match resumed {
        Some(Resumed { checkpoint, position }) => {
            let changes = directory.changes(record);
            observer(Event::Resumed { step: trainer.steps_done(), checkpoint, changes });
            position
        }
        None => None,
    };
    if plan.settings.debug.debug_sharding {
        observer(Event::Report(plan.placements()));
    }
    Ok(position)
}

/// Starts the thread that records metrics, and announces the loop.
fn start_logger(
    trainer: &Trainer,
    directory: &RunDirectory,
    observer: &Observer,
) -> Result<MetricLogger, TrainError> {
    let run = &trainer.plan.settings.run;
    let first_step = trainer.steps_done();
    let logger = MetricLogger::start(MetricLoggerOptions {
        run_name: run.run_name.clone(),
        last_step: first_step.checked_sub(1),
        observer: observer.clone(),
        log_period: run.log_period,
        metrics_file: Some(run.metrics_path()),
        tensorboard_directory: run.enable_tensorboard.then(|| run.tensorboard_directory()),
        chart_file: Some(directory.chart()),
    })?;
    observer(Event::Started { first_step, total_steps: run.steps });
    Ok(logger)
}
