//! Durable changes to the disk. Tests can make each of them fail.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use crate::error::{CheckpointError, Result};

/// A change about to be made to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskOperation {
    /// A directory is created.
    CreateDirectory,
    /// A file is created and written.
    Write,
    /// A file or a directory is flushed to the disk.
    Sync,
    /// A file or a directory is renamed; the path is the new name.
    Rename,
    /// A file is removed, or a directory with its contents.
    Remove,
}

/// Called before each change; its error becomes the error of the change. Tests use it to inject faults and to end the
/// process at chosen points.
pub type DiskHook = Arc<dyn Fn(DiskOperation, &Path) -> io::Result<()> + Send + Sync>;

/// Creates a directory and its ancestors, and flushes the directories that list them: after a power failure a saved
/// step is found only if its parents are.
pub(crate) fn create_durably(path: &Path) -> io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    fs::create_dir_all(path)?;
    for created in missing {
        match created.parent() {
            Some(parent) if parent != Path::new("") => File::open(parent)?.sync_all()?,
            _ => File::open(".")?.sync_all()?,
        }
    }
    Ok(())
}

/// All disk changes go through this type.
#[derive(Clone, Default)]
pub(crate) struct Disk {
    pub hook: Option<DiskHook>,
}

impl Disk {
    pub fn create_directory(&self, path: &Path) -> Result<()> {
        self.run(DiskOperation::CreateDirectory, "create directory", path, || fs::create_dir_all(path))
    }

    /// Creates a file with the pieces as its contents, and flushes it.
    pub fn write(&self, path: &Path, pieces: &[&[u8]]) -> Result<()> {
        let file = self.run(DiskOperation::Write, "write", path, || {
            let mut file = File::create_new(path)?;
            pieces.iter().try_for_each(|piece| file.write_all(piece))?;
            Ok(file)
        })?;
        self.run(DiskOperation::Sync, "flush", path, || file.sync_all())
    }

    /// Creates a file of a given size, to be filled later.
    pub fn create_file(&self, path: &Path, bytes: u64) -> Result<File> {
        self.run(DiskOperation::Write, "write", path, || {
            let file = File::create_new(path)?;
            file.set_len(bytes)?;
            Ok(file)
        })
    }

    pub fn sync_file(&self, path: &Path, file: &File) -> Result<()> {
        self.run(DiskOperation::Sync, "flush", path, || file.sync_all())
    }

    pub fn sync_directory(&self, path: &Path) -> Result<()> {
        self.run(DiskOperation::Sync, "flush", path, || File::open(path)?.sync_all())
    }

    /// Flushes the directories below `path`, then `path`; files are flushed when they are written.
    pub fn sync_directories(&self, path: &Path) -> Result<()> {
        let read = |source| CheckpointError::io("list", path, source);
        for entry in fs::read_dir(path).map_err(read)? {
            let entry = entry.map_err(read)?;
            if entry.file_type().map_err(read)?.is_dir() {
                self.sync_directories(&entry.path())?;
            }
        }
        self.sync_directory(path)
    }

    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.run(DiskOperation::Rename, "rename a file or directory to", to, || fs::rename(from, to))
    }

    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.run(DiskOperation::Remove, "remove", path, || fs::remove_file(path))
    }

    pub fn remove_directory(&self, path: &Path) -> Result<()> {
        self.run(DiskOperation::Remove, "remove", path, || fs::remove_dir_all(path))
    }

    fn run<T>(
        &self,
        operation: DiskOperation,
        action: &'static str,
        path: &Path,
        change: impl FnOnce() -> io::Result<T>,
    ) -> Result<T> {
        let permitted = self.hook.as_ref().map_or(Ok(()), |hook| hook(operation, path));
        permitted.and_then(|()| change()).map_err(|source| CheckpointError::io(action, path, source))
    }
}
