//! The checkpoints of a run: saving in the background, committing, and deleting old ones.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    disk::{self, Disk, DiskHook},
    error::{CheckpointError, Result},
    locate,
    lock::RunLock,
    metadata::{self, STATE_ITEM, SUCCESS_FILE, TEMPORARY_SUFFIX},
    plan::{self, PlannedItem},
    save::{CommitGate, JsonItem, SaveRequest, StepWriter},
    zarr::StorageFormat,
};

/// Options for saving and keeping checkpoints.
#[derive(Clone)]
pub struct ManagerOptions {
    /// The number of steps to keep; the oldest are deleted first. `None` keeps all.
    pub max_to_keep: Option<usize>,
    /// Write in the background.
    pub asynchronous: bool,
    /// Threads that compress and write arrays.
    pub threads: usize,
    /// The format of saved arrays. Steps of one run may have different formats.
    pub format: StorageFormat,
    /// Called before each disk change, for fault tests.
    pub disk_hook: Option<DiskHook>,
}

impl Default for ManagerOptions {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            max_to_keep: None,
            asynchronous: true,
            threads: processors.min(4),
            format: StorageFormat::default(),
            disk_hook: None,
        }
    }
}

/// Report on a saved step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveReport {
    pub step: u64,
    /// The committed directory.
    pub path: PathBuf,
    /// Bytes of all files.
    pub bytes: u64,
    /// Time from the request to the commit.
    pub duration: Duration,
    /// Older steps deleted afterwards.
    pub deleted: Vec<u64>,
}

/// Saves the steps of one run into its checkpoints directory.
///
/// Dropping the manager abandons a save in progress; call [`Self::wait_until_finished`] first.
pub struct CheckpointManager {
    directory: PathBuf,
    disk: Disk,
    options: ManagerOptions,
    in_flight: Option<(u64, JoinHandle<Result<SaveReport>>)>,
    cancelled: Arc<AtomicBool>,
}

impl CheckpointManager {
    /// Creates the directory if it is missing and removes leftovers of interrupted saves and deletions. The lock proves
    /// that no other process is using the run.
    ///
    /// # Errors
    /// The directory is not writable: a user error.
    pub fn open(directory: impl Into<PathBuf>, _lock: &RunLock, options: ManagerOptions) -> Result<Self> {
        let directory = directory.into();
        let disk = Disk { hook: options.disk_hook.clone() };
        let unwritable = |source| CheckpointError::preparing(&directory, source);
        disk::create_durably(&directory).map_err(unwritable)?;
        for entry in std::fs::read_dir(&directory).map_err(unwritable)? {
            let entry = entry.map_err(unwritable)?;
            let is_leftover = entry.file_name().to_string_lossy().ends_with(TEMPORARY_SUFFIX);
            if is_leftover && entry.file_type().map_err(unwritable)?.is_dir() {
                disk.remove_directory(&entry.path())?;
            }
        }
        // Detects an unwritable directory now, not after an hour of training.
        let probe = directory.join(format!("probe{TEMPORARY_SUFFIX}"));
        std::fs::create_dir(&probe).and_then(|()| std::fs::remove_dir(&probe)).map_err(unwritable)?;
        Ok(Self { directory, disk, options, in_flight: None, cancelled: Arc::default() })
    }

    /// The checkpoints directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The complete steps, oldest first, without a save in progress.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        locate::complete_steps(&self.directory)
    }

    /// The newest complete step.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn latest(&self) -> Result<Option<u64>> {
        Ok(self.steps()?.last().copied())
    }

    /// Waits for the save in progress, starts saving this step, and returns the report of the earlier save. Without
    /// `asynchronous` it saves this step and returns its report.
    ///
    /// # Errors
    /// The save in progress failed (this one then does not start), the request is invalid, or the step exists.
    pub fn save(&mut self, step: u64, request: SaveRequest) -> Result<Option<SaveReport>> {
        let previous = self.wait_until_finished()?;
        let destination = self.directory.join(step.to_string());
        if destination.exists() {
            return Err(CheckpointError::StepExists { directory: self.directory.clone(), step });
        }
        let SaveRequest { entries, extra_items, json, custom_metadata, commit_gate, fetch_first } = request;
        for JsonItem { item, file, .. } in &json {
            if !metadata::is_plain(item)
                || !metadata::is_plain(file)
                || item == STATE_ITEM
                || file == SUCCESS_FILE
            {
                let name = format!("{item}/{file}");
                return Err(CheckpointError::InvalidEntry {
                    name,
                    reason: "its name is not free".to_owned(),
                });
            }
        }
        let mut planned = plan::plan(entries, extra_items, &self.options.format)?;
        let started = Instant::now();
        if fetch_first {
            plan::fetch_all(step, &mut planned)?;
        }
        let job = Job {
            disk: self.disk.clone(),
            directory: self.directory.clone(),
            destination,
            step,
            threads: self.options.threads.max(1),
            format: self.options.format,
            max_to_keep: self.options.max_to_keep,
            cancelled: Arc::clone(&self.cancelled),
            started,
        };
        let save = move || job.run(planned, &json, &custom_metadata, commit_gate);
        if !self.options.asynchronous {
            return save().map(Some);
        }
        let thread = std::thread::Builder::new()
            .name(format!("checkpoint {step}"))
            .spawn(save)
            .map_err(|source| CheckpointError::io("start a thread to write", &self.directory, source))?;
        self.in_flight = Some((step, thread));
        Ok(previous)
    }

    /// The report of the save in progress if it has ended. Does not wait.
    ///
    /// # Errors
    /// The save failed.
    pub fn poll(&mut self) -> Result<Option<SaveReport>> {
        match &self.in_flight {
            Some((_, thread)) if thread.is_finished() => self.wait_until_finished(),
            _ => Ok(None),
        }
    }

    /// Waits for the save in progress and returns its report.
    ///
    /// # Errors
    /// The save failed.
    pub fn wait_until_finished(&mut self) -> Result<Option<SaveReport>> {
        let Some((step, thread)) = self.in_flight.take() else { return Ok(None) };
        thread.join().unwrap_or(Err(CheckpointError::WriterPanicked { step })).map(Some)
    }

    /// Renames a damaged step to `{step}.damaged`, so that it no longer counts and can be saved again. Returns the new
    /// path. Replaces an earlier directory of that name.
    ///
    /// # Errors
    /// The directory cannot be renamed.
    pub fn set_aside(&self, step: u64) -> Result<PathBuf> {
        let aside = self.directory.join(format!("{step}.damaged"));
        if aside.exists() {
            self.disk.remove_directory(&aside)?;
        }
        self.disk.rename(&self.directory.join(step.to_string()), &aside)?;
        self.disk.sync_directory(&self.directory)?;
        Ok(aside)
    }
}

impl Drop for CheckpointManager {
    fn drop(&mut self) {
        // Joining could deadlock: a commit gate may itself wait for the owner of this manager.
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

struct Job {
    disk: Disk,
    directory: PathBuf,
    destination: PathBuf,
    step: u64,
    threads: usize,
    format: StorageFormat,
    max_to_keep: Option<usize>,
    cancelled: Arc<AtomicBool>,
    started: Instant,
}

impl Job {
    fn run(
        self,
        items: Vec<PlannedItem>,
        json: &[JsonItem],
        custom_metadata: &serde_json::Map<String, serde_json::Value>,
        gate: Option<CommitGate>,
    ) -> Result<SaveReport> {
        let temporary = self.directory.join(format!("{}{TEMPORARY_SUFFIX}", self.step));
        let commit = || -> Result<u64> {
            if temporary.exists() {
                self.disk.remove_directory(&temporary)?;
            }
            let writer = StepWriter {
                disk: &self.disk,
                step: self.step,
                temporary: &temporary,
                destination: &self.destination,
                threads: self.threads,
                format: &self.format,
                cancelled: &self.cancelled,
            };
            let written = writer.write(items, json, custom_metadata)?;
            gate.map_or(Ok(()), |gate| gate())
                .map_err(|source| CheckpointError::Refused { step: self.step, source })?;
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(CheckpointError::Cancelled { step: self.step });
            }
            self.disk.rename(&temporary, &self.destination)?;
            Ok(written.bytes)
        };
        let bytes = commit().map_err(|error| {
            // The first error is reported. The next run removes leftovers that cannot be removed now.
            let _ = std::fs::remove_dir_all(&temporary);
            let has_others = locate::complete_steps(&self.directory).is_ok_and(|steps| steps.len() > 1);
            error.of_save(self.step, has_others && self.max_to_keep != Some(1))
        })?;
        self.disk.sync_directory(&self.directory)?;
        let duration = self.started.elapsed();
        let deleted = self.delete_old()?;
        Ok(SaveReport { step: self.step, path: self.destination, bytes, duration, deleted })
    }

    /// Deletes all but the newest steps. A step is renamed first, so a half-deleted one is never read.
    fn delete_old(&self) -> Result<Vec<u64>> {
        let Some(max_to_keep) = self.max_to_keep else { return Ok(Vec::new()) };
        let mut steps = locate::complete_steps(&self.directory)?;
        let num_old = steps.len().saturating_sub(max_to_keep.max(1));
        steps.truncate(num_old);
        // The step just saved stays even if, after resuming from an older step, it is not the newest.
        steps.retain(|&step| step != self.step);
        for step in &steps {
            let doomed = self.directory.join(format!("{step}.delete{TEMPORARY_SUFFIX}"));
            self.disk.rename(&self.directory.join(step.to_string()), &doomed)?;
            self.disk.sync_directory(&self.directory)?;
            self.disk.remove_directory(&doomed)?;
        }
        Ok(steps)
    }
}
