//! `maxtext plugin`: list, install.

use mt_pjrt::{Platform, PluginLocation};
use serde_json::{Value, json};

use crate::{
    arguments::PluginCommand,
    failure::{Failure, print},
};

/// Runs a subcommand of `maxtext plugin`.
pub fn run(command: PluginCommand) -> Result<(), Failure> {
    match command {
        PluginCommand::List { json } => list(json),
        PluginCommand::Install { platform } => {
            let installed = mt_pjrt::install(platform.parse()?)?;
            print(&format!("the plugin for {} is {}", installed.platform, installed.path.display()))
        }
    }
}

fn list(as_json: bool) -> Result<(), Failure> {
    let all = mt_pjrt::find_all()?;
    if as_json {
        let entries: Vec<Value> = all
            .iter()
            .map(|plugin| {
                json!({
                    "platform": plugin.platform.name(),
                    "origin": plugin.origin.name(),
                    "path": plugin.path.display().to_string(),
                })
            })
            .collect();
        return print(&format!("{:#}", Value::Array(entries)));
    }
    let lines: Vec<String> =
        Platform::ALL.into_iter().flat_map(|platform| of_platform(platform, &all)).collect();
    print(&lines.join("\n"))
}

fn of_platform(platform: Platform, all: &[PluginLocation]) -> Vec<String> {
    let found: Vec<String> = all
        .iter()
        .filter(|plugin| plugin.platform == platform)
        .map(|plugin| format!("{platform}  {:<7} {}", plugin.origin.name(), plugin.path.display()))
        .collect();
    if !found.is_empty() {
        return found;
    }
    let remedy = match platform {
        Platform::Cpu | Platform::Tpu => "installed at first use",
        Platform::Gpu => "not installed; `maxtext plugin install gpu` does",
    };
    let present = if platform.is_present() { "" } else { "; this machine has none" };
    vec![format!("{platform}  -       {remedy}{present}")]
}
