//! `maxtext config`: show, explain, check, diff, models.

mod check;
mod diff;
mod models;
mod show;

pub use check::checked;

use crate::{
    arguments::ConfigCommand,
    failure::{Failure, print},
};

/// Runs a subcommand of `maxtext config`.
pub fn run(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Show(arguments) => show::run(arguments),
        ConfigCommand::Explain { keys } => explain(&keys),
        ConfigCommand::Check(settings) => check::run(settings),
        ConfigCommand::Diff(arguments) => diff::run(arguments),
        ConfigCommand::Models(arguments) => models::run(arguments),
    }
}

fn explain(keys: &[String]) -> Result<(), Failure> {
    let texts = keys.iter().map(|key| mt_config::explain(key)).collect::<Result<Vec<_>, _>>()?;
    print(&texts.join("\n\n"))
}
