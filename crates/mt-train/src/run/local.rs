//! Checkpoints of a run on local storage, which a failure of the machine may lose.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use mt_checkpoint::{CheckpointManager, ManagerOptions, RunLock, complete_steps};

use crate::TrainError;

/// The number of local checkpoints that are kept, so that damage of the newest one loses little.
const KEPT: usize = 2;
/// The file in the run's directory and the one on local storage with the run's identity.
const IN_RUN: &str = ".maxtext.local";
const IN_LOCAL: &str = ".maxtext.run";

/// The local checkpoints of a run.
pub(crate) struct LocalCheckpoints {
    pub manager: CheckpointManager,
    /// The number of steps between them.
    pub period: u64,
    /// Whether one is due that is not saved yet.
    pub is_due: bool,
}

impl LocalCheckpoints {
    /// Opens the directory of the run on local storage.
    pub fn open(
        run: &Path,
        (directory, period): (PathBuf, u64),
        lock: &RunLock,
        options: &ManagerOptions,
    ) -> Result<Self, TrainError> {
        let checkpoints = directory.join("checkpoints");
        claim(run, &directory, !complete_steps(&checkpoints)?.is_empty())?;
        let options = ManagerOptions {
            max_to_keep: Some(KEPT),
            keep_period: None,
            keep_best: 0,
            aside: None,
            ..options.clone()
        };
        let manager = CheckpointManager::open(checkpoints, lock, options)?;
        Ok(Self { manager, period, is_due: false })
    }
}

/// Refuses checkpoints on local storage that belong to another run of the same name, such as one whose directory was
/// deleted. A run would otherwise continue from them.
fn claim(run: &Path, local: &Path, has_checkpoints: bool) -> Result<(), TrainError> {
    let read = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TrainError::io("read", path)(error)),
    };
    let (own, theirs) = (read(run.join(IN_RUN))?, read(local.join(IN_LOCAL))?);
    if own.is_some() && own == theirs {
        return Ok(());
    }
    if has_checkpoints {
        return Err(TrainError::ResumeConflict(format!(
            "`{}` holds checkpoints of another run of this name\n\
             hint: remove them, or choose another `run_name` or `local_checkpoint_directory`",
            local.display()
        )));
    }
    let identity = own.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        format!("{:x}-{:x}\n", now.as_nanos(), std::process::id())
    });
    let write = |path: PathBuf| fs::write(&path, &identity).map_err(TrainError::io("write", path));
    fs::create_dir_all(local).map_err(TrainError::io("create", local))?;
    write(local.join(IN_LOCAL))?;
    write(run.join(IN_RUN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_checkpoints_belong_to_one_run() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| {
            let path = directory.path().join(name);
            fs::create_dir_all(&path).unwrap();
            path
        };
        let (run, other, local) = (path("run"), path("other"), path("local"));
        claim(&run, &local, false).unwrap();
        claim(&run, &local, true).unwrap();
        let error = claim(&other, &local, true).unwrap_err().to_string();
        assert!(error.contains("of another run of this name"), "{error}");
        // Without checkpoints another run may take the directory over.
        claim(&other, &local, false).unwrap();
        assert!(claim(&run, &local, true).is_err());
        // A lost disk is claimed again by the same run.
        fs::remove_dir_all(&local).unwrap();
        claim(&run, &local, false).unwrap();
        claim(&run, &local, true).unwrap();
    }
}
