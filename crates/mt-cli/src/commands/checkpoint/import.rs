//! `maxtext checkpoint import`.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use mt_checkpoint::{CheckpointManager, ExtraItem, ManagerOptions, RunLock, SaveRequest, StorageFormat};
use mt_config::{LoadConfig, RunRecord, saved_config_path, tokenizer_directory};
use mt_data::Tokenizer;
use mt_engine::{LoadedModel, load_model};
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
/// Exists while an import writes, so that one that was interrupted can be repeated.
const UNFINISHED: &str = ".maxtext.import";

pub fn run(command: Import) -> Result<(), Failure> {
    let directory = &command.output;
    check_target(directory)?;
    let source = Source::of(command.settings)?;
    let load = LoadConfig::from_config(&source.config)?;
    let loaded = load_model(&load, &mut say_installation)?;
    report_loaded(&loaded.skipped, &loaded.notices, loaded.placements.as_deref());
    let mut lock = RunLock::acquire(directory)?.provisional();
    check_target(directory)?;
    let written = write(directory, &lock, &source, &load, &loaded);
    if written.is_err() {
        // The first error is the one to report. A new directory is removed with its lock.
        let _ = remove_unfinished(directory);
    } else {
        lock.keep();
    }
    let size = written?;
    print(&format!(
        "wrote {size}parameters to `{}`\nuse it with: maxtext decode load_parameters_path={}",
        directory.join(CHECKPOINTS).join("0").display(),
        directory.display()
    ))
}

/// Refuses a directory that holds anything but the files of an import that did not finish.
fn check_target(directory: &Path) -> Result<(), Failure> {
    let Ok(entries) = directory.read_dir() else { return Ok(()) };
    let names: Vec<OsString> = entries.flatten().map(|entry| entry.file_name()).collect();
    let is_unfinished = directory.join(UNFINISHED).is_file();
    if is_unfinished || names.iter().all(|name| name == RunLock::FILE) {
        return Ok(());
    }
    Err(Failure::user(format!(
        "`{}` is not empty\nhint: choose another directory for `--output`",
        directory.display()
    )))
}

/// Removes what an import that did not finish has written.
fn remove_unfinished(directory: &Path) -> std::io::Result<()> {
    let is_there = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    };
    for name in [PathBuf::from(CHECKPOINTS), tokenizer_directory(Path::new(""))] {
        fs::remove_dir_all(directory.join(name)).or_else(is_there)?;
    }
    fs::remove_file(saved_config_path(directory)).or_else(is_there)?;
    fs::remove_file(directory.join(UNFINISHED)).or_else(is_there)
}

/// Writes the run's directory. Returns the size of the checkpoint as text.
fn write(
    directory: &Path,
    lock: &RunLock,
    source: &Source,
    load: &LoadConfig,
    loaded: &LoadedModel,
) -> Result<String, Failure> {
    let failed = |error| Failure::run(format!("cannot write to `{}`: {error}", directory.display()));
    remove_unfinished(directory).map_err(failed)?;
    fs::write(directory.join(UNFINISHED), "an import writes this directory, or was interrupted\n")
        .map_err(failed)?;
    let group = &load.checkpoint;
    let format = StorageFormat {
        ocdbt: group.checkpoint_storage_use_ocdbt,
        zarr3: group.checkpoint_storage_use_zarr3,
        target_file_bytes: group.checkpoint_storage_target_data_file_size_bytes,
    };
    let options = ManagerOptions { asynchronous: false, format, ..ManagerOptions::default() };
    let mut manager = CheckpointManager::open(directory.join(CHECKPOINTS), lock, options)?;
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
    fs::remove_file(directory.join(UNFINISHED)).map_err(failed)?;
    Ok(saved.map_or_else(String::new, |saved| format!("{} of ", bytes(saved.bytes))))
}
