//! A run whose directory is in an object store: its small files are written on this machine and sent from time to time.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use mt_storage::Mirror;

use crate::TrainError;

/// The time between two transfers of files that have changed.
const PERIOD: Duration = Duration::from_secs(30);

/// Sends the files of a run.
#[derive(Clone)]
pub(crate) struct Sender {
    remote: PathBuf,
    mirror: Arc<Mutex<Mirror>>,
}

/// The directory of a run in an object store. Dropping it sends the files a last time.
pub(crate) struct StoredRun {
    sender: Sender,
    ends: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    /// Sends the files that have changed.
    pub fn send(&self) -> Result<(), TrainError> {
        let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        mirror.push().map_err(TrainError::io("write", &self.remote))
    }
}

impl StoredRun {
    /// Copies the small files of the run to this machine, if its directory is in an object store.
    pub fn open(directory: &Path) -> Result<Option<Self>, TrainError> {
        if !mt_storage::is_remote(directory) {
            return Ok(None);
        }
        let mirror = Mirror::pull(directory).map_err(TrainError::io("read", directory))?;
        let sender = Sender { remote: directory.to_owned(), mirror: Arc::new(Mutex::new(mirror)) };
        Ok(Some(Self { sender, ends: Arc::default(), thread: None }))
    }

    /// Sends files that change from now on, every now and then.
    pub fn begin(&mut self) -> Result<(), TrainError> {
        self.sender.send()?;
        let (sender, ends) = (self.sender.clone(), Arc::clone(&self.ends));
        let send = move || {
            let (has_ended, wakes) = &*ends;
            let mut ended = has_ended.lock().unwrap_or_else(PoisonError::into_inner);
            while !*ended {
                ended = wakes.wait_timeout(ended, PERIOD).unwrap_or_else(PoisonError::into_inner).0;
                if !*ended {
                    // The next transfer sends what this one could not, and a checkpoint's commit reports it.
                    let _ = sender.send();
                }
            }
        };
        let thread = std::thread::Builder::new().name("files of the run".to_owned()).spawn(send);
        self.thread = Some(thread.map_err(TrainError::io("start a thread for", &self.sender.remote))?);
        Ok(())
    }

    /// The sender of files before a checkpoint is committed.
    pub fn sender(&self) -> Sender {
        self.sender.clone()
    }
}

impl Drop for StoredRun {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        *self.ends.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ends.1.notify_all();
        let _ = thread.join();
        // A run that ends well has sent its files before, with an error if that failed.
        let _ = self.sender.send();
    }
}
