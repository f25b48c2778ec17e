//! The identity of weights that a run uses and does not save.

use std::path::{Path, PathBuf};

use mt_checkpoint::{Checkpoint, SkippedStep, checkpoints_directory, fingerprint, open_latest};
use serde_json::{Value, json};

use crate::{
    StateError,
    hugging_face::{is_hugging_face, is_peft},
};

/// Weights that a run uses and does not save, as its checkpoints record them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsOrigin {
    /// Weights in files.
    Saved {
        /// The directory of a published model, of a PEFT adapter, or of one checkpoint.
        path: PathBuf,
        /// A checksum of its files.
        fingerprint: String,
    },
    /// Initial values, drawn from a seed.
    Drawn { seed: u64 },
}

impl WeightsOrigin {
    /// The weights at a path: a published model, adapters, a checkpoint, or the newest undamaged step of a run, with newer
    /// steps that are damaged. All files are read for the checksum.
    ///
    /// # Errors
    /// The files cannot be read.
    pub fn at(path: &Path) -> Result<(Self, Vec<SkippedStep>), StateError> {
        if is_hugging_face(path) || is_peft(path) {
            return Ok((Self::of_directory(path)?, Vec::new()));
        }
        let newest = match checkpoints_directory(path)? {
            Some(directory) => open_latest(&directory)?.map(|latest| latest.value),
            None => None,
        };
        let newest = newest.map_or_else(|| Checkpoint::open_path(path), Ok)?;
        Ok((Self::of_directory(newest.path())?, newest.skipped().to_vec()))
    }

    /// The weights in the directory of a published model, of adapters or of one checkpoint.
    pub(super) fn of_directory(path: &Path) -> Result<Self, StateError> {
        Ok(Self::Saved { path: located(&mt_storage::origin(path)), fingerprint: fingerprint(path)? })
    }

    /// The directory of saved weights.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Saved { path, .. } => Some(path),
            Self::Drawn { .. } => None,
        }
    }

    /// Whether both are the same weights, wherever they are.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Saved { fingerprint: one, .. }, Self::Saved { fingerprint: other, .. }) => one == other,
            (one, other) => one == other,
        }
    }

    /// Finds recorded weights again, for the purpose `what`: where they were, at the same step, even if the run that saved
    /// them has gone on; or, if nothing is there any more, at `named`, the path that keys name now.
    ///
    /// # Errors
    /// The weights have changed or are gone.
    pub fn find_again(&self, named: Option<&Path>, what: &'static str) -> Result<Self, StateError> {
        let Self::Saved { path, .. } = self else { return Ok(self.clone()) };
        let other = |now: String| StateError::OtherOrigin { what, before: self.to_string(), now };
        let here = here(path);
        let (now, is_there) = match (mt_storage::exists(&here), named) {
            (true, _) => (Self::of_directory(&here)?, true),
            (false, Some(named)) if mt_storage::exists(named) && located(named) != *path => {
                (Self::at(named)?.0, false)
            }
            (false, _) => return Err(other("nothing is there any more".to_owned())),
        };
        match (self.is_same(&now), is_there) {
            (true, _) => Ok(now),
            (false, true) => Err(other(format!("now there is {now}"))),
            (false, false) => Err(other(format!("nothing is there any more, and keys name {now}"))),
        }
    }

    /// The record in a checkpoint's metadata.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Saved { path, fingerprint } => json!({ "path": path, "fingerprint": fingerprint }),
            Self::Drawn { seed } => json!({ "seed": seed }),
        }
    }

    /// Reads a record; `None` if it is not one.
    pub fn from_json(recorded: &Value) -> Option<Self> {
        if let Some(seed) = recorded.get("seed").and_then(Value::as_u64) {
            return Some(Self::Drawn { seed });
        }
        let text = |name: &str| Some(recorded.get(name)?.as_str()?.to_owned());
        Some(Self::Saved { path: text("path")?.into(), fingerprint: text("fingerprint")? })
    }
}

impl std::fmt::Display for WeightsOrigin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Saved { path, fingerprint } => write!(f, "`{}` (checksum {fingerprint})", path.display()),
            Self::Drawn { seed } => write!(f, "drawn from `init_weights_seed={seed}`"),
        }
    }
}

/// The path from which recorded weights are read: of a remote model, that of its copy.
pub(super) fn here(path: &Path) -> PathBuf {
    mt_storage::input(path).unwrap_or_else(|_| path.to_owned())
}

/// The absolute path without links, or as far as it is known.
fn located(path: &Path) -> PathBuf {
    if mt_storage::is_remote(path) || mt_storage::is_hub(path) {
        return path.to_owned();
    }
    let absolute = || std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    std::fs::canonicalize(path).unwrap_or_else(|_| absolute())
}
