//! Errors of this crate.

use std::{io::ErrorKind, path::PathBuf};

use mt_ir::TensorType;
use mt_kernels::Feature;
use mt_pjrt::Platform;
use mt_shape::PartitionSpec;

use crate::OutOfMemory;

/// A failure to set up the hardware, or to compile or run a program.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Pjrt(#[from] mt_pjrt::Error),
    #[error("the compiler rejects the option `{option}`: {source}\nhint: see `compile_xla_flags`")]
    CompilerOption { option: String, source: mt_pjrt::Error },
    #[error(
        "the plugin for `hardware={platform}` does not start: {source}\nhint: this machine shows no {platform}; \
         `hardware=cpu` uses the CPU"
    )]
    NoHardware { platform: Platform, source: mt_pjrt::Error },
    #[error(
        "cannot write programs to `{path}`: {source}\nhint: `dump_hlo_local_dir` names a directory that can be written"
    )]
    Dump { path: PathBuf, source: std::io::Error },
    #[error("{0} has no device\nhint: `hardware=cpu` uses the CPU")]
    NoDevice(Platform),
    #[error(
        "program `{program}` runs on {needed} devices, but there are {available}\nhint: on a CPU set \
         `num_cpu_devices={needed}`, elsewhere change the mesh"
    )]
    TooFewDevices { program: String, needed: usize, available: usize },
    #[error(
        "`batch_invariant` is set, but programs of {0} are not batch-invariant: only CPU kernels keep the order of sums\n\
         hint: set `hardware=cpu`, or leave out `batch_invariant`"
    )]
    PlatformNotInvariant(Platform),
    #[error(
        "`batch_invariant` is set, but program `{program}` runs on {devices} devices, among which the compiler divides \
         sums\nhint: use one device (`num_cpu_devices=1`), or leave out `batch_invariant`"
    )]
    DevicesNotInvariant { program: String, devices: usize },
    #[error("`{name}` of type `{ty}` cannot be split as `{spec}`: {reason}")]
    Sharding { name: String, ty: TensorType, spec: PartitionSpec, reason: String },
    #[error("program `{program}` takes {needed} arguments, but {given} are given")]
    ArgumentCount { program: String, needed: usize, given: usize },
    #[error("argument `{argument}` of program `{program}` is `{given}`, but `{needed}` is needed")]
    ArgumentType { program: String, argument: String, given: TensorType, needed: TensorType },
    #[error("argument `{argument}` of program `{program}` has sharding {given}, but {needed} is needed")]
    ArgumentSharding { program: String, argument: String, given: String, needed: String },
    #[error("argument `{argument}` of program `{program}` is donated, so it cannot be borrowed")]
    ArgumentBorrowed { program: String, argument: String },
    #[error(
        "result `{result}` of program `{program}` is `{given}` on each device, but `{needed}` was declared"
    )]
    ResultType { program: String, result: String, given: TensorType, needed: TensorType },
    #[error("program `{program}` returned {given} results, but declares {needed}")]
    ResultCount { program: String, needed: usize, given: usize },
    #[error("the compiler's optimized program, in the format `{format}`, cannot be read: {reason}")]
    OptimizedProgram { format: String, reason: String },
    #[error(
        "`MAXTEXT_CPU_FEATURES` names `{word}`, which is no feature that kernels use\nhint: features are {}, with \
         commas between them, or `none`",
        quoted(Feature::ALL.into_iter().map(Feature::name))
    )]
    CpuFeature { word: String },
    #[error("`MAXTEXT_CPU_KERNELS` names `{word}`, which is {problem}\nhint: {hint}")]
    CpuKernel { word: String, problem: String, hint: String },
    #[error("{0}")]
    Memory(String),
    #[error("program `{program}` does not fit into the memory of a device: {}", .lack.message)]
    OutOfMemory { program: String, lack: OutOfMemory },
    #[error(
        "`{path}` is not the compiled program of this run:\n  {}\nhint: compile it again for this run, name another file, or leave out `compiled_trainstep_file`",
        .reasons.join("\n  ")
    )]
    CompiledFile { path: PathBuf, reasons: Vec<String> },
    #[error("`{path}`: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Host(#[from] mt_shape::HostArrayError),
}

/// Names for a message.
pub(crate) fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl RuntimeError {
    /// Whether the user's input or machine setup is at fault rather than the run.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Pjrt(error) => error.is_user_error(),
            Self::CompilerOption { .. }
            | Self::NoHardware { .. }
            | Self::Dump { .. }
            | Self::NoDevice(_)
            | Self::TooFewDevices { .. }
            | Self::PlatformNotInvariant(_)
            | Self::DevicesNotInvariant { .. }
            | Self::CompiledFile { .. }
            | Self::CpuFeature { .. }
            | Self::CpuKernel { .. }
            | Self::Memory(_) => true,
            // A directory that the user named and that is not writable.
            Self::Io { source, .. } => matches!(
                source.kind(),
                ErrorKind::PermissionDenied | ErrorKind::NotADirectory | ErrorKind::ReadOnlyFilesystem
            ),
            _ => false,
        }
    }

    /// An I/O failure on `path`.
    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}
