//! Output directories that are like those of runs, with one checkpoint.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use mt_checkpoint::{
    CheckpointError, CheckpointManager, ManagerOptions, RunLock, SaveReport, SaveRequest, StorageFormat,
};
use mt_config::{
    CheckpointGroup, run_directory_of, saved_config_path, token_numbers_path, tokenizer_directory,
};

use crate::failure::Failure;

/// The name of the checkpoint directory in a run's directory.
pub const CHECKPOINTS: &str = "checkpoints";
/// Exists while a command writes, so that one that was interrupted can be repeated.
const UNFINISHED: &str = ".maxtext.import";

/// A checkpoint to be written.
pub struct Output<'a> {
    pub directory: &'a Path,
    pub format: StorageFormat,
    pub step: u64,
    pub request: SaveRequest,
}

/// The format of saved arrays that the keys name.
pub fn format_of(group: &CheckpointGroup) -> StorageFormat {
    StorageFormat {
        ocdbt: group.checkpoint_storage_use_ocdbt,
        zarr3: group.checkpoint_storage_use_zarr3,
        target_file_bytes: group.checkpoint_storage_target_data_file_size_bytes,
    }
}

/// Refuses a directory that holds anything but the files of a command that did not finish.
pub fn check(directory: &Path) -> Result<(), Failure> {
    if directory.is_file() {
        let path = directory.display();
        return Err(Failure::user(format!(
            "cannot write to `{path}`: it is a file\nhint: name a directory with `--output`"
        )));
    }
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

impl Output<'_> {
    /// Writes the checkpoint, after `accompany` has written the files beside it. Nothing is left if it fails.
    pub fn write(self, accompany: impl FnOnce(&Path) -> Result<(), Failure>) -> Result<SaveReport, Failure> {
        let directory = self.directory;
        let mut lock = RunLock::acquire(directory)?.provisional();
        check(directory)?;
        let written = self.write_locked(&lock, accompany);
        if written.is_err() {
            // The first error is the one to report. A new directory is removed with its lock.
            let _ = remove_unfinished(directory);
        } else {
            lock.keep();
        }
        written
    }

    fn write_locked(
        self,
        lock: &RunLock,
        accompany: impl FnOnce(&Path) -> Result<(), Failure>,
    ) -> Result<SaveReport, Failure> {
        let Self { directory, format, step, request } = self;
        let failed = |error| Failure::run(format!("cannot write to `{}`: {error}", directory.display()));
        remove_unfinished(directory).map_err(failed)?;
        fs::write(directory.join(UNFINISHED), "a command writes this directory, or was interrupted\n")
            .map_err(failed)?;
        // One thread: a shard for each one is in memory.
        let options = ManagerOptions { asynchronous: false, format, threads: 1, ..ManagerOptions::default() };
        let mut manager = CheckpointManager::open(directory.join(CHECKPOINTS), lock, options)?;
        accompany(directory)?;
        // A synchronous save returns its own report.
        let saved = manager.save(step, request)?.ok_or(CheckpointError::Cancelled { step })?;
        fs::remove_file(directory.join(UNFINISHED)).map_err(failed)?;
        Ok(saved)
    }
}

/// Copies the configuration and the tokenizer of the run to which a checkpoint belongs. Returns whether there is one.
pub fn copy_run_files(checkpoint: &Path, directory: &Path) -> Result<bool, Failure> {
    let Some(run) = run_directory_of(checkpoint) else { return Ok(false) };
    let failed = |path: &Path, error: io::Error| {
        Failure::run(format!("cannot copy `{}` to `{}`: {error}", path.display(), directory.display()))
    };
    let copy = |from: PathBuf, to: PathBuf| match from.is_file() {
        true => fs::copy(&from, to).map(|_| ()).map_err(|error| failed(&from, error)),
        false => Ok(()),
    };
    copy(saved_config_path(&run), saved_config_path(directory))?;
    copy(token_numbers_path(&run), token_numbers_path(directory))?;
    let (from, to) = (tokenizer_directory(&run), tokenizer_directory(directory));
    let Ok(files) = from.read_dir() else { return Ok(true) };
    fs::create_dir_all(&to).map_err(|error| failed(&from, error))?;
    for file in files.flatten() {
        copy(file.path(), to.join(file.file_name()))?;
    }
    Ok(true)
}

/// Removes what a command that did not finish has written.
fn remove_unfinished(directory: &Path) -> io::Result<()> {
    let is_there = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    };
    for name in [PathBuf::from(CHECKPOINTS), tokenizer_directory(Path::new(""))] {
        fs::remove_dir_all(directory.join(name)).or_else(is_there)?;
    }
    for file in [saved_config_path(directory), token_numbers_path(directory), directory.join(UNFINISHED)] {
        fs::remove_file(file).or_else(is_there)?;
    }
    Ok(())
}
