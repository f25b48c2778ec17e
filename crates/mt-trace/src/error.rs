//! Errors of traced code.

use std::panic::Location;

use mt_autodiff::AutodiffError;
use mt_ir::{ShapeError, VerifyError};

/// The misuse of an operation while tracing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{operation}`{}{shapes}: {kind} ({location})", in_scope(scope))]
pub struct TraceError {
    /// The operation.
    pub operation: String,
    /// The scope path, such as `decoder/layers/mlp`.
    pub scope: String,
    /// The operands' types and axes, for the message.
    pub shapes: String,
    /// The line of model code.
    pub location: &'static Location<'static>,
    /// The kind of misuse.
    pub kind: Box<TraceErrorKind>,
}

fn in_scope(scope: &str) -> String {
    if scope.is_empty() { String::new() } else { format!(" in `{scope}`") }
}

/// The kinds of misuse.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TraceErrorKind {
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Autodiff(#[from] AutodiffError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error("a tensor was used after its region ended")]
    Escaped,
    #[error("tensors of two traces were mixed")]
    ForeignTrace,
    #[error(
        "the body of a custom derivative or of per-device code captures a tensor from outside; pass it as an argument"
    )]
    ForbiddenCapture,
}
