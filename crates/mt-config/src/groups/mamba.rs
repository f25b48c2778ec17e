//! Layers of Mamba-2.

use super::{choices::DecoderBlock, group, model::uneven_heads};
use crate::{config::Config, error::Problem, families};

group! {
    /// Layers of Mamba-2.
    pub struct MambaGroup {
        mamba_num_heads: usize,
        mamba_head_dim: usize,
        mamba_num_groups: usize,
        mamba_state_dim: usize,
        mamba_conv_kernel_dim: usize,
        mamba_conv_bias: bool,
        mamba_proj_bias: bool,
        mamba_chunk_size: usize,
    }
}

impl MambaGroup {
    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if !families::MAMBA.include_that_of(config) {
            return;
        }
        let block = config.entry("decoder_block");
        let heads = ("mamba_num_heads", self.mamba_num_heads);
        let groups = ("mamba_num_groups", self.mamba_num_groups);
        problems.extend(uneven_heads(config, heads, groups, "heads"));
        let pattern = &config.entry("attention_pattern").value;
        if pattern.as_array().is_some_and(|list| list.iter().any(|kind| kind == "local"))
            && block.value == DecoderBlock::Bamba.name()
        {
            problems.push(Problem::inconsistent(
                format!(
                    "{} has local layers, but {}, whose layers with attention see all earlier positions",
                    config.stated("attention_pattern"),
                    config.stated("decoder_block")
                ),
                "use `linear` and `global`",
            ));
        }
        let has_pattern = pattern.as_array().is_some_and(|list| !list.is_empty());
        if has_pattern && block.value == DecoderBlock::Mamba2.name() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, whose layers have no attention",
                    config.stated("attention_pattern"),
                    config.stated("decoder_block")
                ),
                "leave out `attention_pattern`, or use `decoder_block=bamba`, which has layers of both kinds",
            ));
        }
    }
}
