//! What the table says, as text: for one key, and as a reference page of all.

use serde_json::Value;

use crate::{
    coerce::value_text,
    error::{ConfigError, Problem, all, is},
    key::{Class, Key, Kind},
    origin::Origin,
    suggest::nearest,
    table::{self, group_of},
};

/// What `maxtext config explain` says about a key.
///
/// # Errors
/// There is no such key.
pub fn explain(name: &str) -> Result<String, ConfigError> {
    let Some(key) = table::canonical(name) else {
        return Err(Problem::UnknownKey {
            name: name.to_owned(),
            origin: Origin::Argument,
            nearest: nearest(name, table::keys().map(|key| key.name)),
        }
        .into());
    };
    let example = example(key);
    let title =
        if key.name == name { key.name.to_owned() } else { format!("{} (formerly {name})", key.name) };
    let mut text = format!("{title}\n\n{}\n", wrapped("  ", key.help));
    let mut row = |label: &str, value: String| {
        text.push('\n');
        text.push_str(&wrapped(&format!("  {label:<11}"), &value));
    };
    row("type", type_text(key));
    row("default", default_text(key));
    if let Some(theirs) = key.maxtext_default {
        row("", format!("MaxText's own default is {}", shown(&theirs.value())));
    }
    row("group", format!("{} ({})", group_of(key).title, group_of(key).name));
    row("acts on", key.acts_on.to_owned());
    row("status", status(key));
    if !key.refused_choices.is_empty() {
        let refused: Vec<&str> = key.refused_choices.iter().map(|(choice, _)| *choice).collect();
        row("not built", refused.join(", "));
    }
    row("on resume", (if key.may_change_on_resume { "may change" } else { "stays as it was" }).to_owned());
    if key.own {
        row("origin", "not a key of MaxText".to_owned());
    }
    row("set it by", format!("{}={example}", key.name));
    row("", format!("{}: {example} (in a YAML file)", key.name));
    row("", format!("{}={example} (in the environment)", key.variable()));
    Ok(text)
}

/// The text behind a label, with lines of at most 90 columns that begin below each other.
fn wrapped(label: &str, text: &str) -> String {
    const COLUMNS: usize = 90;
    let indent = label.chars().count();
    let (mut lines, mut column) = (label.to_owned(), indent);
    for (index, word) in text.split(' ').enumerate() {
        let length = word.chars().count();
        if index > 0 && column + 1 + length > COLUMNS {
            lines.push('\n');
            lines.push_str(&" ".repeat(indent));
            column = indent;
        } else if index > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}

/// The type, of choices those that are built.
fn type_text(key: &Key) -> String {
    match key.kind {
        Kind::Choice(choices) if !key.refused_choices.is_empty() => {
            let built = choices.iter().filter(|choice| key.missing_feature(&Value::from(**choice)).is_none());
            let quoted: Vec<String> = built.map(|choice| shown(&Value::from(*choice))).collect();
            format!("one of {}", quoted.join(", "))
        }
        _ => key.type_text(),
    }
}

/// The reference of all keys, in Markdown.
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Configuration keys\n\n\
         Generated from the key table in `crates/mt-config/src/table`; `maxtext config explain KEY` prints the same.\n\n\
         Set a key with `key=value` on the command line, in a YAML file, or as `M_KEY` in the environment.\n",
    );
    for group in table::groups() {
        page.push_str(&format!(
            "\n## {}\n\n| key | type | default | what it does |\n|---|---|---|---|\n",
            group.title
        ));
        for key in group.keys {
            let mut help = key.help.to_owned();
            match key.class {
                Class::Effective => {}
                Class::NoEffectHere(reason) => help.push_str(&format!(" *No effect here: {reason}.*")),
                Class::Refused(feature) => help.push_str(&format!(" *Not built yet: {feature}.*")),
                Class::Derived(from) => {
                    help.push_str(&format!(" Follows from {}; cannot be set.", all(from)))
                }
            }
            for (choice, feature) in key.refused_choices {
                help.push_str(&format!(" *`{choice}`: {feature} is not built yet.*"));
            }
            if let Some(theirs) = key.maxtext_default {
                help.push_str(&format!(" MaxText's default is {}.", shown(&theirs.value())));
            }
            if key.own {
                help.push_str(" Not a key of MaxText.");
            }
            page.push_str(&format!(
                "| `{}` | {} | {} | {} |\n",
                key.name,
                type_text(key).replace('|', "\\|"),
                default_text(key).replace('|', "\\|"),
                help.replace('|', "\\|")
            ));
        }
    }
    page
}

/// Placement rules fill a page, so only their number is said.
fn default_text(key: &Key) -> String {
    match (key.kind, key.default.value()) {
        (Kind::AxisRules, Value::Array(rules)) => format!("{} rules, those of MaxText", rules.len()),
        (_, value) => shown(&value),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        other => format!("`{}`", value_text(other)),
    }
}

/// A value that shows how the key is written.
fn example(key: &Key) -> String {
    match (key.kind, key.default.value()) {
        (Kind::AxisRules, _) => "[['norm',['fsdp']]]".to_owned(),
        (Kind::TextList, Value::Array(values)) if values.is_empty() => "a,b".to_owned(),
        (Kind::Text, Value::Null) => "…".to_owned(),
        (Kind::Text, Value::String(text)) if text.is_empty() => "…".to_owned(),
        (Kind::Integer { minimum, .. }, Value::Null) => minimum.max(1).to_string(),
        (Kind::Float { .. }, Value::Null) => "1.0".to_owned(),
        (Kind::TextList | Kind::ChoiceList(_), Value::Array(values)) => {
            values.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")
        }
        (Kind::Text, Value::String(text)) if text.contains(' ') => format!("'{text}'"),
        (Kind::Choice(choices), Value::String(text)) if text.is_empty() => {
            choices.iter().find(|choice| !choice.is_empty()).copied().unwrap_or_default().to_owned()
        }
        (_, value) => value_text(&value),
    }
}

fn status(key: &Key) -> String {
    match key.class {
        Class::Effective => "effective".to_owned(),
        Class::NoEffectHere(reason) => format!("accepted without effect: {reason}"),
        Class::Refused(feature) => {
            format!("only what asks for nothing, until {feature} {} built", is(feature))
        }
        Class::Derived(from) => format!("follows from {}; cannot be set", all(from)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_type_default_bounds_and_class() {
        let text = explain("learning_rate").unwrap();
        for part in ["number, at least 0", "`3e-5`", "effective", "M_LEARNING_RATE", "optimizer"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(
            explain("cosine_learning_rate_final_fraction")
                .unwrap()
                .starts_with("learning_rate_final_fraction (formerly")
        );
    }

    #[test]
    fn unknown_keys_are_not_explained() {
        let message = explain("learning_rat").unwrap_err().to_string();
        assert!(message.contains("did you mean `learning_rate`"), "{message}");
    }

    #[test]
    fn the_page_has_every_key_and_whole_rows() {
        let page = reference_page();
        for key in table::keys() {
            assert!(page.contains(&format!("| `{}` |", key.name)));
        }
        for line in page.lines().filter(|line| line.starts_with("| `")) {
            let bars = line.replace("\\|", "").matches('|').count();
            assert_eq!(bars, 5, "{line}");
        }
    }
}
