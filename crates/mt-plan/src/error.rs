//! What can go wrong.

use mt_config::ConfigError;
use mt_train::TrainError;

/// A run cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Train(Box<TrainError>),
}

impl From<TrainError> for PlanError {
    fn from(error: TrainError) -> Self {
        Self::Train(Box::new(error))
    }
}

impl PlanError {
    /// Whether what the user asked for is at fault.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Config(_) => true,
            Self::Train(error) => error.is_user_error(),
        }
    }
}
