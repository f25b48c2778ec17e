//! The parameters of models with adapters, which come from two sources: the frozen base and the adapters.

use std::path::{Path, PathBuf};

use mt_checkpoint::{Checkpoint, checkpoints_directory, fingerprint, open_latest};
use mt_runtime::{Array, Runtime};
use mt_shape::Placement;
use serde_json::{Value, json};

use super::{
    ArrayUse, SavedParameters, StateArray, StateReader, reader::check_adapters, saved::LoadedParameters,
};
use crate::{
    Model, StateError,
    hugging_face::{Weights, is_hugging_face, is_peft},
};

/// The key of the base in the metadata of checkpoints that hold adapters alone.
const KEY: &str = "adapter_base";

/// The base of adapters, as their checkpoints record it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterBase {
    /// Weights in files.
    Saved {
        /// The directory of a published model, or of a checkpoint.
        path: PathBuf,
        /// A checksum of its files.
        fingerprint: String,
    },
    /// Initial values, drawn from a seed.
    Drawn { seed: u64 },
}

impl AdapterBase {
    /// The base at a path: a published model, a checkpoint, or the newest undamaged step of a run.
    ///
    /// # Errors
    /// The files cannot be read.
    pub fn at(path: &Path) -> Result<Self, StateError> {
        let path = if is_hugging_face(path) {
            path.to_owned()
        } else {
            let newest = match checkpoints_directory(path)? {
                Some(directory) => open_latest(&directory)?.map(|latest| latest.value),
                None => None,
            };
            let checkpoint = newest.map_or_else(|| Checkpoint::open_path(path), Ok)?;
            checkpoint.path().to_owned()
        };
        let path = std::path::absolute(&path).unwrap_or(path);
        Ok(Self::Saved { fingerprint: fingerprint(&path)?, path })
    }

    /// The base that a checkpoint records; `None` if it holds whole models.
    pub fn of(checkpoint: &Checkpoint) -> Option<Self> {
        let recorded = checkpoint.custom_metadata().get(KEY)?;
        if let Some(seed) = recorded.get("seed").and_then(Value::as_u64) {
            return Some(Self::Drawn { seed });
        }
        let text = |name: &str| recorded.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        Some(Self::Saved { path: text("path").into(), fingerprint: text("fingerprint") })
    }

    /// Records the base in the metadata of a checkpoint.
    pub fn record(&self, metadata: &mut Value) {
        metadata[KEY] = match self {
            Self::Saved { path, fingerprint } => json!({ "path": path, "fingerprint": fingerprint }),
            Self::Drawn { seed } => json!({ "seed": seed }),
        };
    }

    /// Checks that adapters in `adapters`, which were trained on this base, are used with the base `now`.
    ///
    /// # Errors
    /// The bases differ.
    pub fn check(&self, now: &Self, adapters: &Path) -> Result<(), StateError> {
        let is_same = match (self, now) {
            (Self::Saved { fingerprint: one, .. }, Self::Saved { fingerprint: other, .. }) => one == other,
            (one, other) => one == other,
        };
        if is_same {
            return Ok(());
        }
        let adapters = adapters.to_owned();
        Err(StateError::OtherBase { adapters, before: self.to_string(), now: now.to_string() })
    }
}

impl std::fmt::Display for AdapterBase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Saved { path, fingerprint } => write!(f, "`{}` (checksum {fingerprint})", path.display()),
            Self::Drawn { seed } => write!(f, "drawn from `init_weights_seed={seed}`"),
        }
    }
}

/// The sources of a model with adapters, compared with the model. Nothing has been read.
pub struct AdaptedParameters {
    base_model: Box<dyn Model>,
    saved_base: SavedParameters,
    /// Whether the model has the head of its base.
    keeps_head: bool,
    /// The base, as checkpoints of the adapters record it.
    pub base: AdapterBase,
    adapters: Option<SavedAdapters>,
}

enum SavedAdapters {
    Peft(Weights),
    Checkpoint(Checkpoint),
}

impl AdaptedParameters {
    /// Opens the base at `path`, or the base of the run with adapters at `path`, and adapters at `adapters`: a PEFT
    /// directory, or a run with adapters.
    ///
    /// # Errors
    /// Nothing is saved there, names or shapes differ from the model's, or adapters have another base.
    ///
    /// # Panics
    /// The model has no adapters.
    pub fn open(model: &dyn Model, path: &Path, adapters: Option<&Path>) -> Result<Self, StateError> {
        let base_model = model.without_adapters().expect("the model has adapters");
        // The head of a reward model is trained beside the adapters.
        let base_model = base_model.language_model().unwrap_or(base_model);
        let of_path = adapter_checkpoint(path)?;
        let base = match &of_path {
            None => AdapterBase::at(path)?,
            Some((_, recorded @ AdapterBase::Saved { path: base, .. })) => {
                if !base.exists() {
                    return Err(StateError::NoBase { adapters: path.to_owned(), base: base.clone() });
                }
                let now = AdapterBase::at(base)?;
                recorded.check(&now, path)?;
                now
            }
            Some((_, AdapterBase::Drawn { seed })) => {
                return Err(StateError::DrawnBase { adapters: path.to_owned(), seed: *seed });
            }
        };
        let AdapterBase::Saved { path: base_path, .. } = &base else {
            unreachable!("a drawn base is refused")
        };
        let saved_base = SavedParameters::open(&*base_model, base_path)?;
        let adapters = match (adapters, of_path) {
            (Some(adapters), _) => Some(SavedAdapters::open(model, adapters, &base)?),
            (None, Some((checkpoint, _))) => {
                check_adapters(model, &checkpoint)?;
                Some(SavedAdapters::Checkpoint(checkpoint))
            }
            (None, None) => None,
        };
        let keeps_head = model.language_model().is_none();
        Ok(Self { base_model, saved_base, keeps_head, base, adapters })
    }

    /// Whether adapters are saved, too.
    pub fn has_adapters(&self) -> bool {
        self.adapters.is_some()
    }

    /// Reads the parameters of the base onto the devices, in order, each shard onto its device.
    ///
    /// # Errors
    /// Files are damaged or cannot be read.
    pub fn load_base(&self, runtime: &Runtime, placement: &Placement) -> Result<Vec<Array>, StateError> {
        let arrays = self.saved_base.load(&*self.base_model, runtime, placement, ArrayUse::Read)?.arrays;
        let paths = self.base_model.parameters().into_iter().map(|(path, _)| path.to_string());
        let is_needed = |path: &str| !path.starts_with("head.") || self.keeps_head;
        Ok(arrays.into_iter().zip(paths).filter(|(_, path)| is_needed(path)).map(|(array, _)| array).collect())
    }

    /// Reads the adapters onto the devices, in order; `None` if none are saved.
    ///
    /// # Errors
    /// As [`Self::load_base`].
    pub fn load_adapters(
        &self,
        model: &dyn Model,
        runtime: &Runtime,
        placement: &Placement,
    ) -> Result<Option<Vec<Array>>, StateError> {
        Ok(match &self.adapters {
            None => None,
            Some(SavedAdapters::Peft(weights)) => Some(weights.load(runtime, placement, model, None)?),
            Some(SavedAdapters::Checkpoint(checkpoint)) => {
                Some(load_adapters(model, checkpoint, runtime, placement)?)
            }
        })
    }

    /// All parameters of the model in order.
    pub(super) fn load(
        &self,
        model: &dyn Model,
        runtime: &Runtime,
        placement: &Placement,
    ) -> Result<LoadedParameters, StateError> {
        let base = self.load_base(runtime, placement)?;
        let adapters = self.load_adapters(model, runtime, placement)?.unwrap_or_default();
        let arrays = with_adapters(model, base, adapters);
        let (step, path) = match (&self.adapters, &self.base) {
            (Some(SavedAdapters::Checkpoint(checkpoint)), _) => {
                (checkpoint.step(), checkpoint.path().to_owned())
            }
            (_, AdapterBase::Saved { path, .. }) => (None, path.clone()),
            (_, AdapterBase::Drawn { .. }) => unreachable!("a drawn base is refused"),
        };
        Ok(LoadedParameters { arrays, step, path, skipped: Vec::new() })
    }
}

impl SavedAdapters {
    fn open(model: &dyn Model, path: &Path, base: &AdapterBase) -> Result<Self, StateError> {
        if is_peft(path) {
            return Ok(Self::Peft(Weights::open_adapters(model, path)?));
        }
        let Some((checkpoint, recorded)) = adapter_checkpoint(path)? else {
            return Err(StateError::NoAdapters { path: path.to_owned() });
        };
        recorded.check(base, path)?;
        check_adapters(model, &checkpoint)?;
        Ok(Self::Checkpoint(checkpoint))
    }
}

/// The newest undamaged checkpoint at a path, with the base of its adapters; `None` if it holds whole models.
pub(super) fn adapter_checkpoint(path: &Path) -> Result<Option<(Checkpoint, AdapterBase)>, StateError> {
    if is_hugging_face(path) || is_peft(path) {
        return Ok(None);
    }
    let newest = Checkpoint::open_path(path);
    let is_adapted = newest.as_ref().is_ok_and(|checkpoint| AdapterBase::of(checkpoint).is_some());
    let newest = match checkpoints_directory(path)?.filter(|_| newest.is_err() || is_adapted) {
        // Adapters are small, so that all their bytes are checked at once.
        Some(directory) => open_latest(&directory)?.map(|latest| latest.value),
        None => Some(newest?),
    };
    Ok(newest.and_then(|checkpoint| {
        let base = AdapterBase::of(&checkpoint)?;
        Some((checkpoint, base))
    }))
}

fn load_adapters(
    model: &dyn Model,
    checkpoint: &Checkpoint,
    runtime: &Runtime,
    placement: &Placement,
) -> Result<Vec<Array>, StateError> {
    let other = model.otherwise_scanned().map(|other| adapter_arrays(&*other));
    let reader = StateReader::open(runtime, placement, checkpoint)?;
    reader.read_all(&adapter_arrays(model), other.as_deref(), |_, array| Ok(array))
}

/// The arrays of a model's adapters in checkpoints.
pub(super) fn adapter_arrays(model: &dyn Model) -> Vec<StateArray> {
    let arrays = StateArray::parameters(model).into_iter().zip(model.parameters());
    arrays.filter(|(_, (_, spec))| spec.adapter.is_some()).map(|(array, _)| array).collect()
}

/// The parameters of a model with adapters, in order.
fn with_adapters(model: &dyn Model, base: Vec<Array>, adapters: Vec<Array>) -> Vec<Array> {
    let (mut base, mut adapters) = (base.into_iter(), adapters.into_iter());
    let next = |(_, spec): &(mt_shape::Path, mt_nn::ParamSpec)| match spec.adapter {
        Some(_) => adapters.next(),
        None => base.next(),
    };
    let arrays: Option<Vec<Array>> = model.parameters().iter().map(next).collect();
    arrays.expect("base and adapters together are the model's parameters")
}
