//! Compares the table with MaxText's own defaults and models, as recorded by `golden/make.py`.

use mt_config::{Class, Config, Request, table};
use serde_json::{Map, Value};

fn golden(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap()
}

/// A golden value in a normal form, with all numbers as floats.
fn normal(value: &Value) -> Value {
    match value {
        // Python's YAML parser reads `1e-05` as a string.
        Value::String(text) if text.contains("e-") => text.parse::<f64>().map_or(value.clone(), Value::from),
        Value::Number(number) => number.as_f64().map_or(Value::Null, Value::from),
        Value::Array(values) => values.iter().map(normal).collect(),
        other => other.clone(),
    }
}

/// Keys whose defaults the schema leaves to base.yml.
const LEFT_TO_BASE: &[&str] = &["data_sharding", "jax_cache_dir", "logical_axis_rules"];

#[test]
fn every_key_of_maxtext_has_its_default() {
    let shown = Config::defaults().to_json(false);
    let (mut settable, mut derived, mut wrong) = (0, 0, Vec::new());
    for (name, row) in golden(include_str!("golden/keys.json")) {
        let Some(key) = table::lookup(&name) else {
            wrong.push(format!("`{name}` is missing"));
            continue;
        };
        assert!(shown.contains_key(&name), "`{name}` is not shown");
        if row["group"] == "DerivedValues" && name != "convert_checkpoint_if_possible" {
            derived += 1;
            assert!(matches!(key.class, Class::Derived(_)), "`{name}` can be set");
            continue;
        }
        settable += 1;
        let theirs = if LEFT_TO_BASE.contains(&name.as_str()) { &row["base"] } else { &row["default"] };
        // The table records MaxText's default where ours differs.
        let ours = key.maxtext_default.unwrap_or(key.default).value();
        let is_rules = name == "logical_axis_rules";
        let theirs = if is_rules { rules(theirs) } else { theirs.clone() };
        let ours = if is_rules { of_maxtext(&ours) } else { ours };
        if normal(&ours) != normal(&theirs) {
            wrong.push(format!("`{name}` is {ours}, not {theirs}"));
        }
        // The value in base.yml must be accepted, too.
        let refused = matches!(key.class, Class::Refused(_)) && key.maxtext_default.is_none();
        if let Some(base) = row.get("base").filter(|_| refused) {
            let written = Request {
                arguments: vec![format!("{name}={}", mt_config::value_text(base))],
                ..Request::default()
            };
            let config = Config::resolve(&written).unwrap_or_else(|error| panic!("{error}"));
            if let Some(problem) = config.missing_features().first() {
                wrong.push(format!("base.yml is refused: {problem}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The schema lists `convert_checkpoint_if_possible` among the derived values, but it is settable.
    assert_eq!((settable, derived), (695, 28));
}

fn rules(rules: &Value) -> Value {
    let list = |axes: &Value| if axes.is_string() { Value::from(vec![axes.clone()]) } else { axes.clone() };
    rules.as_array().unwrap().iter().map(|rule| Value::from(vec![rule[0].clone(), list(&rule[1])])).collect()
}

/// Logical axes that MaxText leaves without a name or does not have.
const OWN_AXES: &[&str] = &["experts_of_router", "layers_of_token", "mamba_head", "position"];

/// The rules for names of MaxText, without mesh axes that only its earlier versions had, and without the resulting
/// duplicates.
fn of_maxtext(rules: &Value) -> Value {
    let mut left: Vec<Value> = Vec::new();
    for rule in rules.as_array().unwrap() {
        if OWN_AXES.iter().any(|axis| rule[0] == *axis) {
            continue;
        }
        let is_kept = |axis: &&Value| *axis != "sequence" && *axis != "tensor_transpose";
        let axes: Vec<Value> = rule[1].as_array().unwrap().iter().filter(is_kept).cloned().collect();
        let rule = Value::from(vec![rule[0].clone(), axes.into()]);
        if !left.contains(&rule) {
            left.push(rule);
        }
    }
    left.into()
}

#[test]
fn every_named_model_has_its_values() {
    let models = golden(include_str!("golden/models.json"));
    assert_eq!(models.len(), 78);
    for (model, values) in models {
        let request = Request { arguments: vec![format!("model_name={model}")], ..Request::default() };
        let config = Config::resolve(&request).unwrap_or_else(|error| panic!("{model}: {error}"));
        for (name, theirs) in values.as_object().unwrap() {
            let ours = &config.entry(name).value;
            if name == "logical_axis_rules" {
                for rule in rules(theirs).as_array().unwrap() {
                    assert!(ours.as_array().unwrap().contains(rule), "{model}: {rule}");
                }
                continue;
            }
            assert_eq!(normal(ours), normal(theirs), "{model}: `{name}`");
        }
    }
}
