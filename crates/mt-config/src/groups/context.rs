//! Sequences that are split over devices.

use mt_shape::{LogicalRules, Mesh};

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

/// The logical axis that queries of a sequence lie along.
const QUERIES: &str = "activation_length_attn";

impl ContextGroup {
    /// Nothing can be wrong with the group by itself.
    fn check(&self, _config: &Config, _problems: &mut Vec<Problem>) {}

    /// Into how many parts a sequence is split on this mesh.
    fn num_parts(&self, mesh: &Mesh) -> usize {
        mesh.axis_size(self.context_sharding.name()).unwrap_or(1)
    }

    /// The number of parts to which chunks of a sequence are dealt in pairs, so that all have as much to do under a
    /// causal mask. None if sequences are stored as they are read.
    pub fn paired_parts(&self, mesh: &Mesh) -> Option<usize> {
        let ContextStrategy::AllGather = self.context_parallel_strategy;
        let (ReorderStrategy::Auto | ReorderStrategy::DualChunkSwap) = self.context_parallel_reorder_strategy;
        let parts = self.num_parts(mesh);
        (self.context_parallel_load_balance && parts > 1).then_some(parts)
    }

    /// Checks that sequences can be split over the mesh.
    ///
    /// # Errors
    /// The length is no multiple of what it is split into, or the rules do not split it.
    pub(super) fn check_length(
        &self,
        mesh: &Mesh,
        rules: &LogicalRules,
        length: usize,
    ) -> Result<(), ConfigError> {
        let (parts, axis) = (self.num_parts(mesh), self.context_sharding.name());
        let is_ruled = rules
            .0
            .iter()
            .any(|(logical, axes)| logical == QUERIES && axes.iter().any(|mesh_axis| mesh_axis == axis));
        // Experts may be split over devices without sequences being split over them.
        if self.context_sharding == ContextAxis::Expert && parts > 1 && !is_ruled {
            return Err(Problem::inconsistent(
                format!(
                    "`context_sharding` is `{axis}`, but no rule of `logical_axis_rules` splits `{QUERIES}` over `{axis}`"
                ),
                "use `custom_mesh_and_rule=ep-as-cp`, or leave out `context_sharding`",
            )
            .into());
        }
        let (chunks, what) = match self.paired_parts(mesh) {
            Some(parts) => (2 * parts, format!("{} chunks, two for each of {parts} devices", 2 * parts)),
            None => (parts, format!("{parts} parts, one for each device")),
        };
        if length.is_multiple_of(chunks) {
            return Ok(());
        }
        let unpaired = if length.is_multiple_of(parts) {
            ", or `context_parallel_load_balance=false`, which makes half as many parts"
        } else {
            ""
        };
        Err(Problem::inconsistent(
            format!(
                "`max_target_length` is `{length}` ({}), but sequences are split over the mesh axis `{axis}` into {what}",
                self.length_origin
            ),
            format!("use `max_target_length={}`{unpaired}", length.next_multiple_of(chunks)),
        )
        .into())
    }
}
