//! Notes and warnings about a run that has no errors.

use std::fmt;

/// A message for the user of a run that continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Information worth knowing.
    Note(String),
    /// A probable mistake.
    Warning(String),
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Note(text) => write!(f, "note: {text}"),
            Self::Warning(text) => write!(f, "warning: {text}"),
        }
    }
}
