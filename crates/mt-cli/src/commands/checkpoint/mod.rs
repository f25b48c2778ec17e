//! `maxtext checkpoint`: inspect, diff.

mod diff;
mod inspect;
mod table;

use crate::{arguments::CheckpointCommand, failure::Failure};

/// Runs a subcommand of `maxtext checkpoint`.
pub fn run(command: CheckpointCommand) -> Result<(), Failure> {
    match command {
        CheckpointCommand::Inspect(arguments) => inspect::run(&arguments),
        CheckpointCommand::Diff(arguments) => diff::run(&arguments),
    }
}
