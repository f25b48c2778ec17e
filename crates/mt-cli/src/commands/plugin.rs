//! `maxtext plugin`: list, install.

use std::path::Path;

use mt_pjrt::{PLUGIN_PATH_VARIABLE, Platform, PluginLocation, PluginOrigin};
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
    let (named, all) = (mt_pjrt::named_plugin()?, mt_pjrt::find_all());
    if as_json {
        let entry = |platform: Option<Platform>, origin: PluginOrigin, path: &Path| {
            json!({
                "platform": platform.map(Platform::name),
                "origin": origin.name(),
                "path": path.display().to_string(),
            })
        };
        let named = named.iter().map(|path| entry(None, PluginOrigin::Named, path));
        let found = all.iter().map(|plugin| entry(Some(plugin.platform), plugin.origin, &plugin.path));
        let entries: Vec<Value> = named.chain(found).collect();
        return print(&format!("{:#}", Value::Array(entries)));
    }
    let of_environment = named.iter().map(|path| {
        format!("`{PLUGIN_PATH_VARIABLE}` names {}, which is used in place of these:", path.display())
    });
    let of_platforms = Platform::ALL.into_iter().flat_map(|platform| of_platform(platform, &all));
    let lines: Vec<String> = of_environment.chain(of_platforms).collect();
    print(&lines.join("\n"))
}

fn of_platform(platform: Platform, all: &[PluginLocation]) -> Vec<String> {
    let found: Vec<String> = all
        .iter()
        .filter(|plugin| plugin.platform == platform)
        .map(|plugin| format!("{platform}  {:<8} {}", plugin.origin.name(), plugin.path.display()))
        .collect();
    let runs =
        |plugin: &PluginLocation| plugin.platform == platform && plugin.origin != PluginOrigin::Compiler;
    if all.iter().any(runs) {
        return found;
    }
    let remedy = match platform {
        Platform::Cpu | Platform::Tpu => "installed at first use",
        Platform::Gpu => "not installed; `maxtext plugin install gpu` does",
    };
    let present = if platform.is_present() { "" } else { "; this machine has none" };
    let missing = format!("{platform}  -        {remedy}{present}");
    std::iter::once(missing).chain(found).collect()
}
