//! YAML files: one mapping from keys to values.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value;
use serde_saphyr::Spanned;

use crate::{
    error::{ConfigError, Problem},
    origin::Origin,
    suggest::nearest,
    table,
};

/// One line of a file: a name, what it is set to, and where.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

/// YAML files that are part of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Embedded {
    Model,
    Preset,
}

// `MODELS`, the named models, and `PRESETS`, which a command line names as it would name a file.
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The settings of a file that is part of the program.
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

/// The settings of a file of the user's. A path that does not exist but ends as a preset is called is that preset, so
/// that command lines written for MaxText's source tree work: `src/maxtext/configs/base.yml`.
pub(crate) fn read(path: &Path) -> Result<Vec<Setting>, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let shared = Arc::new(path.to_owned());
            parse(&text, path, |line| Origin::File { path: shared.clone(), line })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => match stand_in(path) {
            Some((kind, name)) => Ok(embedded(kind, name).expect("stand-ins are embedded")),
            None => Err(Problem::MissingFile {
                path: path.to_owned(),
                nearest: nearest(&stem(path), PRESETS.iter().map(|(name, _)| *name)),
            }
            .into()),
        },
        Err(source) => Err(Problem::Unreadable { path: path.to_owned(), source }.into()),
    }
}

/// The preset, or the model of the directory `models`, that a path of MaxText's source tree means.
pub(crate) fn stand_in(path: &Path) -> Option<(Embedded, &'static str)> {
    let stem = stem(path);
    let written = path.with_file_name(&stem);
    let of_name = |name: &str| PRESETS.iter().map(|(preset, _)| *preset).find(|preset| *preset == name);
    let in_tree = PRESETS.iter().map(|(preset, _)| *preset).filter(|preset| written.ends_with(preset));
    let by_stem = || {
        let mut same = PRESETS
            .iter()
            .map(|(preset, _)| *preset)
            .filter(|preset| preset.rsplit('/').next() == Some(stem.as_str()));
        same.next().filter(|_| same.next().is_none())
    };
    let model = || {
        let (name, _) = MODELS.iter().find(|(name, _)| *name == stem)?;
        (path.parent()?.file_name()? == "models").then_some((Embedded::Model, *name))
    };
    let preset = of_name(&stem).or_else(|| in_tree.max_by_key(|preset| preset.len())).or_else(by_stem);
    preset.map(|preset| (Embedded::Preset, preset)).or_else(model)
}

/// The name of a file without its ending; names of models have points.
fn stem(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = name.strip_suffix(".yml").or_else(|| name.strip_suffix(".yaml"));
    stem.map_or(name.clone(), str::to_owned)
}

fn parse(text: &str, path: &Path, origin: impl Fn(u64) -> Origin) -> Result<Vec<Setting>, ConfigError> {
    let entries: BTreeMap<String, Spanned<Value>> = serde_saphyr::from_str(text).map_err(|error| {
        ConfigError::from(Problem::Yaml {
            path: PathBuf::from(path),
            // The library draws the place in the file below its first line, which has the line number already.
            reason: first_line(&error.to_string()),
        })
    })?;
    let mut settings: Vec<(u64, Setting)> = Vec::new();
    for (name, spanned) in entries {
        let line = spanned.referenced.line();
        match spanned.value {
            // The keys of a nested group are keys, under its name or their own.
            Value::Object(nested) if table::is_prefix(&name) => {
                settings.extend(nested.into_iter().map(|(key, value)| {
                    (line, Setting { name: format!("{name}.{key}"), value, origin: origin(line) })
                }));
            }
            value => settings.push((line, Setting { name, value, origin: origin(line) })),
        }
    }
    settings.sort_by_key(|(line, _)| *line);
    Ok(settings.into_iter().map(|(_, setting)| setting).collect())
}

/// What a text means where YAML is free to choose: a number, a truth value, or the text.
pub(crate) fn scalar(value: &Value) -> Value {
    let parsed = value.as_str().and_then(|text| serde_saphyr::from_str(text).ok());
    parsed.unwrap_or_else(|| value.clone())
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
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
            ("mine.yml", None),
        ] {
            assert_eq!(stand_in(Path::new(path)).map(|(_, name)| name), expected, "{path}");
        }
    }

    #[track_caller]
    fn check_error(text: &str, expected: &str) {
        let error = parse(text, Path::new("a.yml"), |_| Origin::Argument).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn errors_name_the_place() {
        check_error("steps: [1", "line 1 column 8");
        check_error("steps: 1\nsteps: 2", "duplicate mapping key: steps");
        check_error("- steps", "expected mapping start");
    }
}
