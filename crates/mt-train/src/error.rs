//! Errors of training runs.

use std::path::PathBuf;

use mt_checkpoint::CheckpointError;
use mt_config::ConfigError;
use mt_data::DataError;
use mt_models::{ModelError, StateError};
use mt_rl::RlError;
use mt_runtime::RuntimeError;
use mt_shape::SplitsNothing;
use mt_trace::TraceError;

use crate::{masks::MaskError, metrics::MetricsError, query_key_clip::QueryKeyClipError};

/// The reason why a run could not start or continue.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Rl(#[from] RlError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("the program `{program}` could not be traced: {source}")]
    Trace { program: &'static str, source: Box<TraceError> },
    #[error(transparent)]
    Mask(#[from] MaskError),
    #[error(transparent)]
    QueryKeyClip(#[from] QueryKeyClipError),
    #[error(transparent)]
    SplitsNothing(#[from] SplitsNothing),
    #[error("{0}")]
    ResumeConflict(String),
    #[error(
        "the loss of step {step} is {loss}\nhint: {}lower `learning_rate`, lengthen the warm-up, or look at the data of this step",
        if *.is_saved { "the last good checkpoint is kept; " } else { "" }
    )]
    NonFiniteLoss {
        step: u64,
        loss: f64,
        /// Whether a checkpoint of an earlier step exists.
        is_saved: bool,
    },
    #[error(
        "the state in `{path}` has done {done} steps already, and `steps` is `{steps}`\nhint: raise `steps`, or use `load_parameters_path` to start anew from the weights",
        path = path.display()
    )]
    AlreadyPast { path: PathBuf, done: u64, steps: u64 },
    #[error(
        "the data ended before the first step\nhint: use more files, a smaller `per_device_batch_size`, or `num_epoch=-1`"
    )]
    NoBatch,
    #[error(
        "a batch has one row, but the loss `kto` compares each answer with that of another row\nhint: use a larger `per_device_batch_size`, `per_device_batch_size_start` or `eval_per_device_batch_size`, or `dpo.loss_type=apo_zero_unpaired`"
    )]
    SingleJudgedAnswer,
    #[error("the array `{array}` of a batch does not fit the objective: {problem}")]
    WrongBatch { array: &'static str, problem: String },
    #[error("a batch of an evaluation has {given} rows, but the first one has {expected}")]
    EvaluationRows { expected: usize, given: usize },
    #[error(
        "`parameter_memory_host_offload` is `true`, which is not built for objectives with frozen models\nhint: leave out `parameter_memory_host_offload`"
    )]
    FrozenOffloaded,
    #[error(
        "`{parameter}` has a format of weights that is not trained from the beginning\nhint: name a run or a published model to start from: `load_parameters_path=maxtext_output/my_run`"
    )]
    OnlyLoaded { parameter: String },
    #[error(
        "line {line} of `{path}` is not a record of goodput\nhint: remove the file to begin a new record",
        path = path.display()
    )]
    NotGoodput { path: PathBuf, line: usize },
    #[error("the plugin's profile cannot be read: {0}")]
    Profile(prost::DecodeError),
    #[error(
        "the configuration names no teacher that runs, whose logits could be written\nhint: name a run, a checkpoint or a published model: `teacher_overrides.load_parameters_path=…`, without `offline_data_dir`"
    )]
    NoTeacher,
    #[error("`{key}` cannot be applied: {problem}")]
    StudentWeights { key: &'static str, problem: String },
    #[error(
        "answers of the model in training are requested, but the caller has passed nothing that generates them"
    )]
    NoGenerator,
    #[error("a reward model is named, but the caller has passed nothing that loads it")]
    NoRewardModel,
    #[error(
        "the data holds no prompts, because it is not text in columns\nhint: name JSON lines or parquet files with prompts and answers: `hf_path=json hf_train_files=prompts.jsonl`"
    )]
    NoPrompts,
    #[error(
        "the reward `{function}` compares with an expected answer, but the prompt {text:?} has none\nhint: name the column of answers, as in `train_data_columns=[prompt,answer]`, or use other functions: `reward_functions=command`"
    )]
    NoAnswer { function: &'static str, text: String },
    #[error("step {step} continues a batch of answers, but `{path}` holds {found} of its {needed} answers\nhint: restore the file, or resume from an earlier checkpoint", path = path.display())]
    LostRollouts { step: u64, path: PathBuf, found: usize, needed: usize },
    #[error("answers of the model in training cannot be generated: {0}")]
    Generation(crate::GenerationError),
    #[error("the state was lost when a step failed\nhint: start again from the last checkpoint")]
    StateLost,
    #[error("no step is done yet, so there is no state to save")]
    NothingToSave,
    #[error("cannot {action} `{path}`: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
}

impl TrainError {
    /// Whether the data of a new run did not suffice for its first batch.
    pub(crate) fn is_without_batch(&self) -> bool {
        let is_small =
            |error: &DataError| matches!(error, DataError::NoTokens { .. } | DataError::TooSmall { .. });
        matches!(self, Self::NoBatch) || matches!(self, Self::Data(error) if is_small(error))
    }

    /// Whether the user's input caused the error, rather than the machine or the run.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Model(_)
            | Self::Mask(_)
            | Self::QueryKeyClip(_)
            | Self::SplitsNothing(_)
            | Self::ResumeConflict(_)
            | Self::AlreadyPast { .. }
            | Self::WrongBatch { .. }
            | Self::EvaluationRows { .. }
            | Self::FrozenOffloaded
            | Self::OnlyLoaded { .. }
            | Self::NotGoodput { .. }
            | Self::SingleJudgedAnswer
            | Self::NoTeacher
            | Self::StudentWeights { .. }
            | Self::NoGenerator
            | Self::NoRewardModel
            | Self::NoPrompts
            | Self::NoAnswer { .. }
            | Self::LostRollouts { .. }
            | Self::NoBatch => true,
            Self::Data(error) => error.is_user_error(),
            Self::Rl(error) => error.is_user_error(),
            Self::Runtime(error) => error.is_user_error(),
            Self::Checkpoint(error) => error.is_user_error(),
            Self::State(error) => error.is_user_error(),
            Self::Metrics(error) => error.is_user_error(),
            Self::Trace { .. }
            | Self::Profile(_)
            | Self::NonFiniteLoss { .. }
            | Self::Generation(_)
            | Self::StateLost
            | Self::NothingToSave => false,
            Self::Io { source, .. } => match source.get_ref() {
                Some(inner) if inner.is::<mt_storage::StorageError>() => mt_storage::is_user_error(source),
                _ => source.kind() == std::io::ErrorKind::PermissionDenied,
            },
        }
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
