//! Steps in object stores, which have neither renames nor directories.

use std::path::Path;

use crate::{
    disk::{self, Disk},
    error::{CheckpointError, Result},
    locate,
    lock::Fence,
    metadata::{SUCCESS_FILE, TEMPORARY_SUFFIX},
    save::success_text,
};

/// The directory with records of uploads that are not finished. Orbax ignores it.
pub(crate) const UPLOADS: &str = ".maxtext_uploads";

/// Removes what interrupted saves and deletions left in a checkpoints directory, and tries to write.
pub(crate) fn prepare(directory: &Path, disk: &Disk) -> Result<()> {
    let failed = |source| CheckpointError::preparing(directory, source);
    // Detects missing permission now, not after an hour of training.
    let probe = directory.join(format!("probe{TEMPORARY_SUFFIX}"));
    mt_storage::put(&probe, "", mt_storage::Condition::Any).map_err(failed)?;
    mt_storage::remove(&probe).map_err(failed)?;
    mt_storage::abort_uploads(&directory.join(UPLOADS)).map_err(failed)?;
    for entry in mt_storage::list(directory).map_err(failed)? {
        let path = directory.join(&entry.name);
        let is_leftover = entry.name.ends_with(TEMPORARY_SUFFIX)
            || (locate::step_of(&path).is_some() && !locate::is_complete(&path));
        if entry.is_directory && is_leftover {
            disk.remove_directory(&path)?;
        }
    }
    Ok(())
}

/// Makes a step complete by the object that is written last. The put fails if another process has written it.
pub(crate) fn commit(disk: &Disk, directory: &Path, destination: &Path, fence: &Fence) -> Result<()> {
    if fence() {
        let step = locate::step_of(destination).unwrap_or_default();
        return Err(CheckpointError::TakenOver { directory: directory.to_owned(), step });
    }
    disk.commit(&destination.join(SUCCESS_FILE), success_text(destination).as_bytes())
}

/// Removes what a failed save left, also the pieces of its uploads.
pub(crate) fn clean_up(disk: &Disk, temporary: &Path) -> std::io::Result<()> {
    disk::remove_tree(temporary)?;
    disk.uploads.as_deref().map_or(Ok(()), mt_storage::abort_uploads)
}
