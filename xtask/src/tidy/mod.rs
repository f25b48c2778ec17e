//! The checks of `cargo xtask tidy`.

mod documents;
mod fields;
mod layers;
mod sources;

use std::fmt;

use crate::generated::GENERATED;
use crate::repository::Repository;

/// Something to fix.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// In which file.
    pub path: String,
    /// On which line, counted from one.
    pub line: usize,
    /// What is wrong, and what to do about it.
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

/// Everything that any check finds, by file and line.
pub fn findings(repository: &Repository) -> Vec<Finding> {
    let checks = [
        layers::check(repository),
        sources::check(repository),
        fields::check(repository),
        documents::check(repository),
        documents::check_generated(repository, GENERATED),
    ];
    let mut findings: Vec<_> = checks.into_iter().flatten().collect();
    findings.sort();
    findings
}
