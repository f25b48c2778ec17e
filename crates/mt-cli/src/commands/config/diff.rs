//! `maxtext config diff`.

use mt_config::{Config, Kind, Named};
use serde_json::{Map, Value, json};

use crate::{
    arguments::Diff,
    failure::{Failure, print},
};

pub fn run(arguments: Diff) -> Result<(), Failure> {
    let left = Named::find(&arguments.left)?.resolve()?;
    let right = Named::find(&arguments.right)?.resolve()?;
    if arguments.json {
        return print(&format!("{:#}", Value::Object(object(&left, &right))));
    }
    let mut lines = Vec::new();
    for difference in left.differences(&right) {
        let name = difference.key.name;
        if difference.key.kind == Kind::AxisRules {
            lines.extend(rules(name, &left.entry(name).value, &right.entry(name).value));
        } else {
            lines.push(format!("{name}: {} → {}", difference.left, difference.right));
        }
    }
    if lines.is_empty() {
        lines.push("# no key differs".to_owned());
    }
    print(&lines.join("\n"))
}

fn object(left: &Config, right: &Config) -> Map<String, Value> {
    let value = |config: &Config, name: &str| config.entry(name).value.clone();
    left.differences(right)
        .iter()
        .map(|difference| difference.key.name)
        .map(|name| (name.to_owned(), json!({ "a": value(left, name), "b": value(right, name) })))
        .collect()
}

/// The differences between the rules of each logical axis. An axis may have several rules, of which the first that fits
/// applies.
fn rules(key: &str, left: &Value, right: &Value) -> Vec<String> {
    let (left, right) = (pairs(left), pairs(right));
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in left.iter().chain(&right) {
        if !names.contains(name) {
            names.push(name);
        }
    }
    let of = |rules: &[(&str, String)], name: &str| -> String {
        let axes: Vec<&str> =
            rules.iter().filter(|(other, _)| *other == name).map(|(_, axes)| axes.as_str()).collect();
        if axes.is_empty() { "no rule".to_owned() } else { axes.join(", else ") }
    };
    let lines: Vec<String> = names
        .into_iter()
        .map(|name| (name, of(&left, name), of(&right, name)))
        .filter(|(_, left, right)| left != right)
        .map(|(name, left, right)| format!("  {name}: {left} → {right}"))
        .collect();
    if lines.is_empty() {
        return vec![format!("{key}: the same rules in another order")];
    }
    std::iter::once(format!("{key}:")).chain(lines).collect()
}

fn pairs(rules: &Value) -> Vec<(&str, String)> {
    let rules = rules.as_array().into_iter().flatten();
    rules.filter_map(|rule| Some((rule[0].as_str()?, mt_config::value_text(&rule[1])))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_compared_one_by_one() {
        let left = json!([["embed", ["fsdp"]], ["embed", ["tensor"]], ["mlp", ["tensor"]], ["norm", []]]);
        let right = json!([["mlp", ["tensor"]], ["embed", ["fsdp"]], ["norm", []], ["vocab", ["data"]]]);
        assert_eq!(
            rules("rules", &left, &right),
            ["rules:", "  embed: ['fsdp'], else ['tensor'] → ['fsdp']", "  vocab: no rule → ['data']"]
        );
        let turned = json!([["norm", []], ["embed", ["fsdp"]], ["embed", ["tensor"]], ["mlp", ["tensor"]]]);
        assert_eq!(rules("rules", &left, &turned), ["rules: the same rules in another order"]);
    }
}
