//! The form of the weights that the optimizer of a run steps.

use std::path::Path;

use serde_json::Value;

use super::{
    CheckpointGroup, RunGroup, choices::OptimizerSpaceChoice, read, run_directory_of, saved_config_path,
};
use crate::{config::Config, origin::Origin, yaml};

/// The form of the weights in which gradients are clipped, weights decay and the optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerSpace {
    /// The form that MaxText's checkpoints store, with constants folded into some parameters.
    MaxText,
    /// The form that published models have.
    Published,
}

impl OptimizerSpace {
    /// The key that chooses it, by which the space is recorded with a run.
    pub(crate) const KEY: &'static str = "optimizer_space";

    /// The space as it is written in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxText => OptimizerSpaceChoice::MaxText.name(),
            Self::Published => OptimizerSpaceChoice::Published.name(),
        }
    }

    pub(super) fn of_choice(choice: OptimizerSpaceChoice) -> Option<Self> {
        match choice {
            OptimizerSpaceChoice::Auto => None,
            OptimizerSpaceChoice::MaxText => Some(Self::MaxText),
            OptimizerSpaceChoice::Published => Some(Self::Published),
        }
    }

    /// The space of a run with this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        Self::named(config).unwrap_or_else(|| Self::automatic(config))
    }

    /// The space that a configuration names, if it does not leave the choice.
    fn named(config: &Config) -> Option<Self> {
        Self::of_choice(read(config, Self::KEY, &mut Vec::new())?)
    }

    /// The space of a run that was saved with this configuration. Before there was a choice, optimizers stepped what
    /// published models have.
    pub(crate) fn recorded(saved: &Config) -> Self {
        Self::named(saved).unwrap_or(Self::Published)
    }

    /// The space where a configuration leaves the choice.
    pub(super) fn automatic(config: &Config) -> Self {
        // A file that was resolved before there was a choice.
        if config.resolved_file.is_some() && config.entry(Self::KEY).origin == Origin::Default {
            return Self::Published;
        }
        let run = RunGroup::from_config(config).ok().filter(|run| !run.run_name.is_empty());
        let resumed = run.filter(|run| has_checkpoints(&run.checkpoint_directory()));
        if let Some(space) = resumed.and_then(|run| Self::of_saved_file(&run.config_path())) {
            return space;
        }
        let Ok(checkpoint) = CheckpointGroup::from_config(config) else { return Self::MaxText };
        if let Some(state) = &checkpoint.load_full_state_path {
            // MaxText keeps no such file beside its own checkpoints.
            let run = run_directory_of(state).map(|run| saved_config_path(&run));
            return run.and_then(|file| Self::of_saved_file(&file)).unwrap_or(Self::MaxText);
        }
        let Some(path) = checkpoint.parameters_path() else { return Self::MaxText };
        if checkpoint.hf_model_path.is_some() || is_published_model(path) {
            return Self::Published;
        }
        // Training on another run's weights is stepped as that run was.
        let run = run_directory_of(path).map(|run| saved_config_path(&run));
        run.and_then(|file| Self::of_saved_file(&file)).unwrap_or(Self::MaxText)
    }

    /// The space of the run whose configuration a file is, if it is one that this program wrote.
    fn of_saved_file(path: &Path) -> Option<Self> {
        let settings = yaml::read(path).ok()?;
        let of =
            |name: &str| settings.iter().find(|setting| setting.name == name).map(|setting| &setting.value);
        let is_ours = of("resolved") == Some(&Value::Bool(true));
        let maxtext = Value::from(Self::MaxText.name());
        is_ours.then(|| if of(Self::KEY) == Some(&maxtext) { Self::MaxText } else { Self::Published })
    }
}

/// Whether a directory of checkpoints has one, each being a directory named by its step.
fn has_checkpoints(directory: &Path) -> bool {
    let Ok(entries) = directory.read_dir() else { return false };
    let is_step = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_step))
}

/// Whether a path is a published model's directory: one of Hugging Face's, with a `config.json`, or one in Llama's first
/// format; and no run of ours.
pub fn is_published_model(path: &Path) -> bool {
    let has = |name: &str| path.join(name).is_file();
    // A directory of weights alone counts, too, so that the error names the file that is missing.
    let is_hugging_face =
        has("config.json") || has("model.safetensors") || has("model.safetensors.index.json");
    let is_first_format = has("params.json") && has("consolidated.00.pth");
    (is_hugging_face || is_first_format) && !has("config.yml")
}
