//! Writes the largest logits of a teacher for the rows of a run's data, from which students learn without the teacher.

use std::{
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use mt_checkpoint::RunLock;
use mt_config::TrainConfig;
use mt_data::{Batch, BatchSource, DataError, LogitsWriter, Position, Watch};
use mt_ir::Program;
use mt_nn::SequenceOrder;
use mt_runtime::{Array, Executable, Input, Runtime};
use mt_shape::HostArray;
use serde_json::json;

use crate::{
    Event, Observer, TrainError, TrainOptions, TrainPlan, batch,
    data::DataRequest,
    events,
    objective::{BatchArray, FrozenModel},
    restore::load_parameters_of,
    run::{Schedule, hardware},
    signals::StopSignal,
    sources::Sources,
};

/// The time between two reports of progress.
const REPORT: Duration = Duration::from_secs(30);

/// Where and how logits are written.
#[derive(Clone, Debug)]
pub struct LogitsOptions {
    pub directory: PathBuf,
    /// Logits of each position.
    pub top_k: usize,
    /// Batches of each file.
    pub batches_per_file: u64,
}

/// The reason why the writing ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsEnding {
    Completed,
    /// The data ended before the last step.
    DataEnded,
    /// A signal stopped the program.
    Stopped {
        signal: i32,
    },
}

/// The result of [`save_logits`].
#[derive(Clone, Copy, Debug)]
pub struct LogitsReport {
    pub ending: LogitsEnding,
    /// Batches in the directory, and those that were there before.
    pub batches: u64,
    pub before: u64,
    /// Rows of each batch.
    pub rows: usize,
}

/// The computation of logits.
struct Teacher<'a> {
    runtime: &'a Runtime,
    program: Executable,
    parameters: Vec<Array>,
    /// The arrays of a batch.
    declared: Vec<BatchArray>,
    order: SequenceOrder,
}

/// A batch whose logits are being computed.
struct Computed {
    batch: Batch,
    /// The logits and their tokens.
    outputs: Vec<Array>,
    /// The position of the data behind the batch.
    after: Position,
}

/// Writes the teacher's logits of as many batches as the run has steps. A directory that an earlier call has begun is
/// continued. The tokenizer of the rows is saved beside the files.
///
/// # Errors
/// The configuration names no teacher that runs; data, weights or the directory do not fit, or the machine fails.
pub fn save_logits(
    settings: TrainConfig,
    options: &LogitsOptions,
    train: &TrainOptions,
) -> Result<LogitsReport, TrainError> {
    check_number(options.top_k, settings.model.vocab_size)?;
    let stop = StopSignal::listen(false)?;
    let observer = &train.observer;
    let (runtime, plan) = hardware(settings, observer)?;
    let Some(frozen) = plan.loss.frozen.first() else { return Err(TrainError::NoTeacher) };
    let sources = Sources::open(&plan, None)?;
    let rows = plan.rows();
    let program = plan.programs().top_logits(frozen, rows, options.top_k)?;
    let _lock = RunLock::acquire(&options.directory)?;
    let mut data = match (data(&plan, options, train, &stop), stop.received()) {
        (Err(TrainError::Data(DataError::Stopped)), Some(signal)) => {
            return Ok(LogitsReport {
                ending: LogitsEnding::Stopped { signal },
                batches: 0,
                before: 0,
                rows,
            });
        }
        (data, _) => data?,
    };
    let identity = json!({
        "teacher": sources.identity(frozen.name),
        "type of the computation": plan.settings.model.dtype.to_string(),
        "number of logits": options.top_k,
        "number of rows in a batch": rows,
        "number of batches in a file": options.batches_per_file,
    });
    let begin = data.position();
    let mut writer = LogitsWriter::open(&options.directory, identity, options.batches_per_file, begin)?;
    let progress = writer.progress().clone();
    let steps = plan.settings.run.steps;
    let report = |ending, batches| LogitsReport { ending, batches, before: progress.batches, rows };
    if progress.batches >= steps {
        return Ok(report(LogitsEnding::Completed, progress.batches));
    }
    data.seek(&progress.position)?;
    (observer)(Event::Accepted);
    if progress.full_batches > 0 {
        let (count, directory) = (progress.full_batches, options.directory.display());
        events::note(
            observer,
            format!("`{directory}` holds the logits of {count} batches, and is continued"),
        );
    }
    let teacher = Teacher::load(&plan, &runtime, frozen, &sources, (program, train))?;
    let ending =
        teacher.write_all(&mut *data, &mut writer, progress.full_batches..steps, (&stop, observer))?;
    let written = writer.finish()?;
    match (ending, written.batches) {
        (LogitsEnding::DataEnded, 0) => Err(TrainError::NoBatch),
        _ => Ok(report(ending, written.batches)),
    }
}

fn check_number(top_k: usize, vocab_size: usize) -> Result<(), TrainError> {
    if (1..=vocab_size).contains(&top_k) {
        return Ok(());
    }
    let message = format!(
        "{top_k} logits of each position are requested, but the vocabulary has {vocab_size} tokens\n\
         hint: use a number from 1 to {vocab_size}"
    );
    Err(DataError::Options(message).into())
}

/// Opens the data of the run. The directory takes the place of a run's.
fn data(
    plan: &TrainPlan,
    options: &LogitsOptions,
    train: &TrainOptions,
    stop: &StopSignal,
) -> Result<Box<dyn BatchSource>, TrainError> {
    let settings = &plan.settings;
    let schedule = Schedule::new(plan)?;
    let report = |progress| (train.observer)(Event::Progress(progress));
    let is_stopped = || stop.received().is_some();
    let request = DataRequest {
        data: &settings.data,
        tokenizer: &settings.tokenizer,
        run_directory: &options.directory,
        repository: &train.repository,
        rows: plan.rows(),
        first_rows: plan.rows(),
        evaluation_rows: schedule.evaluation_rows,
        evaluation_steps: None,
        evaluates: false,
        inherited_tokenizer: settings.inherited_tokenizer(),
        frozen_tokenizer: settings.frozen_tokenizer(),
        token_numbers: plan.model.token_numbers(),
        // A tokenizer and data that an earlier call has saved are used again.
        resumes: true,
        observer: &train.observer,
        watch: Watch::new(&report, &is_stopped),
    };
    Ok(request.open(plan.objective())?.train)
}

impl<'a> Teacher<'a> {
    /// Compiles the program and loads the parameters.
    fn load(
        plan: &Arc<TrainPlan>,
        runtime: &'a Runtime,
        frozen: &FrozenModel,
        sources: &Sources,
        (program, train): (Program, &TrainOptions),
    ) -> Result<Self, TrainError> {
        let program = runtime.compile(&program, &plan.compile_settings())?;
        runtime.check_memory(&[&program], "a smaller `per_device_batch_size` needs less")?;
        let model = frozen.model(&*plan.model);
        let path = sources.of_frozen(frozen.name).ok_or(TrainError::NoTeacher)?;
        let parameters = load_parameters_of(runtime, &plan.placement, model, path, &train.observer)?;
        let (declared, order) = (plan.objective().arrays(plan.rows()), plan.programs().order);
        Ok(Self { runtime, program, parameters, declared, order })
    }

    /// Writes the logits of the batches of `steps`, until the data ends or a signal arrives.
    fn write_all(
        &self,
        data: &mut dyn BatchSource,
        writer: &mut LogitsWriter,
        steps: Range<u64>,
        (stop, observer): (&StopSignal, &Observer),
    ) -> Result<LogitsEnding, TrainError> {
        let (mut ending, mut reported) = (LogitsEnding::Completed, Instant::now());
        let mut waiting: Option<Computed> = None;
        for step in steps.clone() {
            if let Some(signal) = stop.received() {
                ending = LogitsEnding::Stopped { signal };
                break;
            }
            let Some(batch) = data.next_batch()? else {
                ending = LogitsEnding::DataEnded;
                break;
            };
            // The device computes a batch while the host writes the previous one.
            let outputs = self.start(&batch)?;
            let before = waiting.replace(Computed { batch, outputs, after: data.position() });
            before.map(|before| self.write(before, writer)).transpose()?;
            if reported.elapsed() >= REPORT {
                reported = Instant::now();
                events::note(observer, format!("logits of {step} of {} batches", steps.end));
            }
        }
        waiting.map(|last| self.write(last, writer)).transpose()?;
        Ok(ending)
    }

    fn start(&self, batch: &Batch) -> Result<Vec<Array>, TrainError> {
        let arguments = &self.program.inputs()[self.parameters.len()..];
        let arrays = batch::to_devices(self.runtime, &self.declared, arguments, batch, self.order)?;
        let inputs = self.parameters.iter().chain(&arrays).map(Input::Borrow).collect();
        Ok(self.program.run(inputs)?)
    }

    fn write(&self, computed: Computed, writer: &mut LogitsWriter) -> Result<(), TrainError> {
        let Computed { batch, outputs, after } = computed;
        let read = |array: &Array| -> Result<HostArray, TrainError> {
            Ok(batch::as_read(array.to_host()?, 1, self.order))
        };
        Ok(writer.write(&batch, &read(&outputs[0])?, &read(&outputs[1])?, after)?)
    }
}
