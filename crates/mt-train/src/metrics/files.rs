//! Files that are replaced atomically.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::MetricsError;

/// Creates the parent directory of `path`.
pub(crate) fn create_parent(path: &Path) -> Result<(), MetricsError> {
    let parent = parent(path);
    fs::create_dir_all(&parent).map_err(MetricsError::io("create", &parent))
}

/// Replaces `path` with the output of `write` atomically: readers see the old or the new file, even after a power
/// failure.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), MetricsError>,
) -> Result<(), MetricsError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let mut file = BufWriter::new(File::create(&partial).map_err(MetricsError::io("create", &partial))?);
    write(&mut file)?;
    file.flush().map_err(MetricsError::io("write", &partial))?;
    file.get_ref().sync_all().map_err(MetricsError::io("write", &partial))?;
    fs::rename(&partial, path).map_err(MetricsError::io("replace", path))?;
    sync_parent(path)
}

/// Makes the creation or renaming of `path` itself durable.
pub(crate) fn sync_parent(path: &Path) -> Result<(), MetricsError> {
    let parent = parent(path);
    File::open(&parent)
        .and_then(|directory| directory.sync_all())
        .map_err(MetricsError::io("synchronize", &parent))
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
