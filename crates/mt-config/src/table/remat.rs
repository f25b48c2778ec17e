//! What a backward pass keeps, recomputes or moves to the host, and how layers are executed.

use super::{KeyGroup, features};
use crate::{
    groups::{RematPolicy, TensorLocation},
    key::Key,
};

/// Where a custom policy keeps a tensor that it would otherwise compute again.
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
            "What the backward pass recomputes: all of a layer (`full`), all but the \
             results of its matrix products (`minimal`), all but what the keys of tensors say \
             (`custom`), or nothing (`none`); the guide to training lists all policies.",
        )
        .acts_on("autodiff")
        .may_change(),
        Key::boolean("scan_layers", true, "Compile one layer and loop over the stacked weights of all.")
            .acts_on("model")
            .may_change(),
        Key::integer("param_scan_axis", 1, "Where stacked weights have their layer axis in a checkpoint.")
            .only_with("scan_layers", &["true"])
            .at_least(0.0)
            .at_most(1.0)
            .acts_on("checkpoint"),
        Key::text(
            "remat_policy_for_vit",
            "minimal",
            "What the backward pass of the vision encoder recomputes, in the words of \
             `remat_policy`.",
        )
        .refused(features::MULTIMODAL_MODELS)
        .only_with("use_multimodal", &[])
        .acts_on("vision")
        .may_change(),
        Key::of::<TensorLocation>(
            "decoder_layer_input",
            "device",
            "Recompute the inputs of decoder layers in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`). The input of what is recomputed, \
             a layer or a cycle of layers, is kept in any case.",
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
            "Recompute the gate projections of experts in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::MIXTURES_OF_EXPERTS),
        location(
            "moe_mlpwi_1",
            "Recompute the input projections of experts in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::MIXTURES_OF_EXPERTS),
        location(
            "moe_mlpwo",
            "Recompute the outputs of experts in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        )
        .refused(features::MIXTURES_OF_EXPERTS),
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
            "Recompute the low-rank queries of latent attention in the backward pass, or \
             keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::LATENT_ATTENTION),
        location(
            "kv_wa_proj",
            "Recompute the low-rank keys and values of latent attention in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::LATENT_ATTENTION),
        location(
            "qkv_proj",
            "Recompute the query, key and value projections in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`). The key of one of them \
             goes before, also with `remat` if that is given by hand.",
        ),
        location(
            "out_proj",
            "Recompute the output projections of attention in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        ),
        location(
            "mla_q",
            "Recompute the full queries of latent attention in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::LATENT_ATTENTION),
        location(
            "mla_kv",
            "Recompute the full keys and values of latent attention in the backward pass, \
             or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::LATENT_ATTENTION),
        location(
            "attention_out",
            "Recompute what attention gives to its output projection in the backward pass, or \
             keep it on the device or the host (`remat_policy=custom`). Unlike `context`, it \
             does not spare the recomputation of attention block by block. Both are one tensor: \
             where both are kept, `context` says where.",
        ),
        location(
            "engram",
            "Recompute the outputs of engram layers in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`).",
        )
        .refused(features::ENGRAM_LAYERS),
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
            "Keep the weights in host memory between training steps, and bring those of a \
             layer to the device when it is computed.",
        )
        .acts_on("placement")
        .may_change(),
        location(
            "indexer_cutoff_threshold",
            "Recompute the scores at which the attention indexer cuts off in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::INDEXER),
        location(
            "kv_proj",
            "Recompute the key and value projections in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`). The key of one of them goes before, \
             also with `remat` if that is given by hand.",
        ),
    ],
}];
