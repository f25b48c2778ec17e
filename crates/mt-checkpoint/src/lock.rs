//! One run per directory.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
};

use crate::{
    disk,
    error::{CheckpointError, Result},
};

const LOCK_FILE: &str = ".maxtext.lock";

/// Exclusive use of a run's directory, until it is dropped or the process ends for any reason.
#[derive(Debug)]
pub struct RunLock {
    directory: PathBuf,
    // The operating system holds the lock while this handle is open.
    _file: File,
}

impl RunLock {
    /// Creates the directory if it is missing, and locks it.
    ///
    /// # Errors
    /// Another process holds the lock, or the directory is not writable; both are user errors.
    pub fn acquire(directory: &Path) -> Result<Self> {
        disk::create_durably(directory).map_err(|source| CheckpointError::preparing(directory, source))?;
        let path = directory.join(LOCK_FILE);
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
                return Err(CheckpointError::Locked { directory: directory.to_owned(), process });
            }
            Err(TryLockError::Error(source)) => return Err(CheckpointError::io("lock", path, source)),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(unwritable)?;
        Ok(Self { directory: directory.to_owned(), _file: file })
    }

    /// The locked directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}
