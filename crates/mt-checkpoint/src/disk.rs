//! Durable changes to a disk or an object store. Tests can make each of them fail.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_storage::{Condition, Upload, is_remote};

use crate::{
    error::{CheckpointError, Result},
    manifest::FileRecord,
    metadata::SUCCESS_FILE,
};

/// A change about to be made to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskOperation {
    /// A directory is created.
    CreateDirectory,
    /// A file is created and written, or more is written to its end.
    Write,
    /// A file or a directory is flushed to the disk.
    Sync,
    /// A file or a directory is renamed; the path is the new name.
    Rename,
    /// A file is removed, or a directory with its contents.
    Remove,
}

/// The effect of a change of which the disk reports success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskEffect {
    /// The change.
    Done,
    /// It writes only the first bytes. Changes that write none are lost.
    Shortened(usize),
    /// Nothing.
    Lost,
}

/// Called before each change; its error becomes the error of the change. Tests use it to inject faults: it may fail,
/// wait, have the change shortened or lost, or end the process.
pub type DiskHook = Arc<dyn Fn(DiskOperation, &Path) -> io::Result<DiskEffect> + Send + Sync>;

/// Creates a directory and its ancestors, and flushes the directories that list them: after a power failure a saved
/// step is found only if its parents are.
pub(crate) fn create_durably(path: &Path) -> io::Result<()> {
    if is_remote(path) {
        // Stores have no directories but those of their objects' keys.
        return Ok(());
    }
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
    /// The directory of records of uploads to an object store.
    pub uploads: Option<PathBuf>,
}

impl Disk {
    pub fn create_directory(&self, path: &Path) -> Result<()> {
        self.change(DiskOperation::CreateDirectory, "create directory", path, || match is_remote(path) {
            true => Ok(()),
            false => fs::create_dir_all(path),
        })
    }

    /// Creates a file with the pieces as its contents, and flushes it.
    pub fn write(&self, path: &Path, pieces: &[&[u8]]) -> Result<()> {
        let failed = |source| CheckpointError::io("write", path, source);
        if is_remote(path) {
            return self.put(path, pieces, Condition::Any);
        }
        let mut file = match self.effect(DiskOperation::Write, "write", path)? {
            DiskEffect::Lost => None,
            effect => Some((File::create_new(path).map_err(failed)?, effect)),
        };
        if let Some((file, effect)) = &mut file {
            let mut left = effect.most_bytes();
            for piece in pieces {
                let written = &piece[..piece.len().min(left)];
                file.write_all(written).map_err(failed)?;
                left -= written.len();
            }
        }
        self.change(DiskOperation::Sync, "flush", path, || file.map_or(Ok(()), |(file, _)| file.sync_all()))
    }

    /// Writes an object that does not exist yet, which completes what is written before it.
    pub fn commit(&self, path: &Path, contents: &[u8]) -> Result<()> {
        self.put(path, &[contents], Condition::New)
    }

    fn put(&self, path: &Path, pieces: &[&[u8]], condition: Condition) -> Result<()> {
        let effect = self.effect(DiskOperation::Write, "write", path)?;
        if effect != DiskEffect::Lost {
            let mut contents = pieces.concat();
            contents.truncate(effect.most_bytes());
            let written = mt_storage::put(path, contents, condition);
            written.map_err(|source| CheckpointError::io("write", path, source))?;
        }
        self.change(DiskOperation::Sync, "flush", path, || Ok(()))
    }

    /// Creates an empty file to which pieces are appended.
    pub fn appender(&self, path: PathBuf) -> Result<Appender<'_>> {
        let create = || match is_remote(&path) {
            true => {
                Upload::new(&path, self.uploads.as_deref()).map(|upload| Target::Object(Box::new(upload)))
            }
            false => File::create_new(&path).map(Target::File),
        };
        let target = match self.effect(DiskOperation::Write, "write", &path)? {
            DiskEffect::Lost => None,
            _ => Some(create().map_err(|source| CheckpointError::io("write", &path, source))?),
        };
        Ok(Appender { disk: self, path, target, record: FileRecord::default() })
    }

    /// Creates a file of a given size, to be filled later.
    pub fn create_file(&self, path: &Path, bytes: u64) -> Result<File> {
        self.effect(DiskOperation::Write, "write", path)?;
        let create = || {
            let file = File::create_new(path)?;
            file.set_len(bytes)?;
            Ok(file)
        };
        create().map_err(|source| CheckpointError::io("write", path, source))
    }

    /// Copies a file, and flushes the copy.
    pub fn copy_file(&self, from: &Path, to: &Path) -> Result<()> {
        self.change(DiskOperation::Write, "write", to, || mt_storage::copy(from, to))?;
        self.change(DiskOperation::Sync, "flush", to, || match is_remote(to) {
            true => Ok(()),
            false => File::open(to)?.sync_all(),
        })
    }

    pub fn sync_file(&self, path: &Path, file: &File) -> Result<()> {
        self.change(DiskOperation::Sync, "flush", path, || file.sync_all())
    }

    pub fn sync_directory(&self, path: &Path) -> Result<()> {
        self.change(DiskOperation::Sync, "flush", path, || match is_remote(path) {
            true => Ok(()),
            false => File::open(path)?.sync_all(),
        })
    }

    /// Flushes the directories below `path`, then `path`; files are flushed when they are written.
    pub fn sync_directories(&self, path: &Path) -> Result<()> {
        let read = |source| CheckpointError::io("list", path, source);
        if is_remote(path) {
            return self.sync_directory(path);
        }
        for entry in fs::read_dir(path).map_err(read)? {
            let entry = entry.map_err(read)?;
            if entry.file_type().map_err(read)?.is_dir() {
                self.sync_directories(&entry.path())?;
            }
        }
        self.sync_directory(path)
    }

    /// Renames a file or a directory. In a store, whose objects have no names but their keys, a step is copied and then
    /// removed; neither of the two is complete without its mark, which is copied last and removed first.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.change(DiskOperation::Rename, "rename a file or directory to", to, || {
            match (is_remote(from), is_remote(to)) {
                (false, false) => fs::rename(from, to),
                (true, true) => move_objects(from, to),
                _ => Err(io::Error::from(io::ErrorKind::CrossesDevices)),
            }
        })
    }

    pub fn remove_file(&self, path: &Path) -> Result<()> {
        self.change(DiskOperation::Remove, "remove", path, || match is_remote(path) {
            true => mt_storage::remove(path),
            false => fs::remove_file(path),
        })
    }

    pub fn remove_directory(&self, path: &Path) -> Result<()> {
        self.change(DiskOperation::Remove, "remove", path, || remove_tree(path))
    }

    fn effect(&self, operation: DiskOperation, action: &'static str, path: &Path) -> Result<DiskEffect> {
        let effect = self.hook.as_ref().map_or(Ok(DiskEffect::Done), |hook| hook(operation, path));
        effect.map_err(|source| CheckpointError::io(action, path, source))
    }

    /// Makes a change, unless it is lost.
    fn change(
        &self,
        operation: DiskOperation,
        action: &'static str,
        path: &Path,
        change: impl FnOnce() -> io::Result<()>,
    ) -> Result<()> {
        match self.effect(operation, action, path)? {
            DiskEffect::Done => change().map_err(|source| CheckpointError::io(action, path, source)),
            DiskEffect::Shortened(_) | DiskEffect::Lost => Ok(()),
        }
    }
}

impl DiskEffect {
    /// The most bytes that are written.
    fn most_bytes(self) -> usize {
        match self {
            Self::Done => usize::MAX,
            Self::Shortened(bytes) => bytes,
            Self::Lost => 0,
        }
    }
}

/// Removes a directory; of a step in a store first the mark that completes it.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    match is_remote(path) {
        true => mt_storage::remove_all(path, &[SUCCESS_FILE]),
        false => fs::remove_dir_all(path),
    }
}

/// Copies all objects below a path, the one that completes a step last, and removes the originals.
fn move_objects(from: &Path, to: &Path) -> io::Result<()> {
    for (file, _) in in_order_of_copying(from)? {
        mt_storage::copy(&from.join(&file), &to.join(&file))?;
    }
    remove_tree(from)
}

/// The files below a directory, the one that completes a step last.
pub(crate) fn in_order_of_copying(directory: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut files = mt_storage::files_below(directory)?;
    files.sort_by_key(|(file, _)| file == Path::new(SUCCESS_FILE));
    Ok(files)
}

/// A file that is written piece by piece.
pub(crate) struct Appender<'d> {
    disk: &'d Disk,
    path: PathBuf,
    /// `None` if its creation was lost.
    target: Option<Target>,
    record: FileRecord,
}

enum Target {
    File(File),
    Object(Box<Upload>),
}

impl Appender<'_> {
    /// The bytes so far.
    pub fn bytes(&self) -> u64 {
        self.record.bytes
    }

    pub fn append(&mut self, piece: &[u8]) -> Result<()> {
        let Self { disk, path, target, record } = self;
        let written = disk.effect(DiskOperation::Write, "write", path)?.most_bytes().min(piece.len());
        let result = match target {
            None => Ok(()),
            Some(Target::File(file)) => file.write_all(&piece[..written]),
            Some(Target::Object(upload)) => upload.write(&piece[..written]),
        };
        result.map_err(|source| CheckpointError::io("write", &*path, source))?;
        record.add(piece);
        Ok(())
    }

    /// Flushes the file and returns its record.
    pub fn finish(self) -> Result<FileRecord> {
        let Self { disk, path, target, record } = self;
        disk.change(DiskOperation::Sync, "flush", &path, || match target {
            None => Ok(()),
            Some(Target::File(file)) => file.sync_all(),
            Some(Target::Object(upload)) => upload.finish(),
        })?;
        Ok(record)
    }
}
