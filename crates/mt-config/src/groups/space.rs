//! The form of the weights that a run's optimizer updates.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{
    CheckpointGroup, RunGroup, choices::OptimizerSpaceChoice, read, run_directory_of, saved_config_path,
};
use crate::{config::Config, origin::Origin, yaml};

/// The form of the weights in which gradients are clipped, weights decay and the optimizer updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerSpace {
    /// The form in MaxText's checkpoints, with constants folded into some parameters.
    MaxText,
    /// The form of published models.
    Published,
}

impl OptimizerSpace {
    /// The key that chooses the space and records it with a run.
    pub(crate) const KEY: &'static str = "optimizer_space";

    /// The name of the space in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MaxText => OptimizerSpaceChoice::MaxText.name(),
            Self::Published => OptimizerSpaceChoice::Published.name(),
        }
    }

    fn of_choice(choice: OptimizerSpaceChoice) -> Option<Self> {
        match choice {
            OptimizerSpaceChoice::Auto => None,
            OptimizerSpaceChoice::MaxText => Some(Self::MaxText),
            OptimizerSpaceChoice::Published => Some(Self::Published),
        }
    }

    /// The space of a run with this configuration: the one that it names, or else the automatic one.
    pub(crate) fn of(config: &Config) -> Self {
        let choice = read(config, Self::KEY, &mut Vec::new());
        choice.and_then(Self::of_choice).unwrap_or_else(|| Self::automatic(config))
    }

    /// The space if the configuration leaves the choice to the program.
    fn automatic(config: &Config) -> Self {
        // The file was resolved before this key existed, when optimizers updated the published form.
        if config.resolved_file.is_some() && config.entry(Self::KEY).origin == Origin::Default {
            return Self::Published;
        }
        let run = RunGroup::from_config(config).ok().filter(|run| !run.run_name.is_empty());
        // A store is not asked each time that values are resolved: a run that is resumed by its own keys has its own space,
        // and one that is not is refused, because the saved configuration differs.
        let run = run.filter(|run| !mt_storage::is_remote(&run.stored_directory()));
        let resumed = run.filter(|run| has_checkpoints(&run.checkpoint_directory()));
        if let Some(space) = resumed.and_then(|run| Self::of_saved_file(&run.saved_configuration())) {
            return space;
        }
        let Ok(checkpoint) = CheckpointGroup::from_config(config) else { return Self::MaxText };
        if let Some(state) = &checkpoint.load_full_state_path {
            // MaxText saves no such file with its own checkpoints.
            let run = run_directory_of(state).map(|run| saved_config_path(&run));
            return run.and_then(|file| Self::of_saved_file(&file)).unwrap_or(Self::MaxText);
        }
        let Some(path) = checkpoint.parameters_path() else { return Self::MaxText };
        if checkpoint.hf_model_path.is_some() || is_published_model(path) {
            return Self::Published;
        }
        // Weights of another run are trained further in that run's space.
        let run = run_directory_of(path).map(|run| saved_config_path(&run));
        run.and_then(|file| Self::of_saved_file(&file)).unwrap_or(Self::MaxText)
    }

    /// The space of the run whose configuration a file holds, if `maxtext` wrote the file.
    fn of_saved_file(path: &Path) -> Option<Self> {
        let settings = yaml::read(path).ok()?;
        let of =
            |name: &str| settings.iter().find(|setting| setting.name == name).map(|setting| &setting.value);
        let is_ours = of("resolved") == Some(&Value::Bool(true));
        let maxtext = Value::from(Self::MaxText.name());
        is_ours.then(|| if of(Self::KEY) == Some(&maxtext) { Self::MaxText } else { Self::Published })
    }
}

/// Whether a directory contains checkpoints, which are directories named by their step.
fn has_checkpoints(directory: &Path) -> bool {
    let Ok(entries) = mt_storage::list(directory) else { return false };
    let is_step = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    entries.iter().any(|entry| is_step(&entry.name))
}

/// Whether a path is a published model's directory: one in Hugging Face's format, in Llama's original format or in that of
/// Gemma on Kaggle or of GPT-3 in Pax, but not a run.
pub fn is_published_model(path: &Path) -> bool {
    let has = |name: &str| path.join(name).is_file();
    // A directory with weights alone counts, too, so that the error names the missing file.
    let is_hugging_face =
        has("config.json") || has("model.safetensors") || has("model.safetensors.index.json");
    let is_first_format = has("params.json") && has("consolidated.00.pth");
    (is_hugging_face || is_first_format || is_gemma_of_kaggle(path) || gpt3_of_pax(path).is_some())
        && !has("config.yml")
}

/// Whether a path is a directory with a Gemma in the layout of Kaggle: a checkpoint of Orbax with the parameters of
/// Google's own library.
pub fn is_gemma_of_kaggle(path: &Path) -> bool {
    let Ok(tree) = std::fs::read_to_string(path.join("_METADATA")) else { return false };
    // MaxText's own tree has neither of these keys.
    tree.contains("input_embedding") && tree.contains("attn_vec_einsum")
}

/// The directory with the arrays of a GPT-3 that Pax trained, if a path is that of such a checkpoint: the directory itself,
/// or its `state`.
pub fn gpt3_of_pax(path: &Path) -> Option<PathBuf> {
    const HEAD: &str = "mdl_vars.params.lm.softmax.logits_ffn.linear.w";
    let has_head = |directory: &PathBuf| mt_storage::is_file(&directory.join(HEAD).join(".zarray"));
    [path.to_owned(), path.join("state")].into_iter().find(has_head)
}
