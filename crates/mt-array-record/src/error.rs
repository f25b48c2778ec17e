//! Errors of this crate.

use std::{io, path::PathBuf};

/// Result of this crate's functions.
pub type Result<T, E = ArrayRecordError> = std::result::Result<T, E>;

/// An ArrayRecord file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayRecordError {
    #[error("cannot {action} `{path}`: {source}\nhint: check the path, its permissions and the disk's free space", path = path.display())]
    Io {
        /// `open`, `read` or `write`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[error(
        "`{path}` is not an ArrayRecord file: {reason}\nhint: give a file that `array_record` wrote",
        path = path.display()
    )]
    NotArrayRecord { path: PathBuf, reason: String },

    #[error(
        "`{path}` is damaged at byte {offset}: {reason}\nhint: copy the file from its source again, or write it again",
        path = path.display()
    )]
    Damaged {
        path: PathBuf,
        /// Beginning of the damaged chunk or block, in bytes.
        offset: u64,
        reason: String,
    },

    #[error(
        "`{path}` cannot be read at byte {offset}: {feature} not supported\nhint: {remedy}",
        path = path.display()
    )]
    Unsupported {
        path: PathBuf,
        /// Beginning of the chunk, in bytes.
        offset: u64,
        /// Subject and verb, such as "transposed chunks are".
        feature: String,
        remedy: &'static str,
    },

    #[error(
        "`{path}` has no record {index}: it holds {records} records\nhint: request an index below {records}",
        path = path.display()
    )]
    NoSuchRecord { path: PathBuf, index: u64, records: u64 },

    #[error("`{path}` cannot be written with {option} {value}\nhint: choose {permitted}", path = path.display())]
    BadOption { path: PathBuf, option: &'static str, value: i64, permitted: &'static str },
}

impl ArrayRecordError {
    /// Whether the given path, file, index or options cause the error, rather than a failing disk.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Io { action, .. } => *action == "open",
            _ => true,
        }
    }

    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// The reason why bytes could not be decoded, before the file and offset are known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Damaged(String),
    Unsupported { feature: String, remedy: &'static str },
}

impl Fault {
    pub(crate) fn damaged(reason: impl Into<String>) -> Self {
        Self::Damaged(reason.into())
    }

    pub(crate) fn at(self, path: &std::path::Path, offset: u64) -> ArrayRecordError {
        let path = path.to_owned();
        match self {
            Self::Damaged(reason) => ArrayRecordError::Damaged { path, offset, reason },
            Self::Unsupported { feature, remedy } => {
                ArrayRecordError::Unsupported { path, offset, feature, remedy }
            }
        }
    }
}
