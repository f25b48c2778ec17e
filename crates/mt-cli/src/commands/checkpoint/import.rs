//! `maxtext checkpoint import`.

use std::fs;

use mt_checkpoint::{CheckpointManager, ExtraItem, ManagerOptions, RunLock, SaveRequest};
use mt_config::{LoadConfig, RunRecord, saved_config_path, tokenizer_directory};
use mt_data::Tokenizer;
use mt_engine::load_model;
use mt_models::{EXACT_ITEM, StateEntries};
use serde_json::json;

use super::{
    source::{Kind, Source},
    table::bytes,
};
use crate::{
    arguments::Import,
    commands::{report_loaded, say_installation},
    failure::{Failure, print},
};

/// The name of the checkpoint directory in a run's directory.
const CHECKPOINTS: &str = "checkpoints";

pub fn run(command: Import) -> Result<(), Failure> {
    let directory = &command.output;
    if directory.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::user(format!(
            "`{}` is not empty\nhint: choose another directory for `--output`",
            directory.display()
        )));
    }
    let source = Source::of(command.settings)?;
    let load = LoadConfig::from_config(&source.config)?;
    let loaded = load_model(&load, &mut say_installation)?;
    report_loaded(&loaded.skipped, &loaded.notices, loaded.placements.as_deref());
    let failed = |error| Failure::run(format!("cannot write to `{}`: {error}", directory.display()));
    let lock = RunLock::acquire(directory)?;
    let options = ManagerOptions { asynchronous: false, ..ManagerOptions::default() };
    let mut manager = CheckpointManager::open(directory.join(CHECKPOINTS), &lock, options)?;
    fs::write(saved_config_path(directory), RunRecord::new(source.config.clone()).to_yaml())
        .map_err(failed)?;
    if let Kind::Published(published) = &source.kind
        && Tokenizer::is_saved_in(published)
    {
        Tokenizer::load(published)?.save(&tokenizer_directory(directory))?;
    }
    let entries = StateEntries::of_parameters(&*loaded.model, &loaded.parameters)
        .map_err(mt_models::StateError::from)?;
    let (entries, exact) = entries.into_entries();
    let extra = ExtraItem { item: EXACT_ITEM.to_owned(), entries: exact };
    let metadata = json!({ "scan_layers": load.model.scan_layers });
    let request = SaveRequest {
        entries,
        extra_items: if extra.entries.is_empty() { Vec::new() } else { vec![extra] },
        custom_metadata: metadata.as_object().cloned().unwrap_or_default(),
        ..SaveRequest::default()
    };
    let saved = manager.save(0, request)?;
    let saved = match saved {
        Some(saved) => Some(saved),
        None => manager.wait_until_finished()?,
    };
    let size = saved.map_or_else(String::new, |saved| format!("{} of ", bytes(saved.bytes)));
    print(&format!(
        "wrote {size}parameters to `{}`\nuse it with: maxtext decode load_parameters_path={}",
        directory.join(CHECKPOINTS).join("0").display(),
        directory.display()
    ))
}
