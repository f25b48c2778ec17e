//! The errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

use mt_data::DataError;

/// Errors of cleaning.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CleanError {
    /// Documents that cannot be read or written.
    #[error(transparent)]
    Data(#[from] DataError),

    /// Options that cannot be followed.
    #[error("{0}")]
    Options(String),

    /// A directory that holds the work of another command.
    #[error(
        "`{directory}` holds the work of a command with another {what}\nhint: repeat the command as it was, or write to \
         another directory with `--output`"
    )]
    OtherWork { directory: PathBuf, what: String },

    /// A file that cannot be read or written.
    #[error("cannot {action} `{path}`: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    /// A file of an interrupted command that cannot be used.
    #[error("`{path}` is damaged: {reason}\nhint: remove it, and repeat the command")]
    Damaged { path: PathBuf, reason: String },
}

/// The result of a function of this crate.
pub type Result<T, E = CleanError> = std::result::Result<T, E>;

impl CleanError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Whether the input is wrong, in contrast to a failure of the machine.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Data(error) => error.is_user_error(),
            Self::Options(_) | Self::OtherWork { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Damaged { .. } => false,
        }
    }
}
