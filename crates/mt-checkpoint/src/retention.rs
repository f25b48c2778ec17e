//! The steps of a run that are kept.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use crate::{
    disk::{self, Disk},
    error::{CheckpointError, Result},
    locate,
    metadata::TEMPORARY_SUFFIX,
};

/// The file of losses in a checkpoints directory. Orbax ignores it.
const EVALUATIONS: &str = ".maxtext_evaluations.json";

/// Losses of evaluations by the step whose parameters were evaluated.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evaluations {
    pub losses: BTreeMap<u64, f64>,
}

impl Evaluations {
    /// Reads the losses that were recorded before. A record that is damaged is left out: steps are then kept by number.
    pub fn load(directory: &Path, disk: &Disk) -> Result<Self> {
        let partial = partial(directory);
        // Stores have no partial files.
        if partial.exists() {
            disk.remove_file(&partial)?;
        }
        let path = directory.join(EVALUATIONS);
        match mt_storage::read(&path) {
            Ok(contents) => {
                let losses: BTreeMap<u64, f64> = serde_json::from_slice(&contents).unwrap_or_default();
                Ok(Self { losses })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(CheckpointError::io("read", path, source)),
        }
    }

    /// Replaces the record.
    pub fn save(&self, directory: &Path, disk: &Disk) -> Result<()> {
        let contents = serde_json::to_vec(&self.losses).expect("finite numbers have a text");
        if mt_storage::is_remote(directory) {
            // An object is replaced at once.
            return disk.write(&directory.join(EVALUATIONS), &[&contents]);
        }
        let partial = partial(directory);
        if partial.exists() {
            disk.remove_file(&partial)?;
        }
        disk.write(&partial, &[&contents])?;
        disk.rename(&partial, &directory.join(EVALUATIONS))?;
        disk.sync_directory(directory)
    }
}

fn partial(directory: &Path) -> PathBuf {
    directory.join(format!("{EVALUATIONS}.partial"))
}

/// Rules for the steps that are kept when a step has been saved.
#[derive(Clone, Debug)]
pub(crate) struct Retention {
    pub max_to_keep: Option<usize>,
    pub keep_period: Option<u64>,
    pub keep_best: usize,
    pub aside: Option<PathBuf>,
    pub losses: BTreeMap<u64, f64>,
}

impl Retention {
    /// The steps to remove, oldest first. `saved` is the step just saved, which stays even if, after resuming from an
    /// older step, it is not the newest.
    fn old(&self, steps: &[u64], saved: u64) -> Vec<u64> {
        let Some(max_to_keep) = self.max_to_keep else { return Vec::new() };
        let num_old = steps.len().saturating_sub(max_to_keep.max(1));
        let mut best: Vec<(f64, u64)> =
            steps.iter().filter_map(|step| Some((*self.losses.get(step)?, *step))).collect();
        best.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        best.truncate(self.keep_best);
        let is_kept = |step: &u64| {
            *step == saved
                || self.keep_period.is_some_and(|period| step.is_multiple_of(period))
                || best.iter().any(|(_, other)| other == step)
        };
        steps[..num_old].iter().filter(|step| !is_kept(step)).copied().collect()
    }

    /// Whether steps are removed after `saved` was saved.
    pub fn removes_any(&self, directory: &Path, saved: u64) -> Result<bool> {
        Ok(!self.old(&locate::complete_steps(directory)?, saved).is_empty())
    }

    /// Deletes old steps, or moves them aside. A step is renamed first, so a half-deleted one is never read.
    pub fn delete_old(&self, disk: &Disk, directory: &Path, saved: u64) -> Result<Vec<u64>> {
        let steps = self.old(&locate::complete_steps(directory)?, saved);
        for step in &steps {
            let path = directory.join(step.to_string());
            if let Some(aside) = &self.aside {
                move_aside(disk, &path, aside, *step)?;
                disk.sync_directory(directory)?;
                continue;
            }
            remove_step(disk, &path, *step)?;
        }
        Ok(steps)
    }
}

/// Moves a step into a directory, which may be on another disk. An earlier step of the same number there is replaced.
fn move_aside(disk: &Disk, step_directory: &Path, aside: &Path, step: u64) -> Result<()> {
    disk::create_durably(aside).map_err(|source| CheckpointError::io("create directory", aside, source))?;
    let target = aside.join(step.to_string());
    if mt_storage::exists(&target) {
        disk.remove_directory(&target)?;
    }
    match disk.rename(step_directory, &target) {
        Err(CheckpointError::Io { source, .. }) if source.kind() == io::ErrorKind::CrossesDevices => {}
        moved => {
            moved?;
            return disk.sync_directory(aside);
        }
    }
    let partial = aside.join(format!("{step}{TEMPORARY_SUFFIX}"));
    if mt_storage::is_remote(aside) {
        copy(disk, step_directory, &target)?;
    } else {
        if partial.exists() {
            disk.remove_directory(&partial)?;
        }
        copy(disk, step_directory, &partial)?;
        disk.rename(&partial, &target)?;
    }
    disk.sync_directory(aside)?;
    remove_step(disk, step_directory, step)
}

/// Removes a step. On a disk it is renamed first, and in a store the object that completes it is removed first, so that a
/// step that is removed by half is not read.
fn remove_step(disk: &Disk, step_directory: &Path, step: u64) -> Result<()> {
    if mt_storage::is_remote(step_directory) {
        return disk.remove_directory(step_directory);
    }
    let doomed = step_directory.with_file_name(format!("{step}.delete{TEMPORARY_SUFFIX}"));
    disk.rename(step_directory, &doomed)?;
    if let Some(parent) = step_directory.parent() {
        disk.sync_directory(parent)?;
    }
    disk.remove_directory(&doomed)
}

/// Copies a directory, and flushes the copy.
fn copy(disk: &Disk, from: &Path, to: &Path) -> Result<()> {
    disk.create_directory(to)?;
    let files = disk::in_order_of_copying(from);
    for (file, _) in files.map_err(|source| CheckpointError::io("list", from, source))? {
        let target = to.join(&file);
        if let Some(parent) = target.parent().filter(|parent| *parent != to) {
            disk.create_directory(parent)?;
        }
        disk.copy_file(&from.join(&file), &target)?;
    }
    disk.sync_directories(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_kept_by_number_interval_and_evaluation() {
        let retention = |max_to_keep, keep_period, keep_best| Retention {
            max_to_keep,
            keep_period,
            keep_best,
            aside: None,
            losses: BTreeMap::from([(1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0), (6, 0.5)]),
        };
        let steps = [1, 2, 3, 4, 5, 6];
        for (rules, expected) in [
            (retention(None, None, 0), vec![]),
            (retention(Some(2), None, 0), vec![1, 2, 3, 4]),
            (retention(Some(2), Some(3), 0), vec![1, 2, 4]),
            // The older of two steps with equal losses is better.
            (retention(Some(2), None, 2), vec![1, 3, 4]),
            (retention(Some(1), Some(4), 1), vec![1, 2, 3, 5]),
            (retention(Some(9), None, 0), vec![]),
        ] {
            assert_eq!(rules.old(&steps, 6), expected, "{rules:?}");
        }
        assert_eq!(retention(Some(1), None, 0).old(&steps, 2), [1, 3, 4, 5]);
    }
}
