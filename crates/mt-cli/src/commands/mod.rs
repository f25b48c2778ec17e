//! One module a subcommand.

pub mod checkpoint;
pub mod compile;
pub mod completion;
pub mod config;
pub mod decode;
pub mod estimate;
pub mod logits;
pub mod plugin;
pub mod tokenizer;
pub mod train;

use std::path::{Path, PathBuf};

use mt_checkpoint::SkippedStep;
use mt_config::{CheckpointGroup, Config, Hardware, ModelDescription, Notice, Request, saved_config_path};
use mt_models::hugging_face;

use crate::failure::Failure;

/// Resolves a configuration. Where it loads a published model, the file that describes that model is a layer of it.
pub fn resolve(request: &Request) -> Result<Config, Failure> {
    let config = Config::resolve(request)?;
    let Some(directory) = published(&config) else { return Ok(config) };
    let description = ModelDescription {
        path: hugging_face::description_path(&directory),
        settings: hugging_face::settings_of(&directory)?
            .into_pairs()
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    };
    Ok(Config::resolve(&request.clone().describing(description))?)
}

/// The directory of the published model that a configuration loads.
pub fn published(config: &Config) -> Option<PathBuf> {
    let group = CheckpointGroup::from_config(config).ok()?;
    let path = group.parameters_path()?;
    // What is named as such is taken as such, so that what is wrong with it is said.
    (group.hf_model_path.is_some() || hugging_face::is_hugging_face(path)).then(|| path.to_owned())
}

/// The keys that name weights, of which one is given.
pub const WEIGHTS_KEYS: [&str; 3] = ["load_parameters_path", "hf_model_path", "load_full_state_path"];

/// A request for the weights of a run, on top of that run's configuration. `given` is the request without it.
pub fn over_run(request: Request, given: &Config, run: &Path) -> Request {
    let mut request = request.over_saved(saved_config_path(run));
    // What the run itself started from is not what is loaded now.
    let is_given = |key: &&str| given.entry(key).value.as_str().is_some_and(|path| !path.is_empty());
    let others = WEIGHTS_KEYS.iter().filter(|key| !is_given(key));
    request.arguments.extend(others.map(|other| format!("{other}=")));
    request
}

/// The configuration of a run that is not started, with its notes reported. No data is read, so that it does not matter
/// whether there is any, or a reader of its kind.
fn resolve_without_data(arguments: Vec<String>) -> Result<Config, Failure> {
    let mut request = Request::from_process(arguments).with_quick_start();
    let config = resolve(&request)?;
    warn(&config);
    if config.is_quick_start() {
        return Ok(config);
    }
    request.arguments.push("dataset_type=synthetic".to_owned());
    resolve(&request)
}

/// Says what is worth knowing about a configuration though nothing is wrong with it.
fn warn(config: &Config) {
    print_notes(config.notes());
}

/// As [`warn`], what only concerns training.
fn warn_of_training(config: &Config) {
    print_notes(config.training_notes());
}

/// As [`warn`], what only shows once it is known on which hardware a program runs.
fn warn_on(config: &Config, hardware: Hardware) {
    print_notes(config.notes_on(hardware));
}

fn print_notes(notes: Vec<String>) {
    for note in notes {
        eprintln!("warning: {note}");
    }
}

/// Says what is worth knowing about loaded weights: checkpoints that were passed over, and where everything is.
fn report_loaded(skipped: &[SkippedStep], notices: &[Notice], placements: Option<&str>) {
    for notice in notices {
        eprintln!("{notice}");
    }
    if let Some(tables) = placements {
        eprint!("{tables}");
    }
    for skipped in skipped {
        eprintln!("warning: checkpoint {} is passed over: {}", skipped.step, skipped.reason);
    }
}
