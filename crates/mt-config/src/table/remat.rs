//! Rematerialization and offloading, and the execution of layers.

use super::{KeyGroup, features};
use crate::{
    groups::{RematPolicy, TensorLocation},
    key::Key,
};

/// A key for where a custom policy keeps a tensor.
const fn location(name: &'static str, help: &'static str) -> Key {
    Key::of::<TensorLocation>(name, "remat", help)
        .only_with("remat_policy", &["custom"])
        .acts_on("autodiff")
        .may_change()
}

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "RematAndOffload",
    title: "Execution of layers",
    prefix: None,
    keys: &[
        Key::of::<RematPolicy>(
            "remat_policy",
            "full",
            "The activations that the backward pass recomputes: all of a layer (`full`), all but the \
             results of its matrix products (`minimal`), all but those that the keys of tensors keep \
             (`custom`), or none (`none`). The guide to training lists all policies.",
        )
        .acts_on("autodiff")
        .may_change(),
        Key::boolean(
            "scan_layers",
            true,
            "Compile one layer and loop over the stacked weights of all layers.",
        )
        .acts_on("model")
        .may_change(),
        Key::integer(
            "param_scan_axis",
            1,
            "Position of the layer axis in the stacked weights of a checkpoint.",
        )
        .only_with("scan_layers", &["true"])
        .at_least(0.0)
        .at_most(1.0)
        .acts_on("checkpoint"),
        Key::text(
            "remat_policy_for_vit",
            "minimal",
            "Which activations the backward pass of the vision encoder recomputes; the values are those of \
             `remat_policy`.",
        )
        .refused(features::MULTIMODAL_MODELS)
        .only_with("use_multimodal", &[])
        .acts_on("vision")
        .may_change(),
        Key::of::<TensorLocation>(
            "decoder_layer_input",
            "device",
            "Recompute the inputs of decoder layers in the backward pass, or keep them on the device or the \
             host (`remat_policy=custom`). The input of a recomputed layer, or cycle of layers, is always \
             kept.",
        )
        .only_with("remat_policy", &["custom"])
        .acts_on("autodiff")
        .may_change(),
        location(
            "context",
            "Recompute the weighted values of attention in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mlpwi",
            "Recompute the input projections of feed-forward layers without a gate in the \
             backward pass, or keep them on the device or the host \
             (`remat_policy=custom`).",
        ),
        location(
            "mlpwi_0",
            "Recompute the gate projections of feed-forward layers in the backward pass, \
             or keep them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mlpwi_1",
            "Recompute the input projections of gated feed-forward layers in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mlpwo",
            "Recompute the outputs of feed-forward layers in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "moe_mlpwi_0",
            "Recompute the gate projections of experts in the backward pass, or keep them on the device or the \
             host (`remat_policy=custom`). The key takes precedence over `mlpwi_0`, even with `remat` if that is \
             set by hand.",
        ),
        location("moe_mlpwi_1", "As `moe_mlpwi_0`, for the input projections of experts and `mlpwi_1`."),
        location(
            "moe_mlpwo",
            "Recompute the summed outputs of experts in the backward pass, or keep them on the device or the host \
             (`remat_policy=custom`). The key takes precedence over `mlpwo`.",
        ),
        location(
            "query_proj",
            "Recompute the query projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        ),
        location(
            "key_proj",
            "Recompute the key projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        ),
        location(
            "value_proj",
            "Recompute the value projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        ),
        location(
            "query_wa_proj",
            "Recompute the latent vectors of queries before their norm in the backward pass, or \
             keep them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "kv_wa_proj",
            "Recompute the latent vectors of keys and values before their norm, with the rotated keys, in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "qkv_proj",
            "Recompute the query, key and value projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`). The key of a single projection takes precedence, \
             even with `remat` if that is set by hand.",
        ),
        location(
            "out_proj",
            "Recompute the output projections of attention in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mla_q",
            "Recompute the normalized latent vectors of queries in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mla_kv",
            "Recompute the normalized latent vectors of keys and values in the backward pass, \
             or keep them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "attention_out",
            "Recompute the input of attention's output projection in the backward pass, or keep it on the \
             device or the host (`remat_policy=custom`). Unlike `context`, it does not avoid the \
             recomputation of blockwise attention. Both name the same tensor: if both are kept, `context` \
             decides where.",
        ),
        location(
            "engram",
            "Recompute the outputs of engram layers in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`).",
        ),
        Key::boolean(
            "optimizer_memory_host_offload",
            false,
            "Keep the optimizer's state in host memory between updates.",
        )
        .acts_on("optimizer")
        .may_change(),
        Key::boolean(
            "parameter_memory_host_offload",
            false,
            "Keep the weights in host memory between training steps, and copy each layer's weights to the \
             device when it is computed.",
        )
        .acts_on("placement")
        .may_change(),
        location(
            "indexer_cutoff_threshold",
            "Recompute the scores at which the attention indexer cuts off in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .only_with("use_indexer", &[]),
        location(
            "kv_proj",
            "Recompute the key and value projections in the backward pass, or keep them on the device or \
             the host (`remat_policy=custom`). The key of a single projection takes precedence, even with \
             `remat` if that is set by hand.",
        ),
    ],
}];
