//! The checks of `cargo xtask tidy`.

mod allowances;
mod documents;
mod fields;
mod functions;
mod layers;
mod opaque;
mod prose;
mod sources;
mod terminals;
mod words;

use std::fmt;

use crate::generated::GENERATED;
use crate::repository::Repository;

/// Something to fix.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file, relative to the repository.
    pub path: String,
    /// Line, counted from one.
    pub line: usize,
    /// The problem and its remedy.
    pub message: String,
}

impl Finding {
    fn new(path: impl Into<String>, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.into(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// The findings of all checks, by file and line.
pub fn findings(repository: &Repository) -> Vec<Finding> {
    let checks = [
        layers::check(repository),
        sources::check(repository),
        fields::check(repository),
        documents::check(repository),
        documents::check_generated(repository, GENERATED),
        functions::check(repository),
        terminals::check(repository),
        opaque::check(repository),
        words::check(repository),
    ];
    let mut findings: Vec<_> = checks.into_iter().flatten().collect();
    findings.sort();
    findings
}
