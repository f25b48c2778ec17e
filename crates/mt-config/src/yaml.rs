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

macro_rules! embedded {
    ($directory:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!($directory, "/", $name, ".yml")))),*]
    };
}

/// The named models.
pub(crate) const MODELS: &[(&str, &str)] = embedded!["models":
    "default",
    "llama2-13b",
    "llama2-70b",
    "llama2-7b",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "mistral-7b",
];

/// The presets, which a command line names as it would name a file.
pub(crate) const PRESETS: &[(&str, &str)] = embedded!["presets": "base", "quick-start"];

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

/// The settings of a file of the user's. A path that does not exist but has the name of a preset is that preset, so
/// that command lines written for MaxText's source tree work: `src/maxtext/configs/base.yml`.
pub(crate) fn read(path: &Path) -> Result<Vec<Setting>, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => {
            let shared = Arc::new(path.to_owned());
            parse(&text, path, |line| Origin::File { path: shared.clone(), line })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            embedded(Embedded::Preset, &stem)
                .ok_or_else(|| Problem::MissingFile { path: path.to_owned() }.into())
        }
        Err(source) => Err(Problem::Unreadable { path: path.to_owned(), source }.into()),
    }
}

fn parse(text: &str, path: &Path, origin: impl Fn(u64) -> Origin) -> Result<Vec<Setting>, ConfigError> {
    let entries: BTreeMap<String, Spanned<Value>> = serde_saphyr::from_str(text).map_err(|error| {
        ConfigError::from(Problem::Yaml {
            path: PathBuf::from(path),
            // The library draws the place in the file below its first line, which has the line number already.
            reason: first_line(&error.to_string()),
        })
    })?;
    let mut settings: Vec<(u64, Setting)> = entries
        .into_iter()
        .map(|(name, spanned)| {
            let line = spanned.referenced.line();
            (line, Setting { name, value: spanned.value, origin: origin(line) })
        })
        .collect();
    settings.sort_by_key(|(line, _)| *line);
    Ok(settings.into_iter().map(|(_, setting)| setting).collect())
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
                assert!(crate::table::lookup(&setting.name).is_some(), "{name}: {}", setting.name);
            }
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
