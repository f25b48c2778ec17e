//! `maxtext checkpoint`: inspect, diff, verify, export, import.

mod diff;
mod export;
mod import;
mod inspect;
mod source;
mod table;
mod verify;

pub use table::parse_bytes;

use crate::{arguments::CheckpointCommand, failure::Failure};

/// Runs a subcommand of `maxtext checkpoint`.
pub fn run(command: CheckpointCommand) -> Result<(), Failure> {
    match command {
        CheckpointCommand::Inspect(arguments) => inspect::run(&arguments),
        CheckpointCommand::Diff(arguments) => diff::run(&arguments),
        CheckpointCommand::Verify(arguments) => verify::run(&arguments),
        CheckpointCommand::Export(arguments) => export::run(arguments),
        CheckpointCommand::Import(arguments) => import::run(arguments),
    }
}
