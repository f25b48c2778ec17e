//! `maxtext checkpoint`: inspect, diff, verify, params-only, reshard, average, export, import.

mod average;
mod copy;
mod diff;
mod export;
mod gguf;
mod import;
mod inspect;
mod source;
mod table;
mod target;
mod verify;

pub use table::parse_bytes;

use crate::{arguments::CheckpointCommand, failure::Failure};

/// Runs a subcommand of `maxtext checkpoint`.
pub fn run(command: CheckpointCommand) -> Result<(), Failure> {
    match command {
        CheckpointCommand::Inspect(arguments) => inspect::run(&arguments),
        CheckpointCommand::Diff(arguments) => diff::run(&arguments),
        CheckpointCommand::Verify(arguments) => verify::run(&arguments),
        CheckpointCommand::ParamsOnly(arguments) => copy::params_only(&arguments),
        CheckpointCommand::Reshard(arguments) => copy::reshard(arguments),
        CheckpointCommand::Average(arguments) => average::run(&arguments),
        CheckpointCommand::Export(arguments) => export::run(arguments),
        CheckpointCommand::Import(arguments) => import::run(arguments),
    }
}
