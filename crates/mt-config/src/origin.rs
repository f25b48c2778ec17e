//! The origin of a value.

use std::{fmt, path::PathBuf, sync::Arc};

/// Where the value of a key was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: the value is the table's default.
    Default,
    /// An embedded YAML file, by its name.
    Preset { name: String, line: u64 },
    /// A YAML file of the user.
    File { path: Arc<PathBuf>, line: u64 },
    /// The YAML file of a named model.
    Model { name: String, line: u64 },
    /// The file that describes a published model, such as a `config.json`.
    Description { path: Arc<PathBuf> },
    /// An environment variable.
    Environment { variable: String },
    /// The command line.
    Argument,
    /// Computed by the program, such as the name of an unnamed run.
    Derived,
}

impl Origin {
    /// Whether the user set the value, rather than the program or one of its embedded files.
    pub fn is_given(&self) -> bool {
        matches!(self, Self::File { .. } | Self::Environment { .. } | Self::Argument)
    }

    /// Whether the value was set for this command, rather than in a file that may merely repeat a default.
    pub(crate) fn is_by_hand(&self) -> bool {
        matches!(self, Self::Environment { .. } | Self::Argument)
    }

    /// Whether the value comes from a variable of other programs, and so requests nothing of this one.
    pub(crate) fn is_of_other_programs(&self) -> bool {
        matches!(self, Self::Environment { variable } if !variable.starts_with("M_"))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Preset { name, line } => write!(f, "preset `{name}`, line {line}"),
            Self::File { path, line } => write!(f, "`{}`, line {line}", path.display()),
            Self::Model { name, line } => write!(f, "model `{name}`, line {line}"),
            Self::Description { path } => write!(f, "`{}`", path.display()),
            Self::Environment { variable } => write!(f, "environment variable `{variable}`"),
            Self::Argument => f.write_str("command line"),
            Self::Derived => f.write_str("derived"),
        }
    }
}
