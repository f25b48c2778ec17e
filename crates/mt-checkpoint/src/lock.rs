//! A lock that admits one run per directory.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use mt_storage::Lease;

use crate::{
    disk,
    error::{CheckpointError, Result},
};

/// Exclusive use of a run's directory, until it is dropped or the process ends for any reason.
///
/// A lock that is [provisional](RunLock::provisional) removes a directory that it created when it is dropped, so that a
/// run that is refused leaves nothing behind.
#[derive(Debug)]
pub struct RunLock {
    directory: PathBuf,
    /// The directories that acquiring the lock created, the run's own first.
    created: Vec<PathBuf>,
    is_provisional: bool,
    held: Held,
}

#[derive(Debug)]
enum Held {
    /// The operating system holds the lock while this handle is open.
    File(#[expect(dead_code, reason = "it is held")] File),
    /// An object store has no locks, but an object that this process renews.
    Lease(Lease),
}

/// Whether another process may have taken the lock over.
pub(crate) type Fence = Arc<dyn Fn() -> bool + Send + Sync>;

impl RunLock {
    /// The file in the run's directory that is locked.
    pub const FILE: &str = ".maxtext.lock";

    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    /// Another process holds the lock, or the directory is not writable; both are user errors.
    pub fn acquire(directory: &Path) -> Result<Self> {
        if mt_storage::is_remote(directory) {
            return Self::lease(directory);
        }
        let missing = directory.ancestors().take_while(|ancestor| !ancestor.exists());
        let created: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        if let Err(source) = disk::create_durably(directory) {
            remove(&created);
            return Err(CheckpointError::preparing(directory, source));
        }
        let path = directory.join(Self::FILE);
        let unwritable = |source| CheckpointError::preparing(directory, source);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(unwritable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                // The process id only helps the reader: without it the message is shorter.
                let process = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(CheckpointError::Locked {
                    directory: directory.to_owned(),
                    process,
                    machine: None,
                });
            }
            Err(TryLockError::Error(source)) => return Err(CheckpointError::io("lock", path, source)),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(unwritable)?;
        let mut lock =
            Self { directory: directory.to_owned(), created, is_provisional: false, held: Held::File(file) };
        // Another process may have created the directory meanwhile, and written to it.
        if !lock.holds_nothing_else() {
            lock.created.clear();
        }
        Ok(lock)
    }

    fn lease(directory: &Path) -> Result<Self> {
        let failed = |source| CheckpointError::preparing(directory, source);
        let was_empty = mt_storage::list(directory).map_err(failed)?.is_empty();
        match Lease::acquire(&directory.join(Self::FILE)).map_err(failed)? {
            Ok(lease) => {
                let created = if was_empty { vec![directory.to_owned()] } else { Vec::new() };
                let directory = directory.to_owned();
                Ok(Self { directory, created, is_provisional: false, held: Held::Lease(lease) })
            }
            Err(owner) => Err(CheckpointError::Locked {
                directory: directory.to_owned(),
                process: owner.process,
                machine: Some(owner.machine),
            }),
        }
    }

    /// Whether the lock may be lost, asked before a step is committed.
    pub(crate) fn fence(&self) -> Fence {
        match &self.held {
            Held::File(_) => Arc::new(|| false),
            Held::Lease(lease) => Arc::new(lease.watch()),
        }
    }

    /// Makes the lock provisional until [`RunLock::keep`]: dropping it removes the directory if acquiring it created one.
    pub fn provisional(mut self) -> Self {
        self.is_provisional = true;
        self
    }

    /// Marks the run as begun, so that its directory is kept.
    pub fn keep(&mut self) {
        self.is_provisional = false;
    }

    fn holds_nothing_else(&self) -> bool {
        std::fs::read_dir(&self.directory).is_ok_and(|entries| {
            entries.into_iter().all(|entry| entry.is_ok_and(|entry| entry.file_name() == Self::FILE))
        })
    }

    /// The locked directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        if let ([own], Held::Lease(lease), true) = (self.created.as_slice(), &self.held, self.is_provisional)
        {
            // Failures are ignored, as below.
            if !lease.is_lost() {
                let _ = mt_storage::remove_all(own, &[]);
            }
        } else if let ([own, ..], true) = (self.created.as_slice(), self.is_provisional) {
            // Every file in it was created under this lock. Failures are ignored, because the error that ended the run
            // is the one to report.
            let _ = std::fs::remove_dir_all(own);
            remove(&self.created);
        }
    }
}

/// Removes the empty ones of these directories, from the innermost outwards.
fn remove(directories: &[PathBuf]) {
    for directory in directories {
        let _ = std::fs::remove_dir(directory);
    }
}
