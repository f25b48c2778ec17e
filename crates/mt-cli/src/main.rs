//! The `maxtext` command: argument parsing, and one function per subcommand.
//!
//! Phase: all. Only this crate parses arguments, prints, and sets exit statuses: 0 for success, 1 for failures at run
//! time, 2 for wrong input. The subcommands' work is done by `mt-train`, `mt-engine`, `mt-plan`, `mt-data` and
//! `mt-config`.

#![forbid(unsafe_code)]

#[macro_use]
mod say;

mod arguments;
mod commands;
mod console;
mod failure;
mod generator;
mod numpy;
mod progress;
mod reward_model;
mod transfers;

use std::process::ExitCode;

use mt_config::PresetCommand;

use crate::{
    arguments::{Arguments, Command},
    failure::Failure,
};

fn main() -> ExitCode {
    // Plugins read environment variables when they are loaded, and only a process with a single thread may set these
    // safely.
    mt_pjrt::prepare_environment();
    let arguments = Arguments::of_process();
    transfers::show();
    match failure::without_panics(|| run(arguments)) {
        Ok(code) => code,
        Err(failure) => {
            failure.report();
            failure.exit_code()
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    match arguments.command {
        Command::Train(settings) => return commands::train::run(settings),
        Command::Sft(settings) => return commands::sft::run(settings),
        Command::Dpo(settings) => {
            return commands::train::run_as(PresetCommand::named("dpo"), settings, None);
        }
        Command::Distill(settings) => {
            return commands::train::run_as(PresetCommand::named("distill"), settings, None);
        }
        Command::Rl(settings) => {
            return commands::rl::run(settings);
        }
        Command::Reward(arguments) => return commands::reward::run(arguments),
        Command::Data(command) => return commands::data::run(command),
        Command::Compile(command) => return commands::compile::run(command),
        Command::Decode(settings) => commands::decode::run(settings)?,
        Command::Chat(settings) => commands::chat::run(settings)?,
        Command::Serve(command) => commands::serve::run(command)?,
        Command::Bench(command) => commands::bench::run(command)?,
        Command::Estimate(command) => commands::estimate::run(command)?,
        Command::Logits(command) => commands::logits::run(command)?,
        Command::Config(command) => commands::config::run(command)?,
        Command::Checkpoint(command) => commands::checkpoint::run(command)?,
        Command::Tokenizer(command) => commands::tokenizer::run(command)?,
        Command::Plugin(command) => commands::plugin::run(command)?,
        Command::Completion { shell } => commands::completion::script(shell)?,
        Command::Complete(command) => commands::completion::complete(command)?,
    }
    Ok(ExitCode::SUCCESS)
}
