//! Outputs in object stores: commands write them into a directory of this machine, from which they are sent.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::failure::Failure;

/// Files in the order in which they are sent: descriptions, weights, and the marks that complete checkpoints.
fn rank(file: &Path) -> u8 {
    let is_mark = file.file_name().is_some_and(|name| name == "commit_success.txt");
    let has_few_parents = file.components().count() <= 3;
    match file.extension().and_then(|extension| extension.to_str()) {
        _ if is_mark && has_few_parents => 2,
        Some("safetensors" | "gguf") => 1,
        _ => 0,
    }
}

/// Lets `write` write to `output`, or, if that is in a store, to a directory of this machine whose files are then sent.
pub fn staged(output: PathBuf, write: impl FnOnce(PathBuf) -> Result<(), Failure>) -> Result<(), Failure> {
    if mt_storage::is_hub(&output) {
        return Err(Failure::user(format!(
            "cannot write to `{}`: nothing is sent to the Hugging Face hub\nhint: write to a directory, and send it with \
             `hf upload`",
            output.display()
        )));
    }
    if !mt_storage::is_remote(&output) {
        return write(output);
    }
    let failed = |action: &str, error: io::Error| {
        let message = format!("cannot {action} `{}`: {error}", output.display());
        if mt_storage::is_user_error(&error) { Failure::user(message) } else { Failure::run(message) }
    };
    let existing = mt_storage::list(&output).map_err(|error| failed("write to", error))?;
    if !existing.is_empty() || mt_storage::is_file(&output) {
        return Err(Failure::user(format!(
            "`{}` is not empty\nhint: choose another directory for `--output`",
            output.display()
        )));
    }
    let root = mt_storage::cache_directory().map_err(|error| failed("write to", error))?;
    let stage = root.with_file_name("outputs").join(std::process::id().to_string());
    let local = stage.join(output.file_name().unwrap_or_default());
    fs::create_dir_all(&stage).map_err(|error| failed("prepare", error))?;
    let written = write(local.clone()).and_then(|()| {
        send(&local, &output).map_err(|error| failed("write to", error))?;
        say!("sent it to `{}`", output.display());
        Ok(())
    });
    // The command's own result matters more than a failure to remove its temporary files.
    let _ = fs::remove_dir_all(&stage);
    written
}

fn send(local: &Path, output: &Path) -> io::Result<()> {
    if local.is_file() {
        return mt_storage::upload_file(local, output);
    }
    let mut files = mt_storage::files_below(local)?;
    files.retain(|(file, _)| !file.to_string_lossy().ends_with(".lock"));
    files.sort_by_key(|(file, _)| rank(file));
    for (file, _) in files {
        mt_storage::upload_file(&local.join(&file), &output.join(&file))?;
    }
    Ok(())
}

/// The path from which a checkpoint or a published model is read.
pub fn input(path: &mut PathBuf) -> Result<(), Failure> {
    let found = mt_storage::input(path).map_err(|error| {
        let message = format!("cannot read `{}`: {error}", path.display());
        if mt_storage::is_user_error(&error) { Failure::user(message) } else { Failure::run(message) }
    })?;
    *path = found;
    mt_checkpoint::complete_weights(path)?;
    Ok(())
}
