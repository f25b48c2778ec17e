use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why metrics could not be written.
///
/// It can be cloned: the writing thread keeps its first failure and repeats it to everyone who asks.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetricsError {
    /// A file operation failed.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system answered.
        #[source]
        source: Arc<io::Error>,
    },
    /// The file to continue holds something else, which is not overwritten.
    #[error(
        "line {line} of `{}` is not a metrics record\nhint: give another file with `metrics_file=`, or remove it",
        path.display()
    )]
    NotMetrics {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
    },
    /// The writing thread has ended: the logger is finished, or the thread could not be started.
    #[error("the metrics writer is not running")]
    Stopped,
}

impl MetricsError {
    /// Whether the user's paths are at fault, rather than the machine.
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
            Self::Stopped => false,
        }
    }

    /// For `map_err` at the operation that may fail.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source: Arc::new(source) }
    }
}
