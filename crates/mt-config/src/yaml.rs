//! YAML files: one mapping from keys to values.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor},
};
use serde_json::Value;
use serde_saphyr::{DuplicateKeyPolicy, Spanned};

use crate::{
    coerce::value_text,
    error::{ConfigError, Problem, short},
    origin::Origin,
    suggest::nearest,
    table,
};

/// One line of a file: a name, its value and its origin.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

/// The types of YAML files that are embedded in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Embedded {
    Model,
    Preset,
}

// `MODELS` holds the named models; `PRESETS` holds files that a command line names like files of the user.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The settings of an embedded file.
pub(crate) fn embedded(kind: Embedded, name: &str) -> Option<Vec<Setting>> {
    let files = match kind {
        Embedded::Model => MODELS,
        Embedded::Preset => PRESETS,
    };
    let (name, text) = files.iter().find(|(candidate, _)| *candidate == name)?;
    let origin = |line| match kind {
        Embedded::Model => Origin::Model { name: (*name).to_owned(), line },
        Embedded::Preset => Origin::Preset { name: (*name).to_owned(), line },
    };
    Some(parse(text, Path::new(name), origin).expect("files of the program are YAML, which a test checks"))
}

/// The settings of a file. A missing path that ends in a preset's name means that preset, so that command lines for
/// MaxText's source tree work: `src/maxtext/configs/base.yml`.
pub(crate) fn read(path: &Path) -> Result<Vec<Setting>, ConfigError> {
    match mt_storage::read_text(path) {
        Ok(text) => {
            let shared = Arc::new(path.to_owned());
            parse(&text, path, |line| Origin::File { path: shared.clone(), line })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => match stand_in(path) {
            Some((kind, name)) => Ok(embedded(kind, name).expect("stand-ins are embedded")),
            None => Err(Problem::MissingFile {
                path: path.to_owned(),
                nearest: nearest_presets(&stem(path)),
                named: None,
            }
            .into()),
        },
        Err(source) => Err(Problem::Unreadable { path: path.to_owned(), source }.into()),
    }
}

/// The preset, or the model in the directory `models`, that a path of MaxText's source tree means. Such a path leads
/// through the directory `configs`, is relative to it, or is a bare name; any other path is a file of the user.
pub(crate) fn stand_in(path: &Path) -> Option<(Embedded, &'static str)> {
    let stem = stem(path);
    let mut below: Vec<String> = path
        .with_file_name(&stem)
        .components()
        .filter(|component| *component != Component::CurDir)
        .map(|component| component.as_os_str().to_string_lossy().into_owned())
        .collect();
    let configs = below.iter().rposition(|directory| directory == "configs");
    below.drain(..configs.map_or(0, |index| index + 1));
    let may_be_elsewhere = configs.is_some() || below.len() == 1;
    let below = below.join("/");
    let presets = || PRESETS.iter().map(|(preset, _)| *preset);
    let by_stem = || {
        let mut same = presets().filter(|preset| preset.rsplit('/').next() == Some(stem.as_str()));
        same.next().filter(|_| may_be_elsewhere && same.next().is_none())
    };
    let model = || {
        let (name, _) = MODELS.iter().find(|(name, _)| *name == stem)?;
        (below == format!("models/{name}")).then_some((Embedded::Model, *name))
    };
    let preset = presets().find(|preset| *preset == below).or_else(by_stem);
    preset.map(|preset| (Embedded::Preset, preset)).or_else(model)
}

/// Presets whose last path component resembles `stem`.
fn nearest_presets(stem: &str) -> Vec<String> {
    let own = |name: &'static str| name.rsplit('/').next().unwrap_or(name);
    let near = nearest(stem, PRESETS.iter().map(|(name, _)| own(name)));
    let mut presets: Vec<String> = Vec::new();
    for (preset, _) in PRESETS {
        if near.iter().any(|near| near == own(preset)) {
            presets.push((*preset).to_owned());
        }
    }
    presets
}

/// The file name without its YAML extension. Other dots stay, since names of models contain dots.
pub(crate) fn stem(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = name.strip_suffix(".yml").or_else(|| name.strip_suffix(".yaml"));
    stem.map_or(name.clone(), str::to_owned)
}

fn parse(text: &str, path: &Path, origin: impl Fn(u64) -> Origin) -> Result<Vec<Setting>, ConfigError> {
    match from_yaml::<Lines>(text) {
        Ok(lines) => {
            let settings = lines.settings(origin);
            let problems = set_twice_among(&settings);
            ConfigError::check(settings, problems)
        }
        Err(error) => match duplicates(text, origin) {
            none if none.is_empty() => {
                let reason = reason(&error.to_string());
                Err(Problem::Yaml { path: PathBuf::from(path), reason }.into())
            }
            problems => Err(ConfigError::new(problems)),
        },
    }
}

/// More nodes than any configuration has.
const MOST_NODES: usize = 50_000;

/// Parses YAML, with a limit on the number of nodes after aliases are expanded.
pub(crate) fn from_yaml<T: DeserializeOwned>(text: &str) -> Result<T, serde_saphyr::Error> {
    let options = serde_saphyr::options! { budget: serde_saphyr::budget! { max_nodes: MOST_NODES } };
    serde_saphyr::from_str_with_options(text, options)
}

/// The problems of keys that a file sets twice. The parser rejects such files, but reports only one of the two lines.
fn duplicates(text: &str, origin: impl Fn(u64) -> Origin) -> Vec<Problem> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        budget: serde_saphyr::budget! { max_nodes: MOST_NODES },
    };
    let lines: Option<Lines> = serde_saphyr::from_str_with_options(text, options).ok();
    lines.map_or_else(Vec::new, |lines| set_twice_among(&lines.settings(origin)))
}

/// The problems of keys that are set twice, under the same name or an alias.
fn set_twice_among(settings: &[Setting]) -> Vec<Problem> {
    let mut first: HashMap<&str, &Setting> = HashMap::new();
    let mut problems = Vec::new();
    for setting in settings {
        let name = table::canonical(&setting.name).map_or(setting.name.as_str(), |key| key.name);
        match first.entry(name) {
            Entry::Occupied(first) => problems.push(set_twice(first.get(), setting)),
            Entry::Vacant(place) => drop(place.insert(setting)),
        }
    }
    problems
}

/// The problem of a key that two settings name.
pub(crate) fn set_twice(first: &Setting, second: &Setting) -> Problem {
    let key = table::canonical(&second.name);
    let shown = |value: &Value| shown(key.is_some_and(|key| key.secret), value);
    Problem::SetTwice {
        key: key.map_or_else(|| short(&second.name), |key| key.name.to_owned()),
        first: shown(&first.value),
        first_origin: first.origin.clone(),
        second: shown(&second.value),
        second_origin: second.origin.clone(),
    }
}

/// A value for a message.
pub(crate) fn shown(is_secret: bool, value: &Value) -> String {
    match value_text(value) {
        _ if is_secret => "(hidden)".to_owned(),
        empty if empty.is_empty() => "''".to_owned(),
        text => short(&text),
    }
}

/// Names with their values and line numbers. Keys nested in a group have its prefix.
struct Lines(Vec<(String, Value, u64)>);

impl Lines {
    fn settings(self, origin: impl Fn(u64) -> Origin) -> Vec<Setting> {
        let setting = |(name, value, line)| Setting { name, value, origin: origin(line) };
        self.0.into_iter().map(setting).collect()
    }
}

impl<'de> Deserialize<'de> for Lines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LinesVisitor)
    }
}

struct LinesVisitor;

impl<'de> Visitor<'de> for LinesVisitor {
    type Value = Lines;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("keys with values")
    }

    /// A file without any keys.
    fn visit_unit<E>(self) -> Result<Lines, E> {
        Ok(Lines(Vec::new()))
    }

    fn visit_none<E>(self) -> Result<Lines, E> {
        Ok(Lines(Vec::new()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Lines, A::Error> {
        let mut lines = Vec::new();
        while let Some(name) = map.next_key::<Spanned<String>>()? {
            let line = name.referenced.line();
            if table::is_prefix(&name.value) {
                match map.next_value()? {
                    Nested::Lines(nested) => {
                        let full = |(key, value, line)| (format!("{}.{key}", name.value), value, line);
                        lines.extend(nested.0.into_iter().map(full));
                    }
                    Nested::Value(value) => lines.push((name.value, value, line)),
                }
            } else {
                lines.push((name.value, map.next_value()?, line));
            }
        }
        Ok(Lines(lines))
    }
}

/// The value of a group's name: nested keys, or the value of a key with the group's name.
enum Nested {
    Lines(Lines),
    Value(Value),
}

impl<'de> Deserialize<'de> for Nested {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NestedVisitor)
    }
}

struct NestedVisitor;

impl<'de> Visitor<'de> for NestedVisitor {
    type Value = Nested;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the keys of a group, or a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Nested, A::Error> {
        LinesVisitor.visit_map(map).map(Nested::Lines)
    }

    fn visit_unit<E>(self) -> Result<Nested, E> {
        Ok(Nested::Value(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Nested, E> {
        Ok(Nested::Value(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Nested, E> {
        Ok(Nested::Value(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Nested, E> {
        Ok(Nested::Value(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Nested, E> {
        Ok(Nested::Value(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Nested, E> {
        Ok(Nested::Value(value.into()))
    }
}

/// Interprets a string as YAML would: as a number, a boolean, or a string.
pub(crate) fn scalar(value: &Value) -> Value {
    let parsed = value.as_str().and_then(|text| from_yaml(text).ok());
    parsed.unwrap_or_else(|| value.clone())
}

/// Fragments of the parser's messages for valid YAML that is not a configuration, with replacements for users.
const REASONS: &[(&str, &str)] = &[
    ("expected mapping start", "a line of `key: value` has to begin here"),
    ("budget breached: Depth", "the value that begins here is nested too deeply"),
    ("recursion limit exceeded", "the value that begins here is nested too deeply"),
    ("budget breached", "up to here there are more values than a configuration has"),
    ("recursive references", "an alias refers to a value that contains it"),
    (", set DuplicateKeyPolicy", ""),
    ("multiple YAML documents", "a second document begins here"),
];

/// The parser's message without its drawing of the file; it names the line already.
fn reason(message: &str) -> String {
    let first = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
    let mut reason = first.to_owned();
    for (theirs, ours) in REASONS {
        if let Some(place) = reason.find(theirs) {
            reason.replace_range(place.., ours);
        }
    }
    short(&reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_files_are_yaml_of_known_keys() {
        let models = MODELS.iter().map(|(name, _)| (Embedded::Model, *name));
        let presets = PRESETS.iter().map(|(name, _)| (Embedded::Preset, *name));
        for (kind, name) in models.chain(presets) {
            for setting in embedded(kind, name).unwrap() {
                assert!(table::canonical(&setting.name).is_some(), "{name}: {}", setting.name);
            }
        }
    }

    #[test]
    fn paths_of_maxtexts_source_tree_lead_to_presets() {
        for (path, expected) in [
            ("src/maxtext/configs/base.yml", Some("base")),
            ("MaxText/configs/sft.yml", Some("post_train/sft")),
            ("src/maxtext/configs/post_train/sft.yml", Some("post_train/sft")),
            ("src/maxtext/configs/gpu/models/llama3.1_405b.yml", Some("gpu/models/llama3.1_405b")),
            ("src/maxtext/configs/models/llama3.1-405b.yml", Some("llama3.1-405b")),
            // Two presets have this name.
            ("llama2_70b_v5e-16.yml", None),
            ("tpu/v5e/llama2_70b_v5e-16.yml", Some("tpu/v5e/llama2_70b_v5e-16")),
            ("./post_train/sft.yml", Some("post_train/sft")),
            ("models/llama3.1-405b.yml", Some("llama3.1-405b")),
            ("mine.yml", None),
            // Missing files of the user.
            ("experiments/sft.yml", None),
            ("/home/me/base.yml", None),
            ("experiments/models/llama3.1-405b.yml", None),
        ] {
            assert_eq!(stand_in(Path::new(path)).map(|(_, name)| name), expected, "{path}");
        }
    }

    #[track_caller]
    fn check_error(text: &str, expected: &str) {
        let error = parse(text, Path::new("a.yml"), |_| Origin::Argument).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.to_string().lines().count(), 2, "{error}");
    }

    #[test]
    fn errors_name_the_place() {
        check_error("steps: [1", "line 1 column 8");
        check_error("steps: 1\nsteps: 2", "`steps` is set twice");
        check_error("- steps", "line 1 column 1: a line of `key: value` has to begin here");
    }
}
