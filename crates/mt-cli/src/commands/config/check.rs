//! `maxtext config check`.

use clap::CommandFactory;
use mt_config::{Config, Hardware, Named, Request, RunGroup, TrainConfig};

use crate::{
    arguments::{Check, Settings},
    commands::{decode, resolve, warn, warn_of_training, warn_on},
    failure::{Failure, print},
};

/// Commands of MaxText that this program is to have.
const NOT_BUILT: &[&str] = &["compile", "sft", "dpo", "rl", "distill", "serve", "eval", "bench"];

/// Commands whose arguments can be checked.
pub const CHECKED: &[&str] = &["train", "decode"];

pub fn run(arguments: Check) -> Result<(), Failure> {
    let mut settings = Settings { settings: arguments.arguments };
    let first = settings.settings.first().cloned().unwrap_or_default();
    if NOT_BUILT.contains(&first.as_str()) {
        return Err(not_built(&first));
    }
    let is_command = |command: &&str| {
        crate::arguments::Arguments::command().get_subcommands().any(|known| known.get_name() == *command)
    };
    if CHECKED.contains(&first.as_str()) {
        settings.settings.remove(0);
    } else if Some(first.as_str()).filter(is_command).is_some() {
        return Err(Failure::user(format!(
            "what `{first}` would be given cannot be checked without running it\nhint: what can be checked is `train` and `decode`"
        )));
    }
    if first == "decode" { check_decode(settings) } else { check_train(settings) }
}

fn check_train(settings: Settings) -> Result<(), Failure> {
    let config = resolve(&Request::from_process(settings.settings).with_quick_start())?;
    warn(&config);
    let train = TrainConfig::from_config(&config)?;
    warn_of_training(&config);
    mt_models::build(&train.model)?;
    check_output(&train.run)?;
    if let Some(devices) = config.known_devices() {
        warn_on(&config, Hardware::Cpu);
        train.check_devices(train.placement.topology(devices, None)?)?;
    }
    report(if config.is_quick_start() { "the quick start" } else { "the configuration" }, &config)
}

/// Checks that the run's directory can be there: that no file is in its place or in that of a directory above it.
fn check_output(run: &RunGroup) -> Result<(), Failure> {
    let directory = run.directory();
    match directory.ancestors().find(|ancestor| ancestor.exists()) {
        Some(file) if !file.is_dir() => Err(Failure::user(format!(
            "cannot write to `{}`: `{}` is a file\nhint: name a directory with `base_output_directory`",
            directory.display(),
            file.display()
        ))),
        _ => Ok(()),
    }
}

fn check_decode(settings: Settings) -> Result<(), Failure> {
    let prepared = decode::prepare(settings)?;
    prepared.check_prompts()?;
    mt_models::build(&prepared.decode.model)?;
    if let Some(devices) = prepared.config.known_devices() {
        warn_on(&prepared.config, Hardware::Cpu);
        let placement = &prepared.decode.placement;
        placement.mesh(placement.topology(devices, None)?)?;
    }
    report("what `maxtext decode` would do", &prepared.config)
}

fn report(what: &str, config: &Config) -> Result<(), Failure> {
    let changed = config.entries().filter(|entry| entry.is_changed()).count();
    let verb = if changed == 1 { "key differs from its default" } else { "keys differ from their defaults" };
    print(&format!("{what} has no mistakes; {changed} {verb}"))
}

fn not_built(command: &str) -> Failure {
    let preset = match Named::embedded(command) {
        Some(Named::Preset(preset)) => {
            format!("; to check the preset of that name, write `maxtext config check {preset}`")
        }
        _ => String::new(),
    };
    Failure::user(format!(
        "the command `{command}` is not built yet\nhint: what can be checked is `train` and `decode`{preset}"
    ))
}
