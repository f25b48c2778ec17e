//! `maxtext config show`.

use mt_config::{Config, Entry, Kind, Request, table};
use serde_json::{Map, Value, json};

use crate::{
    arguments::Show,
    commands::{resolve_training, warn},
    failure::{Failure, print},
};

/// A list that would exceed this line width is written with one element per line.
const COLUMNS: usize = 100;

pub fn run(mut arguments: Show) -> Result<(), Failure> {
    let settings = &mut arguments.settings;
    arguments.origins |= settings.take_flag("--origins");
    arguments.changed |= settings.take_flag("--changed");
    arguments.json |= settings.take_flag("--json");
    // The values are those of `train`: local weights describe their model.
    mt_storage::disconnect();
    let config = resolve_training(&Request::from_process(arguments.settings.settings))?;
    warn(&config);
    if arguments.json {
        print(&object(&config, arguments.changed, arguments.origins))
    } else {
        print(&text(&config, arguments.changed, arguments.origins))
    }
}

fn object(config: &Config, only_changed: bool, with_origins: bool) -> String {
    let mut object = config.to_json(only_changed);
    if with_origins {
        object = object
            .into_iter()
            .map(|(name, value)| {
                let origin = config.entry(&name).origin.to_string();
                (name, json!({ "value": value, "origin": origin }))
            })
            .collect::<Map<String, Value>>();
    }
    format!("{:#}", Value::Object(object))
}

/// The configuration as YAML that resolves to it.
fn text(config: &Config, only_changed: bool, with_origins: bool) -> String {
    let mut lines = Vec::new();
    for group in table::groups() {
        let entries: Vec<&Entry> = group
            .keys
            .iter()
            .map(|key| config.entry(key.name))
            .filter(|entry| !only_changed || entry.is_changed())
            .collect();
        if entries.is_empty() {
            continue;
        }
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(format!("# {}", group.title));
        for entry in entries {
            if entry.key.name == "resolved" && !only_changed {
                // The output contains every key, so reading it must not apply models or presets again.
                lines.push("resolved: true".to_owned());
                continue;
            }
            let origin = if with_origins { format!("  # {}", entry.origin) } else { String::new() };
            let rules = if only_changed { changed_rules(entry) } else { None };
            lines.extend(entry_lines(entry, rules.as_ref().unwrap_or(&entry.value), &origin));
        }
    }
    if lines.is_empty() {
        lines.push("# every key is at its default".to_owned());
    }
    lines.join("\n")
}

/// The rules of those logical axes whose rules differ from the default. None if reading these alone would not restore
/// the rules and their order.
fn changed_rules(entry: &Entry) -> Option<Value> {
    if entry.key.kind != Kind::AxisRules {
        return None;
    }
    let default = entry.key.default.value();
    let (rules, defaults) = (entry.value.as_array()?, default.as_array()?);
    let of = |all: &[Value], name: &Value| -> Vec<Value> {
        all.iter().filter(|rule| rule[0] == *name).cloned().collect()
    };
    let is_changed = |rule: &&Value| of(rules, &rule[0]) != of(defaults, &rule[0]);
    let changed: Vec<Value> = rules.iter().filter(is_changed).cloned().collect();
    let kept = defaults.iter().filter(|rule| of(&changed, &rule[0]).is_empty());
    kept.chain(&changed).eq(rules).then_some(Value::Array(changed))
}

fn entry_lines(entry: &Entry, value: &Value, origin: &str) -> Vec<String> {
    let name = entry.key.name;
    if entry.key.secret && entry.is_changed() {
        return vec![format!("# {name}: {}{origin}", entry.shown())];
    }
    let line = format!("{name}: {}", yaml_value(value));
    match value {
        Value::Array(values) if line.len() > COLUMNS => {
            let elements = values.iter().map(|value| format!("  - {}", yaml_value(value)));
            std::iter::once(format!("{name}:{origin}")).chain(elements).collect()
        }
        _ => vec![format!("{line}{origin}")],
    }
}

/// The value as YAML on one line: unambiguous strings without quotes, other values in JSON or similar.
fn yaml_value(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => quoted(text),
        Value::Number(_) => mt_config::value_text(value),
        Value::Array(values) => {
            let values: Vec<String> = values
                .iter()
                .map(|value| match value {
                    Value::String(text) => quoted(text),
                    Value::Null => "null".to_owned(),
                    other => yaml_value(other),
                })
                .collect();
            format!("[{}]", values.join(", "))
        }
        Value::Bool(_) | Value::Object(_) => mt_config::yaml_text(value),
    }
}

/// Whether YAML reads the unquoted text as the same string.
fn is_plain(text: &str) -> bool {
    const OTHERS: &[&str] = &["true", "false", "yes", "no", "on", "off", "y", "n", "null", "inf", "nan"];
    let begins = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/');
    begins
        && !text.ends_with(' ')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-+./@ ".contains(c))
        && !OTHERS.contains(&text.to_ascii_lowercase().as_str())
}

/// Single quotes, as in MaxText's own files, unless the string needs escapes.
fn quoted(text: &str) -> String {
    if text.chars().all(|c| matches!(c, ' '..='~')) {
        return format!("'{}'", text.replace('\'', "''"));
    }
    mt_config::yaml_text(&Value::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_quoted_where_they_might_be_something_else() {
        for (text, expected) in [
            ("", "''"),
            ("llama2-7b", "llama2-7b"),
            ("I love to", "I love to"),
            ("/data/x.yml", "/data/x.yml"),
            ("12", "'12'"),
            ("on", "'on'"),
            ("a: b", "'a: b'"),
            ("it's", "'it''s'"),
            ("~", "'~'"),
            ("two\nlines", "\"two\\nlines\""),
            ("naïve", "\"naïve\""),
            ("\u{7f}", "\"\\u007f\""),
        ] {
            assert_eq!(yaml_value(&text.into()), expected);
        }
        assert_eq!(yaml_value(&"none".into()), "none");
        assert_eq!(yaml_value(&json!(["a", ["b"], 1])), "['a', ['b'], 1]");
    }
}
