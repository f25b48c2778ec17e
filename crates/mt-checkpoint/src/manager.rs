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
    lock::{Fence, RunLock},
    metadata::{self, STATE_ITEM, SUCCESS_FILE, TEMPORARY_SUFFIX},
    plan::{self, PlannedItem},
    read::Checkpoint,
    remote,
    retention::{Evaluations, Retention},
    save::{CommitGate, JsonItem, SaveRequest, StepWriter},
    zarr::StorageFormat,
};

/// Options for saving and keeping checkpoints.
#[derive(Clone)]
pub struct ManagerOptions {
    /// The number of steps to keep; the oldest are deleted first. `None` keeps all.
    pub max_to_keep: Option<usize>,
    /// Steps that are multiples of this number are kept in addition.
    pub keep_period: Option<u64>,
    /// The number of steps with the best evaluations that are kept in addition.
    pub keep_best: usize,
    /// The directory that steps are moved to instead of being deleted.
    pub aside: Option<PathBuf>,
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
            keep_period: None,
            keep_best: 0,
            aside: None,
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
    /// Older steps that were deleted, or moved aside, afterwards.
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
    fence: Fence,
    cancelled: Arc<AtomicBool>,
    evaluations: Evaluations,
}

impl CheckpointManager {
    /// Creates the directory if it is missing and removes leftovers of interrupted saves and deletions. The lock proves
    /// that no other process is using the run.
    ///
    /// # Errors
    /// The directory is not writable: a user error.
    pub fn open(directory: impl Into<PathBuf>, lock: &RunLock, options: ManagerOptions) -> Result<Self> {
        let directory = directory.into();
        let uploads = mt_storage::is_remote(&directory).then(|| directory.join(remote::UPLOADS));
        let disk = Disk { hook: options.disk_hook.clone(), uploads };
        match &disk.uploads {
            Some(_) => remote::prepare(&directory, &disk)?,
            None => Self::prepare(&directory, &disk)?,
        }
        let evaluations = match options.keep_best {
            0 => Evaluations::default(),
            _ => Evaluations::load(&directory, &disk)?,
        };
        let fence = lock.fence();
        Ok(Self { directory, disk, options, in_flight: None, fence, cancelled: Arc::default(), evaluations })
    }

    /// Creates the directory, removes leftovers, and tries to write.
    fn prepare(directory: &Path, disk: &Disk) -> Result<()> {
        let unwritable = |source| CheckpointError::preparing(directory, source);
        disk::create_durably(directory).map_err(unwritable)?;
        for entry in std::fs::read_dir(directory).map_err(unwritable)? {
            let entry = entry.map_err(unwritable)?;
            let is_leftover = entry.file_name().to_string_lossy().ends_with(TEMPORARY_SUFFIX);
            if is_leftover && entry.file_type().map_err(unwritable)?.is_dir() {
                disk.remove_directory(&entry.path())?;
            }
        }
        // Detects an unwritable directory now, not after an hour of training.
        let probe = directory.join(format!("probe{TEMPORARY_SUFFIX}"));
        std::fs::create_dir(&probe).and_then(|()| std::fs::remove_dir(&probe)).map_err(unwritable)
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
        if locate::is_complete(&destination) {
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
            retention: self.retention(),
            fence: self.fence.clone(),
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

    /// Whether no save is in progress. [`Self::poll`] ends one that is complete.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_none()
    }

    /// Writes further steps in the background, whatever the options say.
    pub fn set_asynchronous(&mut self) {
        self.options.asynchronous = true;
    }

    /// As [`Self::wait_until_finished`], but gives up the save in progress at `deadline`. Its files are removed, here or by
    /// the next run.
    ///
    /// # Errors
    /// The save failed, or was given up: [`CheckpointError::Cancelled`].
    pub fn wait_until(&mut self, deadline: Instant) -> Result<Option<SaveReport>> {
        // The writer notices that it is cancelled before each piece that it writes.
        const TICK: Duration = Duration::from_millis(5);
        while let Some((_, thread)) = &self.in_flight
            && !thread.is_finished()
            && Instant::now() < deadline
        {
            std::thread::sleep(TICK);
        }
        match &self.in_flight {
            Some((step, thread)) if !thread.is_finished() => {
                let step = *step;
                self.cancelled.store(true, Ordering::Relaxed);
                self.in_flight = None;
                Err(CheckpointError::Cancelled { step })
            }
            _ => self.wait_until_finished(),
        }
    }

    /// Records the loss of an evaluation of the parameters after a step. The steps with the lowest losses are kept.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn record_evaluation(&mut self, step: u64, loss: f64) -> Result<()> {
        if self.options.keep_best == 0 || !loss.is_finite() {
            return Ok(());
        }
        self.evaluations.losses.insert(step, loss);
        self.evaluations.save(&self.directory, &self.disk)
    }

    /// Whether a step with this loss would be kept as one of the best.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn is_among_best(&self, loss: f64) -> Result<bool> {
        let steps = self.steps()?;
        let is_better = |step: &&u64| self.evaluations.losses.get(step).is_some_and(|other| *other <= loss);
        let better = steps.iter().filter(is_better);
        Ok(loss.is_finite() && better.count() < self.options.keep_best)
    }

    fn retention(&self) -> Retention {
        let ManagerOptions { max_to_keep, keep_period, keep_best, aside, .. } = self.options.clone();
        Retention { max_to_keep, keep_period, keep_best, aside, losses: self.evaluations.losses.clone() }
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
        if mt_storage::exists(&aside) {
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
    retention: Retention,
    fence: Fence,
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
        // Objects cannot be renamed, so that a step in a store has its name from the start.
        let is_remote = mt_storage::is_remote(&self.directory);
        let temporary = match is_remote {
            true => self.destination.clone(),
            false => self.directory.join(format!("{}{TEMPORARY_SUFFIX}", self.step)),
        };
        let commit = || -> Result<u64> {
            if mt_storage::exists(&temporary) {
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
            match is_remote {
                true => remote::commit(&self.disk, &self.directory, &self.destination, &self.fence)?,
                false => self.disk.rename(&temporary, &self.destination)?,
            }
            Ok(written.bytes)
        };
        let bytes = commit().map_err(|error| {
            // The first error is reported. The next run removes leftovers that cannot be removed now.
            // A step that another process committed in the meantime is not ours to remove.
            if !is_remote || !(self.fence)() && !locate::is_complete(&temporary) {
                let _ = remote::clean_up(&self.disk, &temporary);
            }
            let has_others = locate::complete_steps(&self.directory).is_ok_and(|steps| steps.len() > 1);
            error.of_save(self.step, has_others && self.retention.max_to_keep != Some(1))
        })?;
        self.disk.sync_directory(&self.directory)?;
        let duration = self.started.elapsed();
        // A disk that lost writes without an error shows it here, before older steps are given up.
        if self.retention.removes_any(&self.directory, self.step)? {
            Checkpoint::open(&self.directory, self.step)?;
        }
        let deleted = self.retention.delete_old(&self.disk, &self.directory, self.step)?;
        Ok(SaveReport { step: self.step, path: self.destination, bytes, duration, deleted })
    }
}
