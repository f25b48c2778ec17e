//! Mamba-2 layers. MaxText has none, so all keys are our own.

use super::KeyGroup;
use crate::{families, key::Key};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "Mamba2",
    title: "Mamba-2",
    prefix: None,
    keys: &[
        Key::integer("mamba_num_heads", 64, "Number of heads of a Mamba-2 layer.")
            .at_least(1.0)
            .only_with("decoder_block", families::MAMBA.names)
            .acts_on("model")
            .own(),
        Key::integer("mamba_head_dim", 64, "Width of a Mamba-2 head's values.")
            .at_least(1.0)
            .only_with("decoder_block", families::MAMBA.names)
            .acts_on("model")
            .own(),
        Key::integer(
            "mamba_num_groups",
            1,
            "Number of groups of Mamba-2 heads that share the projections B and C; must divide \
             `mamba_num_heads`.",
        )
        .at_least(1.0)
        .only_with("decoder_block", families::MAMBA.names)
        .acts_on("model")
        .own(),
        Key::integer("mamba_state_dim", 128, "Number of states of each channel of a Mamba-2 layer.")
            .at_least(1.0)
            .only_with("decoder_block", families::MAMBA.names)
            .acts_on("model")
            .own(),
        Key::integer(
            "mamba_conv_kernel_dim",
            4,
            "Number of positions that the convolutions of a Mamba-2 layer cover.",
        )
        .at_least(1.0)
        .only_with("decoder_block", families::MAMBA.names)
        .acts_on("model")
        .own(),
        Key::boolean("mamba_conv_bias", true, "Add a bias to the convolutions of Mamba-2 layers.")
            .only_with("decoder_block", families::MAMBA.names)
            .acts_on("model")
            .own(),
        Key::boolean("mamba_proj_bias", false, "Add a bias to the projections of Mamba-2 layers.")
            .only_with("decoder_block", families::MAMBA.names)
            .acts_on("model")
            .own(),
        Key::integer(
            "mamba_chunk_size",
            64,
            "Number of positions that a Mamba-2 layer computes at once in training.",
        )
        .at_least(1.0)
        .only_with("decoder_block", families::MAMBA.names)
        .acts_on("model")
        .own()
        .may_change(),
    ],
}];
