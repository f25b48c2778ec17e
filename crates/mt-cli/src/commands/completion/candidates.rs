//! Completion candidates for a word of the command line.

use std::{fs, path::Path};

use clap::{Command, CommandFactory};
use mt_config::{Class, Key, Kind, model_names, preset_names, table};
use serde_json::Value;

use crate::{arguments::Arguments, commands::config::checked};

/// One completion. A text that ends in `=` or `/` can be continued.
pub struct Candidate {
    pub text: String,
    pub help: Option<String>,
}

impl Candidate {
    fn plain(text: impl Into<String>) -> Self {
        Self { text: text.into(), help: None }
    }
}

/// The completions of `current` after `words`, which follow the program's name.
pub fn candidates(words: &[String], current: &str) -> Vec<Candidate> {
    let mut command = Arguments::command();
    command.build();
    let mut path: Vec<String> = Vec::new();
    let mut rest = words;
    while let Some((first, others)) = rest.split_first() {
        let Some(next) = command.find_subcommand(first).cloned() else { break };
        path.push(next.get_name().to_owned());
        (command, rest) = (next, others);
    }
    let mut found = if current.starts_with('-') {
        options(&command)
    } else if command.has_subcommands() && !rest.is_empty() {
        // An unknown subcommand has no completions.
        Vec::new()
    } else if command.has_subcommands() {
        let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
        commands
            .map(|command| Candidate {
                text: command.get_name().to_owned(),
                help: command.get_about().map(ToString::to_string),
            })
            .collect()
    } else {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        arguments(&command, &path, rest, current)
    };
    found.retain(|candidate| candidate.text.starts_with(current));
    found
}

fn options(command: &Command) -> Vec<Candidate> {
    command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set())
        .filter_map(|argument| {
            let text = format!("--{}", argument.get_long()?);
            Some(Candidate { text, help: argument.get_help().map(ToString::to_string) })
        })
        .collect()
}

/// The completions of a command's positional arguments.
fn arguments(command: &Command, path: &[&str], given: &[String], current: &str) -> Vec<Candidate> {
    match path {
        [
            "train" | "sft" | "dpo" | "reward" | "rl" | "distill" | "decode" | "chat" | "serve" | "estimate"
            | "compile" | "logits",
        ]
        | ["bench", "inference"]
        | ["data", "show" | "stats" | "save-logits"]
        | ["config", "show"]
        | ["checkpoint", "export" | "import"]
        | ["tokenizer", "train"] => settings(given, current),
        ["config", "check"] => {
            let mut found = settings(given, current);
            if given.is_empty() {
                found.extend(checked().into_iter().map(Candidate::plain));
            }
            found
        }
        ["config", "explain"] => keys(given, current, true),
        ["config", "diff"] => {
            let names = model_names().chain(preset_names()).map(Candidate::plain);
            names.chain(paths(current, is_yaml)).collect()
        }
        ["checkpoint", "inspect" | "diff" | "verify"] | ["data", "inspect" | "convert"] => {
            paths(current, |_| true)
        }
        ["config", "models"] => model_names().map(Candidate::plain).collect(),
        _ => {
            let values = command.get_positionals().flat_map(|argument| argument.get_possible_values());
            values.map(|value| Candidate::plain(value.get_name())).collect()
        }
    }
}

/// Files, presets and keys, or the values of the key before the equals sign.
fn settings(given: &[String], current: &str) -> Vec<Candidate> {
    if let Some((name, value)) = current.split_once('=') {
        let Some(key) = table::canonical(name) else { return Vec::new() };
        let values = values(key, value).into_iter();
        return values.map(|value| Candidate::plain(format!("{name}={value}"))).collect();
    }
    let mut found = keys(given, current, false);
    // A command line has at most one file.
    if given.iter().all(|word| word.contains('=')) {
        found.extend(preset_names().map(Candidate::plain));
        found.extend(paths(current, is_yaml));
    }
    found
}

/// The keys that are not given yet. For assignments, keys with an effect are preferred; other keys are offered only if
/// no effective key matches.
fn keys(given: &[String], current: &str, to_explain: bool) -> Vec<Candidate> {
    let is_given = |name: &str| given.iter().any(|word| word.split('=').next() == Some(name));
    let of = |wanted: &dyn Fn(&Key) -> bool| -> Vec<Candidate> {
        table::groups()
            .flat_map(|group| group.keys.iter().map(move |key| (group, key)))
            .filter(|(_, key)| wanted(key))
            .flat_map(|(group, key)| {
                let nested = group.prefix.filter(|_| current.contains('.'));
                let name = nested.map_or(key.name.to_owned(), |prefix| format!("{prefix}.{}", key.name));
                (name.starts_with(current) && !is_given(&name)).then(|| Candidate {
                    text: if to_explain { name } else { format!("{name}=") },
                    help: Some(key.help.to_owned()),
                })
            })
            .collect()
    };
    if to_explain {
        return of(&|_| true);
    }
    let effective = of(&|key| key.class == Class::Effective);
    if effective.is_empty() { of(&|key| !matches!(key.class, Class::Derived(_))) } else { effective }
}

/// The values of a key that can be listed. In a list, the last element is completed.
fn values(key: &Key, written: &str) -> Vec<String> {
    let words = |words: &[&str]| -> Vec<String> {
        let built = |word: &&&str| !word.is_empty() && key.missing_feature(&Value::from(**word)).is_none();
        words.iter().filter(built).map(|word| (*word).to_owned()).collect()
    };
    let mut values = match key.kind {
        Kind::Bool => vec!["true".to_owned(), "false".to_owned()],
        Kind::Choice(choices) => words(choices),
        Kind::ChoiceList(choices) => {
            let before = &written[..written.rfind(',').map_or(0, |comma| comma + 1)];
            words(choices).into_iter().map(|word| format!("{before}{word}")).collect()
        }
        _ if key.name == "model_name" => model_names().map(str::to_owned).collect(),
        _ if key.name == "base_config" => {
            let files = paths(written, is_yaml).into_iter().map(|candidate| candidate.text);
            preset_names().map(str::to_owned).chain(files).collect()
        }
        _ if is_path(key.name) => paths(written, |_| true).into_iter().map(|path| path.text).collect(),
        _ => Vec::new(),
    };
    if key.nullable && !values.is_empty() {
        values.push("none".to_owned());
    }
    values
}

/// Whether a key names a file or a directory, judging by the suffix of its name.
fn is_path(name: &str) -> bool {
    ["_path", "_file", "_files", "_dir", "_directory"].iter().any(|ending| name.ends_with(ending))
}

fn is_yaml(name: &str) -> bool {
    name.ends_with(".yml") || name.ends_with(".yaml")
}

/// The directories and matching files that complete a path.
fn paths(current: &str, is_wanted: fn(&str) -> bool) -> Vec<Candidate> {
    let (directory, start) = current.split_at(current.rfind('/').map_or(0, |slash| slash + 1));
    let read = fs::read_dir(if directory.is_empty() { Path::new(".") } else { Path::new(directory) });
    let mut found: Vec<Candidate> = read
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            // Names that need quoting are left to the shell. Hidden names are offered only after a leading dot.
            let is_plain = name.chars().all(|c| c.is_alphanumeric() || "_-+.,@%".contains(c));
            let is_hidden = name.starts_with('.') && !start.starts_with('.');
            if !is_plain || is_hidden || !name.starts_with(start) {
                return None;
            }
            // Links to directories count as directories.
            let is_directory = entry.path().is_dir();
            let ending = if is_directory { "/" } else { "" };
            (is_directory || is_wanted(&name)).then(|| Candidate::plain(format!("{directory}{name}{ending}")))
        })
        .collect();
    found.sort_by(|a, b| a.text.cmp(&b.text));
    found
}
