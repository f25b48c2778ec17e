//! The state of a run that has not begun.

use std::sync::Arc;

use mt_config::TrainConfig;
use mt_ir::{Memory, TensorType};
use mt_models::Model;
use mt_runtime::Platform;
use mt_shape::{Placement, Sharding};

use crate::{
    TrainError,
    placement::check_state_axes,
    run::{batch_axes, programs_of},
};

/// What an array of a run's state is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    Parameter,
    /// What is kept for parameters, and counts.
    Optimizer,
}

/// An array of the state of a run.
#[derive(Clone, Debug)]
pub struct PlannedArray {
    pub kind: StateKind,
    /// Its name in programs.
    pub name: String,
    /// The whole array, all shards together.
    pub ty: TensorType,
    pub sharding: Sharding,
    /// The memory that it is in between steps.
    pub memory: Memory,
}

impl PlannedArray {
    /// What one device holds of it.
    pub fn bytes_on_device(&self) -> usize {
        self.sharding.shard_dims(&self.ty.dims).iter().product::<usize>() * self.ty.dtype.byte_size()
    }
}

/// The state of a run that trains `model` on devices which `placement` describes, with batches of `rows` sequences. No
/// device is needed, and nothing is traced.
///
/// # Errors
/// A mask does not fit the parameters, or a mesh axis splits nothing.
pub fn planned_state(
    settings: &TrainConfig,
    model: &dyn Model,
    placement: &Arc<Placement>,
    platform: Platform,
    rows: usize,
) -> Result<Vec<PlannedArray>, TrainError> {
    let layout = programs_of(settings, model, placement.clone(), platform)?.layout;
    let names = batch_axes(settings);
    let dims = [rows, settings.data.max_target_length];
    let batch = placement.sharding(&names.each_ref().map(|name| Some(name.as_str())), &dims);
    check_state_axes(placement, &layout, &batch)?;
    let planned = layout.entries.iter().enumerate().map(|(index, entry)| PlannedArray {
        kind: if index < layout.num_parameters { StateKind::Parameter } else { StateKind::Optimizer },
        name: entry.name.clone(),
        ty: TensorType::new(entry.array.dtype, entry.array.dims.clone()),
        sharding: entry.array.sharding(placement),
        memory: entry.memory,
    });
    Ok(planned.collect())
}
