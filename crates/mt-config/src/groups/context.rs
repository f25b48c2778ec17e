//! Sequences that are split over devices.

use mt_shape::{PartitionSpec, Placement};

use super::{ContextAxis, ContextStrategy, ReorderStrategy, group};
use crate::{
    config::Config,
    error::{ConfigError, Problem},
    origin::Origin,
};

group! {
    /// How sequences are split over devices that attend to each other's parts.
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

/// The logical axes of queries in attention; a rule for one of them may take mesh axes from another.
const QUERY: [Option<&str>; 4] =
    [Some("activation_kv_batch"), Some(LENGTH), Some("activation_heads"), Some("activation_kv")];
const LENGTH: &str = "activation_length_attn";

impl ContextGroup {
    /// Nothing can be wrong with the group by itself.
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// The mesh axes over which the rules split the queries of a sequence, whatever its length is.
    fn axes(placement: &Placement) -> Vec<String> {
        // Every product of axes divides the number of devices.
        let dims = [placement.mesh().num_devices(); QUERY.len()];
        let PartitionSpec(mut axes) = placement.sharding(&QUERY, &dims).spec;
        axes.swap_remove(1)
    }

    fn num_parts(placement: &Placement) -> usize {
        Self::axes(placement).iter().filter_map(|axis| placement.mesh().axis_size(axis)).product()
    }

    /// The number of parts to which chunks of a sequence are dealt in pairs, so that all have as much to do under a
    /// causal mask. None if sequences are stored as they are read.
    pub fn paired_parts(&self, placement: &Placement) -> Option<usize> {
        let ContextStrategy::AllGather = self.context_parallel_strategy;
        let (ReorderStrategy::Auto | ReorderStrategy::DualChunkSwap) = self.context_parallel_reorder_strategy;
        let parts = Self::num_parts(placement);
        (self.context_parallel_load_balance && parts > 1).then_some(parts)
    }

    /// Checks that sequences can be split over the mesh.
    ///
    /// # Errors
    /// The length is no multiple of what it is split into, or the rules do not split it.
    pub(super) fn check_length(&self, placement: &Placement, length: usize) -> Result<(), ConfigError> {
        let axes = Self::axes(placement);
        let axis = self.context_sharding.name();
        let is_split = placement.mesh().axis_size(axis).is_some_and(|size| size > 1);
        // Experts may be split over devices without sequences being split over them.
        if self.context_sharding == ContextAxis::Expert && is_split && axes.iter().all(|other| other != axis)
        {
            return Err(Problem::inconsistent(
                format!(
                    "`context_sharding` is `{axis}`, but no rule of `logical_axis_rules` splits `{LENGTH}` over `{axis}`"
                ),
                "use `custom_mesh_and_rule=ep-as-cp`, or leave out `context_sharding`",
            )
            .into());
        }
        let parts = Self::num_parts(placement);
        let is_paired = self.paired_parts(placement).is_some();
        let pieces = if is_paired { 2 * parts } else { parts };
        if length.is_multiple_of(pieces) {
            return Ok(());
        }
        let dealt = if is_paired { format!(", each of 2 of {pieces} chunks") } else { String::new() };
        let mut choices = vec![format!("use `max_target_length={}`", length.next_multiple_of(pieces))];
        if is_paired && length.is_multiple_of(parts) {
            choices.push(format!(
                "`context_parallel_load_balance=false`, which needs a multiple of {parts} only"
            ));
        }
        let names: Vec<String> = axes.iter().map(|axis| format!("`{axis}`")).collect();
        if let [axis] = &axes[..] {
            choices.push(format!("a smaller `ici_{axis}_parallelism`"));
        }
        Err(Problem::inconsistent(
            format!(
                "`max_target_length` is `{length}` ({}), but sequences are split over {} into {parts} parts{dealt}",
                self.length_origin,
                names.join(" and "),
            ),
            choices.join(", or "),
        )
        .into())
    }
}
