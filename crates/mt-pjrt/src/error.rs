//! Errors of this crate.

use std::{fmt, path::PathBuf};

use crate::Platform;

/// A failure of a plugin, or of finding, installing or loading one.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Pjrt(#[from] PjrtError),
    #[error("`{0}` is not a platform\nhint: one of `cpu`, `gpu`, `tpu`")]
    UnknownPlatform(String),
    #[error("there is no PJRT plugin for `{platform}`\nhint: {hint}")]
    PluginNotFound { platform: Platform, hint: String },
    #[error("PJRT plugin `{path}` does not exist\nhint: it was named by {origin}")]
    PluginPath { path: PathBuf, origin: &'static str },
    #[error(
        "cannot load PJRT plugin `{path}`: {source}\nhint: a plugin is a shared library; `pjrt_plugin_path` or \
         `MAXTEXT_PJRT_PLUGIN_PATH` may name one, and `maxtext plugin list` shows what is found without them"
    )]
    Load { path: PathBuf, source: libloading::Error },
    #[error(
        "PJRT plugin `{path}` has API version {major}.{minor}, but {required_major}.{required_minor} or later is \
         needed\nhint: upgrade the Python package that it belongs to, or name another plugin in \
         `MAXTEXT_PJRT_PLUGIN_PATH`"
    )]
    ApiVersion { path: PathBuf, major: i32, minor: i32, required_major: i32, required_minor: i32 },
    #[error(
        "the plugin for `{platform}` has no build for {os} on {architecture}\nhint: {platform} runs on Linux on \
         x86-64 or AArch64; on macOS and Windows use a Linux container or virtual machine"
    )]
    UnsupportedHost { platform: Platform, os: String, architecture: String },
    #[error(
        "installing the plugin for `{platform}` needs `python3` with pip, and there is no `{python}`\nhint: install \
         Python 3 with pip, or name a plugin in `MAXTEXT_PJRT_PLUGIN_PATH`"
    )]
    PythonMissing { platform: Platform, python: String },
    #[error(
        "installing the plugin for `{platform}` needs pip, and `{python}` has no module `pip`\nhint: install it, for \
         example with `apt install python3-pip` or `{python} -m ensurepip`"
    )]
    PipMissing { platform: Platform, python: String },
    #[error(
        "cannot download `{file}`: the network cannot be reached\nhint: connect this machine, or copy `{cache}` from \
         a machine that has the plugin"
    )]
    Network { file: String, cache: PathBuf },
    #[error("the disk of `{path}` is full\nhint: free some space, or set `XDG_CACHE_HOME` to a larger disk")]
    DiskFull { path: PathBuf },
    #[error("pip cannot download `{file}`: {detail}")]
    Pip { file: String, detail: String },
    #[error(
        "`{file}` has SHA-256 `{actual}` where `{expected}` is expected\nhint: nothing was installed; try again, and \
         if it recurs, look at what pip's index settings point to"
    )]
    Checksum { file: String, expected: String, actual: String },
    #[error("wheel `{file}` cannot be unpacked: {detail}")]
    Wheel { file: String, detail: String },
    #[error(
        "neither `XDG_CACHE_HOME` nor `HOME` is set\nhint: set one of them, or name a plugin in \
         `MAXTEXT_PJRT_PLUGIN_PATH`"
    )]
    NoCacheDirectory,
    #[error(
        "cannot write to the cache of plugins and compiled programs, `{path}` ({variable}): {source}\nhint: set `XDG_CACHE_HOME` to a directory that can be written to"
    )]
    CacheUnwritable {
        path: PathBuf,
        /// The environment variable that determines the path.
        variable: &'static str,
        source: std::io::Error,
    },
    #[error("`{path}`: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A mistake of the caller: sizes, devices or clients that do not match.
    #[error("{0}")]
    Argument(String),
}

impl Error {
    /// Whether the user's input or machine setup is at fault rather than the run.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::UnknownPlatform(_)
            | Self::PluginNotFound { .. }
            | Self::PluginPath { .. }
            | Self::Load { .. }
            | Self::ApiVersion { .. }
            | Self::UnsupportedHost { .. }
            | Self::PythonMissing { .. }
            | Self::PipMissing { .. }
            | Self::NoCacheDirectory
            | Self::CacheUnwritable { .. } => true,
            Self::Pjrt(_)
            | Self::Network { .. }
            | Self::DiskFull { .. }
            | Self::Pip { .. }
            | Self::Checksum { .. }
            | Self::Wheel { .. }
            | Self::Io { .. }
            | Self::Argument(_) => false,
        }
    }

    /// Adds the program's name to a PJRT error that has none.
    pub(crate) fn in_program(mut self, name: &str) -> Self {
        if let Self::Pjrt(error) = &mut self {
            error.program.get_or_insert_with(|| name.to_owned());
        }
        self
    }

    /// An I/O failure on `path`; a full disk has a separate variant.
    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        let path = path.into();
        match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io { path, source },
        }
    }
}

/// An error that a plugin returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct PjrtError {
    pub code: ErrorCode,
    pub message: String,
    /// The program being compiled or run.
    pub program: Option<String>,
    /// The call that failed, such as `ClientCompile`.
    pub call: &'static str,
}

impl fmt::Display for PjrtError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.program {
            Some(program) => write!(f, "program `{program}`: ")?,
            None => write!(f, "{}: ", self.call)?,
        }
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// The kind of a [`PjrtError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCode {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl ErrorCode {
    pub(crate) fn from_raw(code: i32) -> Self {
        match code {
            1 => Self::Cancelled,
            3 => Self::InvalidArgument,
            4 => Self::DeadlineExceeded,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            10 => Self::Aborted,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            13 => Self::Internal,
            14 => Self::Unavailable,
            15 => Self::DataLoss,
            16 => Self::Unauthenticated,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cancelled => "cancelled",
            Self::Unknown => "unknown error",
            Self::InvalidArgument => "invalid argument",
            Self::DeadlineExceeded => "deadline exceeded",
            Self::NotFound => "not found",
            Self::AlreadyExists => "already exists",
            Self::PermissionDenied => "permission denied",
            Self::ResourceExhausted => "resource exhausted",
            Self::FailedPrecondition => "failed precondition",
            Self::Aborted => "aborted",
            Self::OutOfRange => "out of range",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal error",
            Self::Unavailable => "unavailable",
            Self::DataLoss => "data loss",
            Self::Unauthenticated => "unauthenticated",
        })
    }
}
