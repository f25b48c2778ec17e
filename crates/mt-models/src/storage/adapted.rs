//! The parameters of models with adapters, which are saved apart: the frozen base and the adapters.

use std::path::{Path, PathBuf};

use mt_checkpoint::{Checkpoint, SkippedStep, checkpoints_directory, open_latest};
use mt_runtime::{Array, Runtime};
use mt_shape::Placement;
use serde_json::{Map, Value};

use super::{
    AdapterOptions, ArrayUse, SavedParameters, StateArray, StateReader, WeightsOrigin,
    reader::check_adapters, saved::LoadedParameters,
};
use crate::{
    Model, StateError,
    hugging_face::{Weights, is_hugging_face, is_peft},
};

/// The keys of adapters in the metadata of checkpoints that hold adapters alone.
const BASE: &str = "adapter_base";
const FIRST: &str = "first_adapters";
const OPTIONS: &str = "adapter_options";

/// The record of adapters in checkpoints that hold them alone.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterRecord {
    pub base: WeightsOrigin,
    /// The adapters with which training began, if they were saved before.
    pub first: Option<WeightsOrigin>,
    /// Checkpoints of the first versions have none.
    pub options: Option<AdapterOptions>,
}

impl AdapterRecord {
    /// The record of a model with adapters whose base is drawn from a seed.
    pub fn drawn(model: &dyn Model, seed: u64) -> Self {
        let options = model.adapters().map(AdapterOptions::of);
        Self { base: WeightsOrigin::Drawn { seed }, first: None, options }
    }

    /// The record in a checkpoint's metadata; `None` if it holds whole models.
    pub fn of(metadata: &Map<String, Value>) -> Option<Self> {
        Some(Self {
            base: WeightsOrigin::from_json(metadata.get(BASE)?)?,
            first: metadata.get(FIRST).and_then(WeightsOrigin::from_json),
            options: metadata.get(OPTIONS).and_then(AdapterOptions::from_json),
        })
    }

    /// Writes the record into the metadata of a checkpoint.
    pub fn write(&self, metadata: &mut Map<String, Value>) {
        metadata.insert(BASE.to_owned(), self.base.to_json());
        if let Some(first) = &self.first {
            metadata.insert(FIRST.to_owned(), first.to_json());
        }
        if let Some(options) = &self.options {
            metadata.insert(OPTIONS.to_owned(), options.to_json());
        }
    }

    /// Checks that adapters in `adapters`, which have this record, are used with a model and with the base `now`.
    fn check(&self, model: &dyn Model, now: &WeightsOrigin, adapters: &Path) -> Result<(), StateError> {
        if !self.base.is_same(now) {
            let (before, now) = (self.base.to_string(), now.to_string());
            return Err(StateError::OtherBase { adapters: adapters.to_owned(), before, now });
        }
        let expected = AdapterOptions::of(model.adapters().expect("the model has adapters"));
        self.options.as_ref().map_or(Ok(()), |options| options.check(&expected, adapters))
    }
}

/// The saved base and adapters of a model, compared with the model. Nothing but checksums has been read.
pub struct AdaptedParameters {
    base_model: Box<dyn Model>,
    saved_base: SavedParameters,
    /// Whether the model has the head of its base.
    keeps_head: bool,
    /// The base and the first adapters, as checkpoints record them.
    pub record: AdapterRecord,
    adapters: Option<SavedAdapters>,
    /// Damaged steps that are newer than the base.
    skipped: Vec<SkippedStep>,
}

enum SavedAdapters {
    Peft { path: PathBuf, weights: Box<Weights> },
    Checkpoint(Box<Checkpoint>),
}

impl AdaptedParameters {
    /// Opens the base at `path`, or the base of the run with adapters at `path`, and adapters at `adapters`: a PEFT
    /// directory, or a run with adapters.
    ///
    /// # Errors
    /// Nothing is saved there, names, shapes or options differ from the model's, or adapters have another base.
    ///
    /// # Panics
    /// The model has no adapters.
    pub fn open(model: &dyn Model, path: &Path, adapters: Option<&Path>) -> Result<Self, StateError> {
        let of_path = adapter_checkpoint(path)?;
        let mut skipped = Vec::new();
        let mut at = |path: &Path| -> Result<WeightsOrigin, StateError> {
            let (origin, newer) = WeightsOrigin::at(path)?;
            skipped.extend(newer);
            Ok(origin)
        };
        let base = match &of_path {
            None => at(path)?,
            Some((_, AdapterRecord { base: WeightsOrigin::Saved { path: base, .. }, .. })) => {
                let here = super::origin::here(base);
                if !mt_storage::exists(&here) {
                    return Err(StateError::NoBase { adapters: path.to_owned(), base: base.clone() });
                }
                at(&here)?
            }
            Some((_, AdapterRecord { base: WeightsOrigin::Drawn { seed }, .. })) => {
                return Err(StateError::DrawnBase { adapters: path.to_owned(), seed: *seed });
            }
        };
        if let Some((_, record)) = of_path.as_ref().filter(|_| adapters.is_none()) {
            record.check(model, &base, path)?;
        }
        let adapters = match (adapters, of_path) {
            (Some(adapters), _) => Some(SavedAdapters::open(model, adapters, &base)?),
            (None, Some((checkpoint, _))) => Some(SavedAdapters::of_checkpoint(model, checkpoint)?),
            (None, None) => None,
        };
        Ok(Self { skipped, ..Self::of(model, base, adapters)? })
    }

    /// Damaged steps that are newer than those of the base and of the adapters, if these are named by their runs.
    pub fn skipped(&self) -> Vec<SkippedStep> {
        let of_adapters = match &self.adapters {
            Some(SavedAdapters::Checkpoint(checkpoint)) => checkpoint.skipped(),
            _ => &[],
        };
        self.skipped.iter().chain(of_adapters).cloned().collect()
    }

    /// Opens the weights with which a run began, which its checkpoints record, when the run is resumed. `named` is the path
    /// of the base, or of a run with adapters, that keys name now, and `adapters` that of adapters. The first adapters are
    /// opened only if they are `wanted`.
    ///
    /// # Errors
    /// As [`Self::open`]; the weights are no longer those of the record.
    pub fn open_again(
        model: &dyn Model,
        recorded: &AdapterRecord,
        (named, adapters): (Option<&Path>, Option<&Path>),
        wanted: bool,
    ) -> Result<Self, StateError> {
        // Keys may name the base, or the run that adapted it.
        let of_named = named.map(adapter_checkpoint).transpose().ok().flatten().flatten();
        let named_base = match &of_named {
            Some((_, record)) => record.base.path(),
            None => named,
        };
        let base = recorded.base.find_again(named_base, "its base")?;
        let first = match &recorded.first {
            Some(first) if wanted => Some(first.find_again(adapters.or(named), "its first adapters")?),
            first => first.clone(),
        };
        let path = first.as_ref().filter(|_| wanted).and_then(WeightsOrigin::path);
        let adapters = path.map(|path| SavedAdapters::open(model, path, &base)).transpose()?;
        let opened = Self::of(model, base, adapters)?;
        Ok(Self { record: AdapterRecord { first, ..opened.record }, ..opened })
    }

    fn of(
        model: &dyn Model,
        base: WeightsOrigin,
        adapters: Option<SavedAdapters>,
    ) -> Result<Self, StateError> {
        let base_model = model.base().expect("the model has adapters");
        // The head of a reward model is trained beside the adapters.
        let base_model = base_model.language_model().unwrap_or(base_model);
        let keeps_head = model.language_model().is_none();
        let path = base.path().expect("a drawn base is not opened");
        let saved_base = SavedParameters::open(&*base_model, path)?;
        let first = adapters.as_ref().map(|adapters| WeightsOrigin::of_directory(adapters.path()));
        let options = model.adapters().map(AdapterOptions::of);
        let record = AdapterRecord { base, first: first.transpose()?, options };
        Ok(Self { base_model, saved_base, keeps_head, record, adapters, skipped: Vec::new() })
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
        Ok(arrays
            .into_iter()
            .zip(paths)
            .filter(|(_, path)| is_needed(path))
            .map(|(array, _)| array)
            .collect())
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
        self.adapters.as_ref().map(|adapters| adapters.load(model, runtime, placement)).transpose()
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
        let (step, path) = match &self.adapters {
            Some(SavedAdapters::Checkpoint(checkpoint)) => (checkpoint.step(), checkpoint.path()),
            _ => (None, self.record.base.path().expect("a drawn base is not opened")),
        };
        Ok(LoadedParameters { arrays, step, path: path.to_owned(), skipped: self.skipped() })
    }
}

impl SavedAdapters {
    fn open(model: &dyn Model, path: &Path, base: &WeightsOrigin) -> Result<Self, StateError> {
        if is_peft(path) {
            let weights = Box::new(Weights::open_adapters(model, path)?);
            return Ok(Self::Peft { path: path.to_owned(), weights });
        }
        let Some((checkpoint, recorded)) = adapter_checkpoint(path)? else {
            return Err(StateError::NoAdapters { path: path.to_owned() });
        };
        recorded.check(model, base, path)?;
        Self::of_checkpoint(model, checkpoint)
    }

    fn of_checkpoint(model: &dyn Model, checkpoint: Checkpoint) -> Result<Self, StateError> {
        check_adapters(model, &checkpoint)?;
        Ok(Self::Checkpoint(Box::new(checkpoint)))
    }

    /// Reads the adapters onto the devices, in the model's order.
    fn load(
        &self,
        model: &dyn Model,
        runtime: &Runtime,
        placement: &Placement,
    ) -> Result<Vec<Array>, StateError> {
        match self {
            Self::Peft { weights, .. } => weights.load(runtime, placement, model, None),
            Self::Checkpoint(checkpoint) => load_adapters(model, checkpoint, runtime, placement),
        }
    }

    /// The PEFT directory, or the step of the checkpoint.
    fn path(&self) -> &Path {
        match self {
            Self::Peft { path, .. } => path,
            Self::Checkpoint(checkpoint) => checkpoint.path(),
        }
    }
}

/// Reads the adapters of a model at a path onto the devices, in the model's order. `base` is the path of the weights below
/// them, whose checksum is computed once, and only if adapters record one.
pub(super) fn read_adapters(
    model: &dyn Model,
    path: &Path,
    base: &Path,
    (runtime, placement): (&Runtime, &Placement),
    origin: &mut Option<WeightsOrigin>,
) -> Result<Vec<Array>, StateError> {
    let saved = if is_peft(path) {
        let weights = Box::new(Weights::open_adapters(model, path)?);
        SavedAdapters::Peft { path: path.to_owned(), weights }
    } else {
        let origin = match origin {
            Some(origin) => origin,
            None => origin.insert(WeightsOrigin::at(base)?.0),
        };
        SavedAdapters::open(model, path, origin)?
    };
    saved.load(model, runtime, placement)
}

/// The newest undamaged checkpoint at a path, with the record of its adapters; `None` if it holds whole models.
pub(super) fn adapter_checkpoint(path: &Path) -> Result<Option<(Checkpoint, AdapterRecord)>, StateError> {
    if is_hugging_face(path) || is_peft(path) {
        return Ok(None);
    }
    let newest = Checkpoint::open_path(path);
    let is_adapted =
        newest.as_ref().is_ok_and(|checkpoint| AdapterRecord::of(checkpoint.custom_metadata()).is_some());
    let newest = match checkpoints_directory(path)?.filter(|_| newest.is_err() || is_adapted) {
        // Adapters are small, so that all their bytes are checked at once.
        Some(directory) => open_latest(&directory)?.map(|latest| latest.value),
        None => Some(newest?),
    };
    Ok(newest.and_then(|checkpoint| {
        let record = AdapterRecord::of(checkpoint.custom_metadata())?;
        Some((checkpoint, record))
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

/// The indices of the parameters of a model that belong to adapters.
pub fn adapter_indices(model: &dyn Model) -> Vec<usize> {
    let parameters = model.parameters().into_iter().enumerate();
    parameters.filter(|(_, (_, spec))| spec.adapter.is_some()).map(|(index, _)| index).collect()
}

/// The arrays of a model's adapters in checkpoints.
pub(super) fn adapter_arrays(model: &dyn Model) -> Vec<StateArray> {
    let arrays = StateArray::parameters(model);
    adapter_indices(model).into_iter().map(|index| arrays[index].clone()).collect()
}

/// Whether a path holds adapters alone, and no whole model.
pub fn holds_adapters(path: &Path) -> bool {
    is_peft(path) || matches!(adapter_checkpoint(path), Ok(Some(_)))
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
