//! The arrays of a run that has not begun: its state, and the activations that its steps keep.

use mt_config::{KeptIn, RematGroup};
use mt_ir::{Memory, TensorType};
use mt_models::decoder::{Activation, RegionActivations};
use mt_runtime::Platform;
use mt_shape::{LogicalAxis, Sharding, logical};

use crate::{TrainPlan, objective::FrozenModel};

/// The purpose of an array of a run's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    Parameter,
    /// Optimizer state and counters.
    Optimizer,
}

/// An array of a run's state.
#[derive(Clone, Debug)]
pub struct PlannedArray {
    pub kind: StateKind,
    /// The array's name in programs.
    pub name: String,
    pub(crate) logical_axes: Vec<Option<LogicalAxis>>,
    /// The type of the whole array, all shards together.
    pub ty: TensorType,
    pub sharding: Sharding,
    /// The memory that holds the array between steps.
    pub memory: Memory,
    /// Whether it is a parameter that is trained.
    pub is_trained: bool,
}

impl PlannedArray {
    /// Bytes of the array's shard on one device.
    pub fn bytes_on_device(&self) -> usize {
        self.sharding.shard_dims(&self.ty.dims).iter().product::<usize>() * self.ty.dtype.byte_size()
    }
}

/// Bytes per device of the activations that the forward pass keeps for the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptBytes {
    pub device: u64,
    /// In the host's memory.
    pub host: u64,
}

impl TrainPlan {
    /// The activations that a step, or each micro-batch of a step, keeps for its backward pass under a remat policy.
    pub fn kept_bytes(&self, remat: &RematGroup) -> KeptBytes {
        let [rows, length] = self.batch_dims();
        let rows = rows / self.settings.objective.gradient_accumulation_steps;
        let kept = remat.kept();
        let kept_in = |name: Option<&str>| match &kept {
            None => Some(KeptIn::Device),
            Some(kept) => kept.iter().find(|(known, _)| Some(*known) == name).map(|(_, place)| *place),
        };
        let mut bytes = KeptBytes::default();
        for region in self.activations(rows, length) {
            let input = kept_in(region.input.name).unwrap_or(KeptIn::Device);
            let named = region.made.iter().filter_map(|made| Some((made, kept_in(made.name)?)));
            for (tensor, place) in std::iter::once((&region.input, input)).chain(named) {
                let of_tensor = self.activation_bytes(tensor) * region.times as u64;
                match place {
                    KeptIn::Host if self.platform != Platform::Cpu => bytes.host += of_tensor,
                    KeptIn::Device | KeptIn::Host => bytes.device += of_tensor,
                }
            }
        }
        bytes
    }

    /// Bytes per device of the activations that all layers of a stack read, and of their gradients, which are sums over the
    /// layers.
    pub fn shared_bytes(&self) -> u64 {
        let [rows, length] = self.batch_dims();
        let rows = rows / self.settings.objective.gradient_accumulation_steps;
        let shared = self.model.shared_activations(rows, length);
        shared.iter().map(|tensor| 2 * self.activation_bytes(tensor)).sum()
    }

    /// The activations of the layers for `rows` sequences of `length` tokens, grouped by the regions that the backward
    /// pass recomputes.
    pub fn activations(&self, rows: usize, length: usize) -> Vec<RegionActivations> {
        let of_queries = [Some(logical::ACTIVATION_KV_BATCH), Some(logical::ACTIVATION_LENGTH_ATTN)];
        match self.placement.sharding(&of_queries, &[rows, length]).spec.0[1].is_empty() {
            true => self.model.activations(rows, length),
            false => self.model.activations_of_split_sequences(rows, length),
        }
    }

    /// Bytes of an activation's shard on one device.
    pub fn activation_bytes(&self, tensor: &Activation) -> u64 {
        let shard = self.placement.sharding(&tensor.logical_axes, &tensor.dims).shard_dims(&tensor.dims);
        (shard.iter().product::<usize>() * tensor.dtype.byte_size()) as u64
    }

    /// Bytes per device of the parameters of frozen models, without those that they share with the trained model.
    pub fn frozen_bytes(&self) -> u64 {
        let programs = self.programs();
        let of_model = |frozen: &FrozenModel| -> u64 {
            let parameters = frozen.model(&*self.model).parameters();
            let shared = programs.shared(frozen);
            let own = parameters.iter().zip(shared).filter(|(_, shared)| shared.is_none());
            own.map(|((_, spec), _)| {
                let shard =
                    self.placement.sharding(&spec.logical_axes, &spec.dims()).shard_dims(&spec.dims());
                (shard.iter().product::<usize>() * spec.dtype.byte_size()) as u64
            })
            .sum()
        };
        self.loss.frozen.iter().map(of_model).sum()
    }

    /// The arrays of the state, in the order in which programs take them.
    pub fn state(&self) -> Vec<PlannedArray> {
        let (layout, trained) = (&self.state_rule.layout, &self.state_rule.update.parameters);
        let planned = layout.entries.iter().enumerate().map(|(index, entry)| PlannedArray {
            kind: if layout.stepped().contains(&index) { StateKind::Parameter } else { StateKind::Optimizer },
            name: entry.name.clone(),
            logical_axes: entry.array.logical_axes.clone(),
            ty: TensorType::new(entry.array.dtype, entry.array.dims.clone()),
            sharding: entry.array.sharding(&self.placement),
            memory: entry.memory,
            is_trained: trained.get(index).is_some_and(|parameter| parameter.is_trained),
        });
        planned.collect()
    }
}
