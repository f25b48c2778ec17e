use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The reason why metrics could not be written.
///
/// The error can be cloned: the writing thread keeps its first failure and returns it to every caller.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetricsError {
    /// A file operation failed.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or directory of the operation.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: Arc<io::Error>,
    },
    /// The file to continue holds other contents, which are not overwritten.
    #[error(
        "line {line} of `{}` is not a metrics record\nhint: give another file with `metrics_file=`, or remove it",
        path.display()
    )]
    NotMetrics {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
    },
    /// A panic ended the writing thread, most likely the observer's.
    #[error("the thread that records metrics and reports events panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The writing thread has ended: the logger is finished, or the thread could not be started.
    #[error("the metrics writer is not running")]
    Stopped,
}

impl MetricsError {
    /// Whether the user's paths caused the error, rather than the machine.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::NotMetrics { .. } => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::AlreadyExists
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::IsADirectory
                    | io::ErrorKind::ReadOnlyFilesystem
            ),
            Self::Panicked { .. } | Self::Stopped => false,
        }
    }

    /// A closure for `map_err` at the operation that may fail.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source: Arc::new(source) }
    }
}
