//! Context parallelism: sequences split over devices.

use mt_shape::{LogicalAxis, PartitionSpec, Placement, logical};

use super::{ContextAxis, ContextStrategy, ReorderStrategy, group};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
    origin::Origin,
};

group! {
    /// How sequences are split over devices, and how their shards attend to each other.
    pub struct ContextGroup {
        context_sharding: ContextAxis,
        context_parallel_strategy: ContextStrategy,
        context_parallel_load_balance: bool,
        context_parallel_reorder_strategy: ReorderStrategy,
    }
    besides {
        length_origin: Origin = |config, _| Some(config.entry("max_target_length").origin.clone()),
    }
}

/// The logical axes of attention's queries. All are needed, since a rule for one may take mesh axes from another.
const QUERY: [Option<LogicalAxis>; 4] = [
    Some(logical::ACTIVATION_KV_BATCH),
    Some(logical::ACTIVATION_LENGTH_ATTN),
    Some(logical::ACTIVATION_HEADS),
    Some(logical::ACTIVATION_KV),
];

impl ContextGroup {
    /// No combination of the group's values is wrong.
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// The mesh axes over which the rules split a sequence's queries, whatever its length.
    fn axes(placement: &Placement) -> Vec<String> {
        // The number of devices is a multiple of every product of mesh axes, so no split fails.
        let dims = [placement.mesh().num_devices(); QUERY.len()];
        let PartitionSpec(mut axes) = placement.sharding(&QUERY, &dims).spec;
        axes.swap_remove(1)
    }

    fn num_shards(placement: &Placement) -> usize {
        Self::axes(placement).iter().filter_map(|axis| placement.mesh().axis_size(axis)).product()
    }

    /// The number of shards of a sequence, if each shard holds a pair of chunks, which balances the work under a causal
    /// mask. None if tokens are stored in their original order.
    pub fn paired_shards(&self, placement: &Placement) -> Option<usize> {
        let ContextStrategy::AllGather = self.context_parallel_strategy;
        let (ReorderStrategy::Auto | ReorderStrategy::DualChunkSwap) = self.context_parallel_reorder_strategy;
        let shards = Self::num_shards(placement);
        (self.context_parallel_load_balance && shards > 1).then_some(shards)
    }

    /// Checks that sequences of the length that `key` states can be split over the mesh.
    ///
    /// # Errors
    /// The length is not a multiple of the number of chunks, or no rule splits sequences over the requested axis.
    pub(super) fn check_length(
        &self,
        placement: &Placement,
        (key, length, origin): (&str, usize, &Origin),
    ) -> Result<(), ConfigError> {
        let axes = Self::axes(placement);
        let axis = self.context_sharding.name();
        let is_split = placement.mesh().axis_size(axis).is_some_and(|size| size > 1);
        // The mesh axis `expert` may split experts without splitting sequences.
        if self.context_sharding == ContextAxis::Expert && is_split && axes.iter().all(|other| other != axis)
        {
            return Err(Problem::inconsistent(
                format!(
                    "`context_sharding` is `{axis}`, but no rule of `logical_axis_rules` splits `{}` over `{axis}`",
                    logical::ACTIVATION_LENGTH_ATTN
                ),
                "use `custom_mesh_and_rule=ep-as-cp`, or leave out `context_sharding`",
            )
            .into());
        }
        let shards = Self::num_shards(placement);
        let is_paired = self.paired_shards(placement).is_some();
        let pieces = if is_paired { 2 * shards } else { shards };
        if length.is_multiple_of(pieces) {
            return Ok(());
        }
        let chunks = if is_paired { format!(", each of 2 of {pieces} chunks") } else { String::new() };
        let mut choices = vec![format!("use `{key}={}`", length.next_multiple_of(pieces))];
        if is_paired && length.is_multiple_of(shards) {
            choices.push(format!(
                "`context_parallel_load_balance=false`, which needs a multiple of {shards} only"
            ));
        }
        let names: Vec<String> = axes.iter().map(|axis| format!("`{axis}`")).collect();
        if let [axis] = &axes[..] {
            choices.push(format!("a smaller `ici_{axis}_parallelism`"));
        }
        Err(Problem::inconsistent(
            format!(
                "`{key}` is `{length}` ({origin}), but sequences are split over {} into {shards} shards{chunks}",
                names.join(" and "),
            ),
            choices.join(", or "),
        )
        .into())
    }
}
