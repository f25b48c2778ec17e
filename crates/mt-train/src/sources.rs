//! The weights that a run uses and does not save: the base below adapters, the first adapters, and frozen models.
//!
//! A new run finds them by the configuration's paths. Its checkpoints record where they were, with the step and a
//! checksum, and a resumed run finds the recorded ones again, wherever the run that saved them has gone on to.

use std::path::{Path, PathBuf};

use mt_checkpoint::{Checkpoint, SkippedStep, complete_steps};
use mt_config::CheckpointGroup;
use mt_models::{AdaptedParameters, AdapterRecord, Model, SavedParameters, WeightsOrigin};
use serde_json::{Map, Value};

use crate::{
    TrainError, TrainPlan,
    objective::{FrozenModel, FrozenSource},
    restore::check_drawn,
};

/// The key of frozen models in a checkpoint's metadata.
const FROZEN: &str = "frozen_models";

/// The record of these weights in checkpoints.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourceRecord {
    adapters: Option<AdapterRecord>,
    /// By the names of frozen models.
    frozen: Vec<(&'static str, WeightsOrigin)>,
}

impl SourceRecord {
    /// Writes the record into the metadata of a checkpoint.
    pub fn write(&self, metadata: &mut Map<String, Value>) {
        if let Some(adapters) = &self.adapters {
            adapters.write(metadata);
        }
        if !self.frozen.is_empty() {
            let of_models = self.frozen.iter().map(|(name, origin)| ((*name).to_owned(), origin.to_json()));
            metadata.insert(FROZEN.to_owned(), Value::Object(of_models.collect()));
        }
    }
}

/// The weights that a run uses and does not save, compared with its models once. Nothing but checksums has been read.
#[derive(Default)]
pub(crate) struct Sources {
    /// The base and the first adapters of a model with adapters, if they are loaded.
    pub adapted: Option<AdaptedParameters>,
    pub record: SourceRecord,
    /// Damaged steps that are newer than those that the sources are.
    pub skipped: Vec<SkippedStep>,
}

impl Sources {
    /// Opens the weights. `recorded` is the metadata of a checkpoint, if the run is resumed.
    ///
    /// # Errors
    /// Weights do not exist or do not fit their models; those of a resumed run are no longer those of its record.
    pub fn open(plan: &TrainPlan, recorded: Option<&Map<String, Value>>) -> Result<Self, TrainError> {
        let mut sources = Self::default();
        if plan.model.adapters().is_some() {
            sources.open_adapted(plan, recorded.and_then(AdapterRecord::of))?;
        }
        for frozen in plan.frozen_models() {
            let Some((model, path)) = own_weights(frozen, plan) else { continue };
            let of_model = |metadata: &Map<String, Value>| metadata.get(FROZEN)?.get(frozen.name).cloned();
            let before = recorded.and_then(of_model).as_ref().and_then(WeightsOrigin::from_json);
            let origin = match (before, &path) {
                (Some(before), path) => before.find_again(path.as_deref(), frozen.name)?,
                (None, Some(path)) => {
                    let (origin, skipped) = WeightsOrigin::at(path)?;
                    sources.skipped.extend(skipped);
                    origin
                }
                (None, None) => WeightsOrigin::Drawn { seed: plan.settings.model.init_weights_seed },
            };
            if let Some(path) = origin.path() {
                SavedParameters::open(model, path)?;
            }
            sources.record.frozen.push((frozen.name, origin));
        }
        Ok(sources)
    }

    fn open_adapted(&mut self, plan: &TrainPlan, recorded: Option<AdapterRecord>) -> Result<(), TrainError> {
        let (group, model) = (&plan.settings.checkpoint, &*plan.model);
        let (path, adapters) = (group.parameters_path(), group.lora_restore_path.as_deref());
        let seed = plan.settings.model.init_weights_seed;
        let is_first = |frozen: &FrozenModel| matches!(frozen.source, FrozenSource::FirstValues);
        self.adapted = match (recorded, path) {
            (None, None) => {
                check_drawn(model)?;
                None
            }
            (None, Some(path)) => Some(AdaptedParameters::open(model, path, adapters)?),
            (Some(AdapterRecord { base: WeightsOrigin::Drawn { .. }, .. }), _) => None,
            (Some(recorded), path) => {
                let wanted = plan.frozen_models().any(is_first);
                Some(AdaptedParameters::open_again(model, &recorded, (path, adapters), wanted)?)
            }
        };
        self.skipped.extend(self.adapted.iter().flat_map(AdaptedParameters::skipped));
        self.record.adapters = Some(match &self.adapted {
            Some(adapted) => adapted.record.clone(),
            None => AdapterRecord::drawn(model, seed),
        });
        Ok(())
    }

    /// The checksums, or the seeds, of the weights that the frozen model `name` has at the beginning of the run.
    pub fn identity(&self, name: &str) -> Value {
        let mut weights = Vec::new();
        match self.record.frozen.iter().find(|(known, _)| *known == name) {
            Some((_, origin)) => weights.push(origin),
            None => {
                // The model has the base of the trained one, and its first adapters or none.
                let adapters = self.record.adapters.iter();
                weights.extend(
                    adapters.flat_map(|record| [Some(&record.base), record.first.as_ref()]).flatten(),
                );
            }
        }
        let identity = |origin: &WeightsOrigin| {
            let mut recorded = origin.to_json();
            if let Some(fields) = recorded.as_object_mut() {
                fields.remove("path");
            }
            recorded
        };
        weights.into_iter().map(identity).collect()
    }

    /// The weights of the frozen model `name`, which has its own.
    pub fn of_frozen(&self, name: &str) -> Option<&Path> {
        let known = self.record.frozen.iter().find(|(known, _)| *known == name);
        known.and_then(|(_, origin)| origin.path())
    }

    /// The path of the first parameters of a model without adapters. If a frozen model has them too, both are of one step.
    pub fn first_parameters<'a>(&'a self, plan: &TrainPlan, group: &'a CheckpointGroup) -> Option<&'a Path> {
        let named = group.parameters_path()?;
        let same = plan.frozen_models().find(|frozen| matches!(frozen.source, FrozenSource::FirstValues));
        Some(same.and_then(|frozen| self.of_frozen(frozen.name)).unwrap_or(named))
    }
}

/// The metadata of the newest checkpoint in a directory that can be opened. All checkpoints of a run record the same
/// weights; damage is handled when the state is loaded.
pub(crate) fn recorded_in(checkpoints: &Path) -> Result<Option<Map<String, Value>>, TrainError> {
    let steps = complete_steps(checkpoints)?.into_iter().rev();
    let mut opened = steps.filter_map(|step| Checkpoint::open(checkpoints, step).ok());
    Ok(opened.next().map(|checkpoint| checkpoint.custom_metadata().clone()))
}

/// A frozen model with weights of its own, and the path that the configuration names for them. Those of the trained
/// model's base and first adapters are not its own.
fn own_weights<'a>(frozen: &'a FrozenModel, plan: &'a TrainPlan) -> Option<(&'a dyn Model, Option<PathBuf>)> {
    let model = frozen.model(&*plan.model);
    let group = &plan.settings.checkpoint;
    match &frozen.source {
        FrozenSource::WithoutAdapters { .. } => None,
        FrozenSource::FirstValues if plan.model.adapters().is_some() => None,
        FrozenSource::FirstValues => {
            let path = group.load_full_state_path.as_deref().or(group.parameters_path());
            Some((model, path.map(Path::to_owned)))
        }
        FrozenSource::Loaded { path, .. } | FrozenSource::OtherValues(path) => {
            Some((model, Some(path.clone())))
        }
    }
}
