//! Errors of planning.

use mt_config::ConfigError;
use mt_engine::EngineError;
use mt_runtime::RuntimeError;
use mt_train::TrainError;

use crate::compile::CyclesError;

/// A run cannot be planned, or its programs cannot be traced or compiled.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(
        "`compiled_trainstep_file` is for the training step, but `--program decode` compiles the programs of generation\n\
         hint: leave it out, or compile the training step, without `--program decode`"
    )]
    NoTrainingStep,
    #[error(
        "`--cycles` reads the instruction schedule that the compiler of TPUs dumps, but the program is for {hardware}\n\
         hint: leave it out, or name a TPU: `compile_topology=v5e-4`"
    )]
    NoSchedule { hardware: String },
    #[error(transparent)]
    Cycles(#[from] CyclesError),
    #[error(transparent)]
    Train(Box<TrainError>),
    #[error(transparent)]
    Engine(Box<EngineError>),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

impl From<TrainError> for PlanError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl From<EngineError> for PlanError {
    fn from(error: EngineError) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl PlanError {
    /// Whether the user's input is wrong, rather than the machine or the compiler.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Config(_) | Self::NoTrainingStep | Self::NoSchedule { .. } => true,
            Self::Cycles(_) => false,
            Self::Train(error) => error.is_user_error(),
            Self::Engine(error) => error.is_user_error(),
            Self::Runtime(error) => error.is_user_error(),
        }
    }
}
