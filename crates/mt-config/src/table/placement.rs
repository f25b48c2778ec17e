//! Meshes and placement rules.

use super::{KeyGroup, features};
use crate::{
    groups::{ContextAxis, ShardMode},
    key::Key,
};

/// The mesh axes over which a batch is split.
const BATCH: &[&str] = &["data", "fsdp", "fsdp_transpose", "expert"];
const BATCH_OVER_STAGES: &[&str] = &["data", "stage", "fsdp", "fsdp_transpose", "expert"];
const BATCH_AND_SEQUENCE: &[&str] =
    &["data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"];
/// The mesh axes over which a sequence is split.
const CONTEXT: &[&str] = &["context", "context_usp_ulysses"];
/// The mesh axes over which a sequence is split outside of attention.
const LENGTH: &[&str] = &["sequence", "context", "context_usp_ulysses"];
const NORM_LENGTH: &[&str] = &["tensor_sequence", "sequence", "context", "context_usp_ulysses"];
/// The mesh axes over which activations are split along heads, hidden units and the vocabulary. Attention splits heads
/// over axes that split the sequence elsewhere.
const TENSOR: &[&str] = &["tensor", "tensor_transpose", "tensor_sequence"];
const KV_HEADS: &[&str] = &["tensor", "tensor_transpose", "sequence", "tensor_sequence"];
const HEADS: &[&str] = &["tensor", "tensor_transpose", "sequence", "tensor_sequence", "autoregressive"];
const EMBED: &[&str] = &["tensor", "tensor_transpose"];
/// The mesh axes over which weights are split along heads, hidden units and the vocabulary.
const TENSOR_WEIGHTS: &[&str] = &["tensor", "tensor_transpose", "tensor_sequence", "autoregressive"];
const MLP: &[&str] = &["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"];
/// The mesh axes over which weights are fully sharded, along the dimension that `tensor` does not split. The variants
/// leave out `fsdp_transpose` or `tensor_transpose`, for weights that use these along another dimension.
const FSDP: &[&str] =
    &["fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context", "context_usp_ulysses", "expert"];
const FSDP_ONE_WAY: &[&str] =
    &["fsdp", "sequence", "tensor_transpose", "context", "context_usp_ulysses", "expert"];
const FSDP_BESIDE_TENSOR: &[&str] =
    &["fsdp", "fsdp_transpose", "sequence", "context", "context_usp_ulysses", "expert"];
const FSDP_ONE_WAY_BESIDE_TENSOR: &[&str] = &["fsdp", "sequence", "context", "context_usp_ulysses", "expert"];
const FSDP_EXPERTS: &[&str] =
    &["fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context", "context_usp_ulysses"];
const FSDP_EXPERTS_ONE_WAY: &[&str] =
    &["fsdp", "sequence", "tensor_transpose", "context", "context_usp_ulysses"];

/// MaxText's rules, with the axes `sequence` and `tensor_transpose` of its earlier versions, and rules for logical axes
/// that MaxText leaves without a name. The order matters: among several rules for a name, the first that fits applies.
const RULES: &[(&str, &[&str])] = &[
    ("circular_repeats", &[]),
    ("activation_embed_and_logits_batch", BATCH_OVER_STAGES),
    ("activation_embed_and_logits_batch_sequence", BATCH_AND_SEQUENCE),
    ("activation_vocab", TENSOR),
    ("activation_vocab", EMBED),
    ("activation_vocab", &["tensor_sequence"]),
    ("vocab", TENSOR_WEIGHTS),
    ("embed_vocab", FSDP_BESIDE_TENSOR),
    ("activation_batch_attn", BATCH),
    ("activation_input_length_attn", &["tensor_sequence", "context"]),
    ("activation_heads", HEADS),
    ("activation_kv_heads", KV_HEADS),
    ("activation_length_attn", CONTEXT),
    ("activation_q_length", CONTEXT),
    ("activation_kv_length", &[]),
    ("activation_embed_attn", EMBED),
    ("activation_kv", TENSOR),
    ("activation_kv_batch", BATCH),
    ("activation_kv_head_dim", TENSOR),
    ("heads", TENSOR_WEIGHTS),
    ("q_heads", TENSOR_WEIGHTS),
    ("kv_heads", TENSOR_WEIGHTS),
    ("qkv", &[]),
    ("kv", &[]),
    ("kv_head_dim", &[]),
    ("q_lora", FSDP),
    ("q_lora", FSDP_ONE_WAY),
    ("q_lora", FSDP_BESIDE_TENSOR),
    ("q_lora", FSDP_ONE_WAY_BESIDE_TENSOR),
    ("q_lora_up_proj", &[]),
    ("kv_lora", FSDP),
    ("kv_lora", FSDP_ONE_WAY),
    ("kv_lora", FSDP_BESIDE_TENSOR),
    ("kv_lora", FSDP_ONE_WAY_BESIDE_TENSOR),
    ("kv_lora_up_proj", &[]),
    ("activation_batch_moe", BATCH),
    ("activation_length_moe", LENGTH),
    ("activation_norm_length_moe", NORM_LENGTH),
    ("activation_embed_moe", EMBED),
    ("activation_mlp_moe", TENSOR),
    ("activation_exp", &["expert"]),
    ("exp", &["expert"]),
    ("mlp_moe", MLP),
    ("embed_moe", FSDP_EXPERTS),
    ("embed_moe", FSDP_EXPERTS_ONE_WAY),
    ("activation_mlp", TENSOR),
    ("activation_batch", BATCH),
    ("activation_length", LENGTH),
    ("activation_length", CONTEXT),
    ("activation_norm_length", NORM_LENGTH),
    ("activation_embed", EMBED),
    ("activation_stage", &["stage"]),
    ("mlp", MLP),
    ("gdn_head", MLP),
    ("embed", FSDP),
    ("embed", FSDP_ONE_WAY),
    ("embed", FSDP_BESIDE_TENSOR),
    ("embed", FSDP_ONE_WAY_BESIDE_TENSOR),
    ("norm", EMBED),
    ("layers", &["stage"]),
    ("diloco", &["diloco"]),
    ("engram_dim", &["tensor"]),
    ("dense_layers", &[]),
    ("moe_layers", &[]),
    ("local_layers", &[]),
    ("mhc", &[]),
    ("prefill_activation_length", LENGTH),
    ("prefill_activation_norm_length", NORM_LENGTH),
    ("activation_prefill_kv_batch", BATCH),
    ("decode_batch", BATCH),
    ("decode_length", &["sequence"]),
    ("cache_heads", &["autoregressive", "tensor", "tensor_transpose", "tensor_sequence"]),
    ("paged_kv_heads", &["tensor"]),
    ("cache_batch_prefill", &[]),
    ("cache_batch", &[]),
    ("cache_heads_none", &[]),
    ("cache_kv", &[]),
    ("cache_sequence", &[]),
    ("num_pages", &[]),
    ("tokens_per_page", &[]),
    ("paged_kv_head_dim_size", &[]),
    ("mlp_no_fsdp", TENSOR_WEIGHTS),
    ("exp_with_fsdp", &["fsdp"]),
    ("experts_of_router", &[]),
    ("layers_of_token", &[]),
    ("mamba_head", MLP),
    ("position", &[]),
];

/// The default of `mesh_axes`.
const DEFAULT_MESH_AXES: &[&str] = &[
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "sequence",
    "context",
    "context_autoregressive",
    "tensor",
    "tensor_transpose",
    "tensor_sequence",
    "expert",
    "autoregressive",
];

/// A key for the number of devices along one mesh axis.
const fn parallelism(name: &'static str, default: i64, help: &'static str) -> Key {
    Key::integer(name, default, help).at_least(-1.0).acts_on("mesh").may_change()
}

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "LayoutAndSharding",
        title: "Placement",
        prefix: None,
        keys: &[
            Key::texts("mesh_axes", DEFAULT_MESH_AXES, "Axes of the device mesh, outermost first.")
                .acts_on("mesh")
                .may_change(),
            Key::rules(
                "logical_axis_rules",
                RULES,
                "Mesh axes over which each logical axis is split; given rules replace those of the same \
                 names.",
            )
            .acts_on("placement")
            .may_change(),
            Key::texts(
                "input_data_sharding_logical_axes",
                &["activation_embed_and_logits_batch", "activation_norm_length"],
                "Logical axes of an input batch.",
            )
            .acts_on("placement")
            .may_change(),
            Key::text_lists(
                "data_sharding",
                &[&[
                    "data",
                    "stage",
                    "fsdp",
                    "fsdp_transpose",
                    "context",
                    "context_usp_ulysses",
                    "context_autoregressive",
                    "tensor",
                    "tensor_sequence",
                    "expert",
                    "autoregressive",
                ]],
                "Mesh axes over which a host's input batches are split.",
            )
            .no_effect_here("batches are placed by `input_data_sharding_logical_axes`")
            .acts_on("placement")
            .may_change(),
            Key::float(
                "sharding_tolerance",
                0.02,
                "Share of the weights that may be replicated before a warning is printed.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .acts_on("placement")
            .may_change(),
            Key::of::<ShardMode>(
                "shard_mode",
                "auto",
                "Behavior if a rule cannot be applied because its mesh axis does not divide a dimension: \
                 `auto` replicates the dimension, with a note; `explicit` refuses the run. With both, the \
                 compiler places dimensions that no rule names.",
            )
            .acts_on("placement")
            .may_change(),
            Key::boolean("shardy", true, "Partition by Shardy.")
                .no_effect_here("programs are always partitioned by Shardy")
                .acts_on("placement")
                .may_change(),
            Key::boolean(
                "shard_optimizer_over_data",
                false,
                "Shard the optimizer's state over the data axis as well.",
            )
            .acts_on("placement")
            .may_change(),
            Key::text(
                "compile_xla_flags",
                "",
                "Compiler options, such as `--xla_cpu_enable_fast_math=false`, separated by spaces.",
            )
            .acts_on("runtime")
            .may_change(),
            Key::of::<ContextAxis>(
                "context_sharding",
                "context",
                "Mesh axis over which sequences are split under context parallelism.",
            )
            .acts_on("attention")
            .may_change(),
            Key::boolean(
                "internal_compile",
                false,
                "Compile for a device topology known to Google's internal builds only.",
            )
            .no_effect_here(
                "it selects topologies of Google's internal builds, which this program does \
                 not know",
            )
            .acts_on("compilation")
            .may_change(),
            Key::integer(
                "internal_compile_num_devices",
                -1,
                "Number of devices to compile for with `internal_compile`.",
            )
            .no_effect_here(
                "it selects topologies of Google's internal builds, which this program does \
                 not know",
            )
            .acts_on("compilation")
            .may_change(),
            Key::rules(
                "logical_axis_rules_for_eval",
                &[],
                "Rules that replace `logical_axis_rules` during evaluation; `logical_axis_rules` itself if \
                 empty.",
            )
            .acts_on("evaluation")
            .may_change(),
            Key::text(
                "ulysses_context_sharding",
                "context_usp_ulysses",
                "Mesh axis over which Ulysses attention exchanges sequence shards for heads.",
            )
            .refused(features::EXCHANGE_OF_HEADS)
            .only_with("context_parallel_size", &[])
            .acts_on("attention")
            .may_change(),
            Key::boolean("check_vma", false, "Let JAX's `shard_map` check over which mesh axes values vary.")
                .no_effect_here("it checks JAX's `shard_map`, which this program does not use")
                .acts_on("placement")
                .may_change(),
            Key::boolean(
                "dense_fsdp_use_two_stage_all_gather",
                false,
                "All-gather weights that are sharded over `fsdp` and `fsdp_transpose` one axis at a time.",
            )
            .no_effect_here("XLA decides how sharded weights are gathered")
            .acts_on("placement")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "IciParallelism",
        title: "Mesh within a slice",
        prefix: None,
        keys: &[
            parallelism(
                "ici_diloco_parallelism",
                1,
                "Replicas that train separately and synchronize \
                                                      periodically.",
            )
            .refused(features::DILOCO),
            parallelism(
                "ici_data_parallelism",
                1,
                "Devices for data parallelism, each with a replica; -1 takes all remaining devices.",
            ),
            parallelism(
                "ici_fsdp_parallelism",
                -1,
                "Devices over which weights and batch are sharded; -1 takes all remaining devices.",
            ),
            parallelism(
                "ici_fsdp_transpose_parallelism",
                1,
                "As `fsdp`, with the other dimension of the weights sharded.",
            ),
            parallelism(
                "ici_sequence_parallelism",
                1,
                "Devices over which sequences are split outside of \
                                                        attention.",
            ),
            parallelism(
                "ici_context_parallelism",
                1,
                "Devices over which sequences are split, including attention.",
            ),
            parallelism(
                "ici_context_autoregressive_parallelism",
                1,
                "Devices over which the cache of a sequence is split.",
            ),
            parallelism(
                "ici_tensor_parallelism",
                1,
                "Devices over which heads and feed-forward layers are split.",
            ),
            parallelism(
                "ici_tensor_transpose_parallelism",
                1,
                "As `tensor`, with activations and weights exchanged.",
            ),
            parallelism(
                "ici_tensor_sequence_parallelism",
                1,
                "As `tensor`, with the sequence split in the normalization layers.",
            ),
            parallelism(
                "ici_autoregressive_parallelism",
                1,
                "Devices over which weights are split when decoding.",
            ),
            parallelism("ici_pipeline_parallelism", 1, "Pipeline stages of consecutive layers.")
                .refused(features::PIPELINE_PARALLELISM),
            parallelism("ici_expert_parallelism", 1, "Devices over which experts are split."),
            Key::integer(
                "ici_context_usp_ulysses_parallelism",
                1,
                "Devices that exchange heads in attention that combines Ulysses and a ring.",
            )
            .at_least(-1.0)
            .refused(features::EXCHANGE_OF_HEADS)
            .acts_on("mesh")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "DcnParallelism",
        title: "Mesh over slices",
        prefix: None,
        keys: &[
            parallelism(
                "dcn_diloco_parallelism",
                1,
                "Slices that train separately and synchronize \
                                                      periodically.",
            )
            .refused(features::DILOCO),
            parallelism(
                "dcn_data_parallelism",
                -1,
                "Slices for data parallelism, each with a replica; -1 takes all remaining slices.",
            ),
            parallelism("dcn_fsdp_parallelism", 1, "Slices over which weights and batch are sharded."),
            parallelism(
                "dcn_fsdp_transpose_parallelism",
                1,
                "As `fsdp`, with the other dimension of the weights sharded.",
            ),
            parallelism(
                "dcn_sequence_parallelism",
                1,
                "Slices over which sequences are split outside of \
                                                        attention.",
            ),
            parallelism(
                "dcn_context_parallelism",
                1,
                "Slices over which sequences are split, including attention.",
            ),
            parallelism(
                "dcn_context_autoregressive_parallelism",
                1,
                "Slices over which the cache of a sequence is split.",
            ),
            parallelism(
                "dcn_tensor_parallelism",
                1,
                "Slices over which heads and feed-forward layers are split.",
            ),
            parallelism(
                "dcn_tensor_transpose_parallelism",
                1,
                "As `tensor`, with activations and weights exchanged.",
            ),
            parallelism(
                "dcn_tensor_sequence_parallelism",
                1,
                "As `tensor`, with the sequence split in the normalization layers.",
            ),
            parallelism(
                "dcn_autoregressive_parallelism",
                1,
                "Slices over which weights are split when decoding.",
            ),
            parallelism("dcn_pipeline_parallelism", 1, "Slices for pipeline stages of consecutive layers.")
                .refused(features::PIPELINE_PARALLELISM),
            parallelism("dcn_expert_parallelism", 1, "Slices over which experts are split."),
            Key::integer(
                "dcn_context_usp_ulysses_parallelism",
                1,
                "Slices that exchange heads in attention that combines Ulysses and a ring.",
            )
            .at_least(-1.0)
            .refused(features::EXCHANGE_OF_HEADS)
            .acts_on("mesh")
            .may_change(),
        ],
    },
];
