//! What a backward pass keeps, recomputes or moves to the host, and how layers are executed.

use super::{KeyGroup, LOCATIONS, features};
use crate::{groups::RematPolicy, key::Key};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "RematAndOffload",
    title: "Execution of layers",
    prefix: None,
    keys: &[
        Key::of::<RematPolicy>(
            "remat_policy",
            "full",
            "What the backward pass recomputes: all of a layer (`full`), all but the \
             results of its matrix products (`minimal`), or nothing (`none`).",
        )
        .acts_on("autodiff")
        .may_change(),
        Key::boolean("scan_layers", true, "Compile one layer and loop over the stacked weights of all.")
            .acts_on("model"),
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
        Key::choice(
            "decoder_layer_input",
            "device",
            LOCATIONS,
            "Recompute the inputs of decoder layers in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "context",
            "remat",
            LOCATIONS,
            "Recompute the weighted values of attention in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mlpwi",
            "remat",
            LOCATIONS,
            "Recompute the input projections of feed-forward layers without a gate in the \
             backward pass, or keep them on the device or the host \
             (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mlpwi_0",
            "remat",
            LOCATIONS,
            "Recompute the gate projections of feed-forward layers in the backward pass, \
             or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mlpwi_1",
            "remat",
            LOCATIONS,
            "Recompute the input projections of gated feed-forward layers in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mlpwo",
            "remat",
            LOCATIONS,
            "Recompute the outputs of feed-forward layers in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "moe_mlpwi_0",
            "remat",
            LOCATIONS,
            "Recompute the gate projections of experts in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "moe_mlpwi_1",
            "remat",
            LOCATIONS,
            "Recompute the input projections of experts in the backward pass, or keep them \
             on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "moe_mlpwo",
            "remat",
            LOCATIONS,
            "Recompute the outputs of experts in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "query_proj",
            "remat",
            LOCATIONS,
            "Recompute the query projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "key_proj",
            "remat",
            LOCATIONS,
            "Recompute the key projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "value_proj",
            "remat",
            LOCATIONS,
            "Recompute the value projections in the backward pass, or keep them on the \
             device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "query_wa_proj",
            "remat",
            LOCATIONS,
            "Recompute the low-rank queries of latent attention in the backward pass, or \
             keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "kv_wa_proj",
            "remat",
            LOCATIONS,
            "Recompute the low-rank keys and values of latent attention in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "qkv_proj",
            "remat",
            LOCATIONS,
            "Recompute the fused query, key and value projections in the backward pass, or \
             keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "out_proj",
            "remat",
            LOCATIONS,
            "Recompute the output projections of attention in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mla_q",
            "remat",
            LOCATIONS,
            "Recompute the full queries of latent attention in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "mla_kv",
            "remat",
            LOCATIONS,
            "Recompute the full keys and values of latent attention in the backward pass, \
             or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "attention_out",
            "remat",
            LOCATIONS,
            "Recompute the results of whole attention blocks in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "engram",
            "remat",
            LOCATIONS,
            "Recompute the outputs of engram layers in the backward pass, or keep them on \
             the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::boolean(
            "optimizer_memory_host_offload",
            false,
            "Keep the optimizer's state in host memory between updates.",
        )
        .refused(features::OFFLOADING)
        .acts_on("optimizer")
        .may_change(),
        Key::boolean(
            "parameter_memory_host_offload",
            false,
            "Keep the weights in host memory while they are not used.",
        )
        .refused(features::OFFLOADING)
        .acts_on("placement")
        .may_change(),
        Key::choice(
            "indexer_cutoff_threshold",
            "remat",
            LOCATIONS,
            "Recompute the scores at which the attention indexer cuts off in the backward \
             pass, or keep them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
        Key::choice(
            "kv_proj",
            "remat",
            LOCATIONS,
            "Recompute the joint key and value projections in the backward pass, or keep \
             them on the device or the host (`remat_policy=custom`).",
        )
        .refused(features::RECOMPUTATION_BY_TENSOR)
        .only_with("remat_policy", &["custom"])
        .acts_on("remat")
        .may_change(),
    ],
}];
