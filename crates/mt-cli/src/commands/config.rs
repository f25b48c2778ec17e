//! `maxtext config`: show, explain, check.

use mt_config::{Config, Hardware, Request, TrainConfig, table};
use serde_json::{Map, Value, json};

use crate::{
    arguments::{ConfigCommand, Settings, Show},
    commands::warn,
    failure::{Failure, print},
};

/// Runs a subcommand of `maxtext config`.
pub fn run(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Show(arguments) => show(arguments),
        ConfigCommand::Explain { key } => print(&mt_config::explain(&key)?),
        ConfigCommand::Check(settings) => check(settings),
    }
}

fn show(arguments: Show) -> Result<(), Failure> {
    let config = Config::resolve(&Request::from_process(arguments.settings.settings))?;
    warn(&config);
    if arguments.json {
        let mut object = config.to_json(arguments.changed);
        if arguments.origins {
            object = object
                .into_iter()
                .map(|(name, value)| {
                    let origin = config.entry(&name).origin.to_string();
                    (name, json!({ "value": value, "origin": origin }))
                })
                .collect::<Map<String, Value>>();
        }
        return print(&format!("{:#}", Value::Object(object)));
    }
    let mut lines = Vec::new();
    for group in table::groups() {
        let entries: Vec<_> = group
            .keys
            .iter()
            .map(|key| config.entry(key.name))
            .filter(|entry| !arguments.changed || entry.is_changed())
            .collect();
        if entries.is_empty() {
            continue;
        }
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(format!("# {}", group.title));
        for entry in entries {
            let line = format!("{}: {}", entry.key.name, entry.shown());
            lines.push(if arguments.origins { format!("{line}  # {}", entry.origin) } else { line });
        }
    }
    if lines.is_empty() {
        lines.push("# every key is at its default".to_owned());
    }
    print(&lines.join("\n"))
}

fn check(settings: Settings) -> Result<(), Failure> {
    let config = Config::resolve(&Request::from_process(settings.settings).with_quick_start())?;
    warn(&config);
    let train = TrainConfig::from_config(&config)?;
    // How many devices other hardware has is only known where it is.
    let is_cpu = train.run.hardware == Hardware::Cpu || config.entry("num_cpu_devices").is_changed();
    if is_cpu {
        train.check_devices(train.run.num_cpu_devices)?;
    }
    let what = if config.is_quick_start() { "the quick start" } else { "the configuration" };
    let changed = config.entries().filter(|entry| entry.is_changed()).count();
    print(&format!("{what} has no mistakes; {changed} keys differ from their defaults"))
}
