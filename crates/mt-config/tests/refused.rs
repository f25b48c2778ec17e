//! The rule for keys of features that are not built: refused or noted, never ignored.

use mt_config::{Class, Config, DecodeConfig, Key, Kind, Request, TrainConfig, table, value_text};
use serde_json::{Value, json};

fn resolved(arguments: &[String]) -> Config {
    let request = Request { arguments: arguments.to_vec(), ..Request::default() };
    Config::resolve(&request).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

/// A value of a key's kind that requests a feature, or at least differs from the default.
fn request_of(key: &Key) -> Option<String> {
    let candidates: Vec<Value> = match key.kind {
        Kind::Bool => vec![true.into(), false.into()],
        Kind::Integer { .. } | Kind::IntegerOrIntegers => (2..9).map(Value::from).collect(),
        Kind::Float { .. } => [0.5, 0.25, 2.0, 3.0].map(Value::from).to_vec(),
        Kind::Choice(choices) => choices.iter().map(|choice| Value::from(*choice)).collect(),
        Kind::ChoiceList(choices) => choices.iter().map(|choice| json!([choice])).collect(),
        Kind::Text | Kind::TextOrTexts => vec!["something".into()],
        Kind::TextList => vec![json!(["something"])],
        Kind::TextLists => vec![json!([["something"]])],
        Kind::AxisRules => vec![json!([["something", ["data"]]])],
        Kind::Integers => vec![json!([2, 3])],
        Kind::Floats => vec![json!([0.25])],
        Kind::Mapping => vec![json!({ "something": 1 })],
    };
    let is_taken = |value: &&Value| {
        let arguments = vec![format!("{}={}", key.name, value_text(value))];
        Config::resolve(&Request { arguments, ..Request::default() })
            .is_ok_and(|config| config.entry(key.name).is_changed())
    };
    let request = candidates.iter().filter(|value| key.asks(value)).find(is_taken);
    request.or_else(|| candidates.iter().find(is_taken)).map(value_text)
}

/// The outcome of a request: the text of its refusal or note.
fn outcome(config: &Config, name: &str) -> Option<String> {
    let quoted = format!("`{name}`");
    let refused =
        config.missing_features().iter().map(ToString::to_string).find(|text| text.contains(&quoted));
    refused.or_else(|| config.notes().into_iter().find(|note| note.starts_with(&quoted)))
}

#[test]
fn each_refused_key_alone_is_refused_or_noted() {
    let (mut num_refused, mut num_noted, mut silent) = (0, 0, Vec::new());
    for key in table::keys().filter(|key| matches!(key.class, Class::Refused(_))) {
        let Some(value) = request_of(key) else {
            silent.push(format!("{} with any value", key.name));
            continue;
        };
        let setting = format!("{}={value}", key.name);
        let config = resolved(&["dataset_type=synthetic".to_owned(), setting.clone()]);
        match outcome(&config, key.name) {
            Some(text) if text.contains("not built yet") => {
                num_refused += 1;
                // Every command that reads groups refuses the value.
                assert!(TrainConfig::from_config(&config).is_err(), "{setting}");
                assert!(DecodeConfig::from_config(&config).is_err(), "{setting}");
            }
            Some(text) if text.contains("has no effect without") => num_noted += 1,
            Some(text) => panic!("{setting}: {text}"),
            None => silent.push(setting),
        }
    }
    assert!(silent.is_empty(), "neither refused nor noted: {}", silent.join(" "));
    assert!(num_refused > 40 && num_noted > 100, "{num_refused} refused, {num_noted} noted");
}
