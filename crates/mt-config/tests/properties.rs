//! Properties of the layers: values that are set through any layer read back, saved configurations are complete, and
//! secrets stay secret.

use std::path::Path;

use mt_config::{Class, Config, ConfigError, DecodeConfig, Key, Kind, Origin, Request, TrainConfig, table};
use proptest::{prelude::*, sample::Index};
use serde_json::{Map, Value, json};

/// Keys that control the layers and thereby other keys, and `steps`, which may follow from another key.
const ABOUT_LAYERS: &[&str] = &[
    "base_config",
    "convert_checkpoint_if_possible",
    "custom_mesh_and_rule",
    "model_name",
    "resolved",
    "steps",
    "student_overrides",
];

/// Models with rules, nested values and their own dimensions.
const MODELS: &[&str] = &["llama2-7b", "gemma3-4b", "deepseek3-671b", "llama3.1-8b"];

fn of_no_layer() -> impl Iterator<Item = &'static Key> {
    table::keys().filter(|key| !matches!(key.class, Class::Derived(_)) && !ABOUT_LAYERS.contains(&key.name))
}

/// Keys whose values are stored as given; rules are merged with existing ones.
fn settable() -> Vec<&'static Key> {
    of_no_layer().filter(|key| key.kind != Kind::AxisRules).collect()
}

/// Strings that YAML, a shell or this program could misread.
const ODD: &[&str] = &[
    "",
    " ",
    "null",
    "None",
    "~",
    "true",
    "no",
    "on",
    "007",
    "0x10",
    "1_000",
    "1e3",
    ".nan",
    "-",
    "- a",
    "# no",
    "a # b",
    "a: b",
    "a:",
    "{a: 1}",
    "[a, b]",
    "[",
    "'",
    "\"",
    "''",
    "\\",
    "\\n",
    "a\nb",
    "\n",
    "\t",
    "a\tb",
    "&a",
    "*b",
    "!!str",
    "%",
    "@",
    "`",
    "|",
    ">",
    "?",
    "= =",
    "a=b",
    " a",
    "a ",
    "é",
    "日本",
    "\u{feff}a",
    "\u{85}",
    "\u{7f}",
    "\u{2028}",
    "\u{1f600}",
    "\u{1}",
    "2024-01-01",
    "<<",
    "---",
    "...",
];

fn text() -> BoxedStrategy<String> {
    prop_oneof![
        2 => prop::sample::select(ODD).prop_map(str::to_owned),
        2 => "[a-z0-9/_.-]{1,12}",
        1 => any::<String>().prop_map(|text| text.chars().take(24).collect()),
    ]
    .boxed()
}

/// Whole numbers within the bounds, often at them.
fn whole(minimum: i64, maximum: i64) -> BoxedStrategy<i64> {
    let (low, high) = (minimum.max(-1_000_000), maximum.min(1_000_000));
    prop_oneof![Just(minimum), Just(maximum), low..=high].boxed()
}

fn number(minimum: f64, maximum: f64) -> BoxedStrategy<f64> {
    let (low, high) = (minimum.max(-1e6), maximum.min(1e6));
    prop_oneof![Just(low), Just(high), (0.0..=1.0_f64).prop_map(move |share| low + share * (high - low))]
        .boxed()
}

fn is_none(text: &str) -> bool {
    ["none", "null", "~"].contains(&text.trim().to_ascii_lowercase().as_str())
}

/// Values of a kind.
fn value(kind: Kind) -> BoxedStrategy<Value> {
    let words = |words: &'static [&'static str]| prop::sample::select(words);
    let some = |one: BoxedStrategy<Value>| prop::collection::vec(one, 0..4).prop_map(Value::Array).boxed();
    let texts = some(text().prop_map(Value::from).boxed());
    match kind {
        Kind::Bool => any::<bool>().prop_map(Value::from).boxed(),
        Kind::Integer { minimum, maximum } => whole(minimum, maximum).prop_map(Value::from).boxed(),
        Kind::Float { minimum, maximum } => number(minimum, maximum).prop_map(Value::from).boxed(),
        Kind::Text => text().prop_map(Value::from).boxed(),
        Kind::Choice(choices) => words(choices).prop_map(Value::from).boxed(),
        Kind::ChoiceList(choices) => some(words(choices).prop_map(Value::from).boxed()),
        Kind::TextList => texts,
        Kind::TextLists => some(texts),
        Kind::TextOrTexts => prop_oneof!["[a-z]{1,8}".prop_map(Value::from), texts].boxed(),
        Kind::Integers => some(whole(i64::MIN, i64::MAX).prop_map(Value::from).boxed()),
        Kind::IntegerOrIntegers => {
            let one = whole(i64::MIN, i64::MAX).prop_map(Value::from).boxed();
            prop_oneof![one.clone(), some(one)].boxed()
        }
        Kind::Floats => some(number(-1e6, 1e6).prop_map(Value::from).boxed()),
        Kind::Mapping => prop::collection::vec(("[a-z_]{1,8}", text()), 0..3)
            .prop_map(|entries| {
                entries.into_iter().map(|(name, text)| (name, Value::from(text))).collect::<Map<_, _>>()
            })
            .prop_map(Value::Object)
            .boxed(),
        Kind::AxisRules => {
            let rule = ("[a-z_]{1,8}", prop::collection::vec("[a-z]{1,6}", 0..3));
            some(rule.prop_map(|(name, axes)| json!([name, axes])).boxed())
        }
    }
}

/// A key, a value of it, and the value that reads back.
fn setting_of(keys: Vec<&'static Key>) -> impl Strategy<Value = (&'static Key, Value, Value)> {
    prop::sample::select(keys).prop_flat_map(|key| {
        value(key.kind).prop_map(move |written| {
            let read = match written.as_str() {
                Some(text) if key.nullable && is_none(text) => Value::Null,
                _ => written.clone(),
            };
            (key, written, read)
        })
    })
}

fn setting() -> impl Strategy<Value = (&'static Key, Value, Value)> {
    setting_of(settable())
}

/// A value as a shell argument. Within lists, control characters are escaped, since they are unprintable in YAML.
fn as_text(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    let escaped = |character: char| match character.is_control() {
        true => format!("\\u{:04x}", u32::from(character)),
        false => character.to_string(),
    };
    value.to_string().chars().map(escaped).collect()
}

/// A value as YAML: JSON with all non-ASCII characters escaped, since some are unprintable in YAML.
fn as_yaml(value: &Value) -> String {
    let mut text = String::new();
    for character in value.to_string().chars() {
        if (' '..='~').contains(&character) {
            text.push(character);
        } else {
            let mut units = [0; 2];
            text.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    text
}

fn write(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn request(arguments: Vec<String>, environment: Vec<(String, String)>) -> Request {
    Request { arguments, environment, ..Request::default() }
}

/// The layer that sets a key.
#[derive(Clone, Copy, Debug)]
enum Layer {
    Base,
    File,
    Nested,
    Environment,
    Argument,
}

/// A request that sets keys, each in its layer, and writes the files that it needs.
fn layered(directory: &Path, settings: &[(Layer, String, Value)]) -> Request {
    let (mut base, mut file, mut nested) = (String::new(), String::new(), String::new());
    let (mut environment, mut arguments) = (Vec::new(), Vec::new());
    for (layer, name, value) in settings {
        match layer {
            Layer::Base => base += &format!("{name}: {}\n", as_yaml(value)),
            Layer::File => file += &format!("{name}: {}\n", as_yaml(value)),
            Layer::Nested => {
                let (prefix, rest) = name.split_once('.').unwrap();
                nested += &format!("{prefix}:\n  {rest}: {}\n", as_yaml(value));
            }
            Layer::Environment => environment.push((format!("M_{}", name.to_uppercase()), as_text(value))),
            Layer::Argument => arguments.push(format!("{name}={}", as_text(value))),
        }
    }
    write(directory, "base.yml", &base);
    arguments.push(write(directory, "run.yml", &format!("base_config: base.yml\n{file}{nested}")));
    request(arguments, environment)
}

fn resolved(settings: &[(Layer, String, Value)]) -> Result<Config, ConfigError> {
    Config::resolve(&layered(tempfile::tempdir().unwrap().path(), settings))
}

/// All text that a configuration and its errors can show.
fn shown(config: &Config) -> String {
    let other = Config::resolve(&request(vec!["hf_access_token=another".to_owned()], Vec::new())).unwrap();
    let errors: Vec<ConfigError> =
        [TrainConfig::from_config(config).err(), DecodeConfig::from_config(config).err()]
            .into_iter()
            .flatten()
            .collect();
    format!(
        "{config:?} {:?} {:?} {} {} {:?} {:?} {:?} {errors:?} {}",
        config.to_json(false),
        config.to_json(true),
        config.to_yaml(),
        config.entries().map(mt_config::Entry::shown).collect::<String>(),
        config.notes(),
        config.differences(&other),
        config.resume_conflicts(1, &other, 1),
        mt_config::explain("hf_access_token").unwrap(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn what_is_set_through_any_layer_reads_back((key, written, read) in setting(), layer in 0..5_usize) {
        // If no key names data, our default replaces MaxText's.
        prop_assume!(key.name != "dataset_type" || read != "tfds");
        let layer = [Layer::Base, Layer::File, Layer::Nested, Layer::Environment, Layer::Argument][layer];
        let prefix = table::group_of(key).prefix;
        let (layer, name) = match (layer, prefix) {
            (Layer::Nested | Layer::Argument, Some(prefix)) => (layer, format!("{prefix}.{}", key.name)),
            (Layer::Nested, None) => (Layer::File, key.name.to_owned()),
            _ => (layer, key.name.to_owned()),
        };
        let config = resolved(&[(layer, name, written)]).unwrap();
        let entry = config.entry(key.name);
        prop_assert_eq!(&entry.value, &read, "`{}`", key.name);
        let origin = entry.origin.to_string();
        let expected = match layer {
            Layer::Base => "base.yml`, line 1".to_owned(),
            Layer::File => "run.yml`, line 2".to_owned(),
            Layer::Nested => "run.yml`, line 3".to_owned(),
            Layer::Environment => format!("environment variable `{}`", key.variable()),
            Layer::Argument => "command line".to_owned(),
        };
        prop_assert!(origin.ends_with(&expected), "{origin}, not {expected}");
    }

    #[test]
    fn saved_configurations_are_whole(
        settings in prop::collection::vec(setting_of(of_no_layer().collect()), 0..60),
        model in prop::option::of(prop::sample::select(MODELS)),
        mesh in prop::option::of(prop::sample::select(&["pure-fsdp", "ep-as-cp"][..])),
    ) {
        let mut seen = std::collections::HashSet::new();
        let mut settings: Vec<(Layer, String, Value)> = settings
            .into_iter()
            .filter(|(key, _, _)| seen.insert(key.name))
            .map(|(key, written, _)| (Layer::File, key.name.to_owned(), written))
            .collect();
        settings.extend(model.map(|name| (Layer::Argument, "model_name".to_owned(), name.into())));
        settings.extend(mesh.map(|name| (Layer::Argument, "custom_mesh_and_rule".to_owned(), name.into())));
        let config = resolved(&settings).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let saved = write(directory.path(), "config.yml", &config.to_yaml());
        let read = Config::resolve(&request(vec![saved], Vec::new())).unwrap();
        prop_assert_eq!(config.differences(&read), []);
        for (left, right) in config.entries().zip(read.entries()).filter(|(left, _)| !left.key.secret) {
            prop_assert_eq!(&left.value, &right.value, "`{}`", left.key.name);
        }
        prop_assert_eq!(config.to_yaml(), read.to_yaml());
    }

    #[test]
    fn later_layers_win(index in any::<Index>(), values in prop::collection::vec(any::<Index>(), 4)) {
        let keys: Vec<&Key> =
            settable().into_iter().filter(|key| matches!(key.kind, Kind::Integer { .. })).collect();
        let key = *index.get(&keys);
        let Kind::Integer { minimum, maximum } = key.kind else { unreachable!() };
        let (low, high) = (minimum.max(-1000), maximum.min(1000));
        let range = usize::try_from(high - low + 1).unwrap();
        let value = |layer: usize| Value::from(low + i64::try_from(values[layer].index(range)).unwrap());
        let set = |layer: Layer, number: usize| (layer, key.name.to_owned(), value(number));
        for (layers, expected, origin) in [
            (vec![set(Layer::Base, 0), set(Layer::File, 1)], 1, "line 2"),
            (vec![set(Layer::Base, 0), set(Layer::File, 1), set(Layer::Environment, 2)], 2, "environment"),
            (vec![set(Layer::Base, 0), set(Layer::File, 1), set(Layer::Argument, 3)], 3, "command line"),
            (vec![set(Layer::Argument, 0), set(Layer::Argument, 1)], 1, "command line"),
        ] {
            let config = resolved(&layers).unwrap();
            let entry = config.entry(key.name);
            prop_assert_eq!(&entry.value, &value(expected));
            prop_assert!(entry.origin.to_string().contains(origin), "{}", entry.origin);
        }
        let twice = resolved(&[set(Layer::Environment, 2), set(Layer::Argument, 3)]).unwrap_err().to_string();
        prop_assert!(twice.contains(&format!("`{}` is set twice", key.name)), "{twice}");
    }

    #[test]
    fn unknown_keys_are_named(name in "[a-z][a-z_0-9]{0,20}", layer in 0..4_usize, value in text()) {
        prop_assume!(table::canonical(&name).is_none());
        prop_assume!(table::groups().all(|group| group.prefix != Some(name.as_str())));
        let layer = [Layer::Base, Layer::File, Layer::Environment, Layer::Argument][layer];
        let message = resolved(&[(layer, name.clone(), value.into())]).unwrap_err().to_string();
        let named = match layer {
            Layer::Environment => format!("environment variable `M_{}` names no key", name.to_uppercase()),
            _ => format!("unknown key `{name}`"),
        };
        prop_assert!(message.contains(&named) && message.contains("hint: "), "{message}");
    }

    #[test]
    fn secrets_are_never_shown(
        secret in "hf_[A-Za-z0-9]{20}",
        place in 0..5_usize,
        mistake in prop::option::of((setting(), "[a-z]{3,8}")),
    ) {
        let name = || "hf_access_token".to_owned();
        let mut settings = match place {
            0 => vec![(Layer::Argument, name(), json!(secret))],
            1 => vec![(Layer::Environment, name(), json!(secret))],
            2 => vec![(Layer::File, name(), json!(secret))],
            3 => vec![(Layer::Argument, name(), json!(secret)), (Layer::Environment, name(), json!(secret))],
            _ => vec![(Layer::File, name(), json!([secret]))],
        };
        if let Some(((key, _, _), wrong)) = mistake.filter(|((key, _, _), _)| !key.secret) {
            settings.push((Layer::File, key.name.to_owned(), json!({ "wrong": wrong })));
        }
        let shown = match resolved(&settings) {
            Ok(config) => shown(&config),
            Err(error) => format!("{error} {error:?}"),
        };
        prop_assert!(!shown.contains(&secret), "{shown}");
    }
}

#[test]
fn misspelled_secrets_are_not_shown_either() {
    for argument in [
        "hf_acces_token=hf_verysecret",
        "--hf_access_token=hf_verysecret",
        "=hf_verysecret",
        "hf_access_token.a=hf_verysecret",
    ] {
        let error = Config::resolve(&request(vec![argument.to_owned()], Vec::new())).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("verysecret"), "{error}");
    }
    for variable in ["HF_TOKEN", "M_HF_ACCESS_TOKEN", "M_HF_TOKEN", "M_hf_access_token"] {
        let environment = vec![(variable.to_owned(), "hf_verysecret".to_owned())];
        let shown = match Config::resolve(&request(Vec::new(), environment)) {
            Ok(config) => {
                let origin = &config.entry("hf_access_token").origin;
                assert!(matches!(origin, Origin::Environment { .. }), "{origin}");
                shown(&config)
            }
            Err(error) => format!("{error} {error:?}"),
        };
        assert!(!shown.contains("verysecret"), "{shown}");
    }
}
