//! Messages about a run in which nothing is wrong.

use std::fmt;

/// A message for the user of a run that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Worth knowing.
    Note(String),
    /// Probably not what the user meant.
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
