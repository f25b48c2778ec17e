//! The state of a run that has not begun.

use mt_ir::{Memory, TensorType};
use mt_shape::Sharding;

use crate::TrainPlan;

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
    pub(crate) logical_axes: Vec<Option<&'static str>>,
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

impl TrainPlan {
    /// The arrays of the state, in the order in which programs take them.
    pub fn state(&self) -> Vec<PlannedArray> {
        let layout = &self.state_rule.layout;
        let planned = layout.entries.iter().enumerate().map(|(index, entry)| PlannedArray {
            kind: if index < layout.num_parameters { StateKind::Parameter } else { StateKind::Optimizer },
            name: entry.name.clone(),
            logical_axes: entry.array.logical_axes.clone(),
            ty: TensorType::new(entry.array.dtype, entry.array.dims.clone()),
            sharding: entry.array.sharding(&self.placement),
            memory: entry.memory,
        });
        planned.collect()
    }
}
