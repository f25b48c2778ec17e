//! Names that stand for many values: embedded models and presets, files, and runs.

use std::path::{Path, PathBuf};

use crate::{
    config::Config,
    error::{ConfigError, Problem, alternatives},
    groups::{run_directory_of, saved_config_path},
    resolve::Request,
    suggest::nearest,
    yaml::{self, Embedded, MODELS, PRESETS},
};

/// The thing that a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    Model(String),
    Preset(&'static str),
    /// A YAML file of the user, or one of MaxText's source tree.
    File(PathBuf),
    /// The directory of a run.
    Run(PathBuf),
}

/// The named models, sorted.
pub fn model_names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|(name, _)| *name)
}

/// The presets, sorted.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The names in `known` that resemble `name`, best match first.
pub fn nearest_names<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    nearest(name, known)
}

impl Named {
    /// Resolves a name: the directory of a run, a YAML file, a named model or a preset.
    ///
    /// # Errors
    /// The name is none of these.
    pub fn find(name: &str) -> Result<Self, ConfigError> {
        let path = Path::new(name);
        if (mt_storage::is_remote(path) || path.is_dir())
            && let Some(run) = run_directory_of(path)
        {
            return Ok(Self::Run(run));
        }
        if name.ends_with(".yml") || name.ends_with(".yaml") {
            return Ok(Self::File(path.to_owned()));
        }
        if let Some(embedded) = Self::embedded(name) {
            return Ok(embedded);
        }
        if path.is_dir() {
            return Err(Problem::inconsistent(
                format!("`{name}` is a directory, but not that of a run: it has no `config.yml`"),
                "name the directory that `maxtext train` made for a run",
            )
            .into());
        }
        let near = nearest(name, model_names().chain(preset_names()));
        Err(Problem::inconsistent(
            format!("`{name}` is neither a YAML file, a preset, a named model nor the directory of a run"),
            match near.is_empty() {
                true => "`maxtext config models` lists the models; files end in `.yml` or `.yaml`".to_owned(),
                false => format!("did you mean {}?", alternatives(&near)),
            },
        )
        .into())
    }

    /// The embedded model or preset of this name.
    pub fn embedded(name: &str) -> Option<Self> {
        let base = name.strip_suffix("-Instruct").unwrap_or(name);
        if model_names().any(|model| model == base) {
            return Some(Self::Model(name.to_owned()));
        }
        match yaml::stand_in(Path::new(name))? {
            (Embedded::Preset, preset) => Some(Self::Preset(preset)),
            (Embedded::Model, model) => Some(Self::Model(model.to_owned())),
        }
    }

    /// The configuration that results from the name alone, without the environment.
    ///
    /// # Errors
    /// The file cannot be read, or its values do not resolve.
    pub fn resolve(&self) -> Result<Config, ConfigError> {
        let request = Request::default();
        Config::resolve(&match self {
            Self::Model(name) => Request { arguments: vec![format!("model_name={name}")], ..request },
            Self::Preset(name) => request.over_saved(PathBuf::from(name)),
            Self::File(path) => request.over_saved(path.clone()),
            Self::Run(directory) => request.over_saved(saved_config_path(directory)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        for (name, expected) in [
            ("llama2-7b", Named::Model("llama2-7b".to_owned())),
            ("llama3.1-8b-Instruct", Named::Model("llama3.1-8b-Instruct".to_owned())),
            ("src/maxtext/configs/models/llama3-8b", Named::Model("llama3-8b".to_owned())),
            ("sft", Named::Preset("post_train/sft")),
            ("tpu/v5e/llama2_70b_v5e-16", Named::Preset("tpu/v5e/llama2_70b_v5e-16")),
            ("mine.yml", Named::File("mine.yml".into())),
        ] {
            assert_eq!(Named::find(name).unwrap(), expected, "{name}");
        }
        for name in model_names().chain(preset_names()) {
            assert!(Named::find(name).unwrap().resolve().is_ok(), "{name}");
        }
    }

    #[test]
    fn other_names_get_the_nearest() {
        let message = Named::find("llama2-7").unwrap_err().to_string();
        assert!(message.contains("`llama2-7` is neither") && message.contains("`llama2-7b`"), "{message}");
        let message = Named::find("src").unwrap_err().to_string();
        assert!(message.contains("no `config.yml`"), "{message}");
    }
}
