//! The errors of this crate.

use std::{io, path::PathBuf};

use mt_data::DataError;

/// Errors of rollouts, advantages and rewards.
#[derive(Debug, thiserror::Error)]
pub enum RlError {
    /// A file that cannot be opened, read or written.
    #[error("cannot {action} `{path}`: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    /// A line that is no rollout.
    #[error("`{path}`, line {line}: {reason}", path = path.display())]
    Record { path: PathBuf, line: u64, reason: String },

    /// A file without rollouts, or with too few.
    #[error("{0}")]
    TooFew(String),

    /// Rollouts that lack what the algorithm needs.
    #[error("{place}: {reason}")]
    Unusable { place: String, reason: String },

    /// The devices that run a reward model.
    #[error("the reward model cannot be run: {0}")]
    Model(Box<dyn std::error::Error + Send + Sync>),

    #[error(transparent)]
    Data(#[from] DataError),
}

impl RlError {
    /// Whether the user's input is the cause, rather than the machine.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::IsADirectory
            ),
            Self::Record { .. } | Self::TooFew(_) | Self::Unusable { .. } => true,
            Self::Model(_) => false,
            Self::Data(error) => error.is_user_error(),
        }
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

/// For interfaces of `mt-data`, such as sources of batches.
impl From<RlError> for DataError {
    fn from(error: RlError) -> Self {
        match error {
            RlError::Data(error) => error,
            RlError::Io { action, path, source } => Self::Io { action, path, source },
            RlError::Record { path, line, reason } => Self::Json { path, line, reason },
            RlError::Unusable { place, reason } => Self::Example { place, reason },
            RlError::TooFew(message) => Self::Options(message),
            RlError::Model(_) => Self::Options(error.to_string()),
        }
    }
}
