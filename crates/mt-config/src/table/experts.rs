//! Mixtures of experts.

use super::{KeyGroup, features};
use crate::{
    families,
    groups::RoutedScores,
    key::{Key, Literal},
};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "MoEGeneral",
        title: "Mixtures of experts",
        prefix: None,
        keys: &[
            Key::integer(
                "num_experts",
                1,
                "Number of experts in each layer that has them; 1 for a plain feed-forward \
                 layer.",
            )
            .at_least(1.0)
            .acts_on("experts"),
            Key::integer("num_experts_per_tok", 1, "Number of experts that process each token.")
                .at_least(1.0)
                .only_with("num_experts", &[])
                .acts_on("experts"),
            Key::float(
                "capacity_factor",
                -1.0,
                "Capacity of each expert, as a multiple of an even share of the tokens; -1 drops no token.",
            )
            .neutral(&[Literal::Float(0.0)])
            .only_with("sparse_matmul", &["false"])
            .acts_on("experts"),
            Key::float(
                "ragged_buffer_factor",
                -1.0,
                "Buffer for tokens from other devices, as a multiple of an even share; -1 for the worst \
                 case.",
            )
            .neutral(&[Literal::Float(0.0)])
            .refused(features::EXPERT_PARALLELISM)
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::integer(
                "moe_expert_input_dim",
                -1,
                "Width of the vectors that enter the experts, which equals `attention_output_dim`.",
            )
            .at_least(-1.0)
            .only_with("decoder_block", &["qwen3_custom_moe"])
            .acts_on("experts"),
            Key::integer(
                "base_moe_mlp_dim",
                -1,
                "Width inside each expert, before `global_parameter_scale`; -1 where it does \
                 not apply.",
            )
            .at_least(-1.0)
            // Such families have an expert even with `num_experts=1`.
            .only_with("decoder_block", families::EXPERTS.names)
            .acts_on("experts"),
            Key::optional_integer(
                "padded_base_moe_mlp_dim",
                "Width that the inside of each expert is padded to for the kernel; no padding \
                 if none.",
            )
            .no_effect_here("it pads weights for a Pallas kernel; grouped matrix products are left to XLA")
            .acts_on("experts")
            .may_change(),
            Key::float(
                "load_balance_loss_weight",
                0.0,
                "Loss weight of the imbalance of tokens over experts; 0 turns it off.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("loss"),
            Key::float(
                "router_z_loss_weight",
                0.0,
                "Loss weight of the squared log-partition function of the router's logits, which keeps \
                 them small; 0 turns it off.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("loss")
            .own(),
            Key::boolean(
                "use_custom_sort_vjp",
                true,
                "Differentiate the sorting of tokens by a dedicated rule instead of the general one.",
            )
            .no_effect_here("how a sort is differentiated is fixed by this program's own autodiff")
            .acts_on("autodiff")
            .may_change(),
            Key::boolean(
                "use_ring_of_experts",
                false,
                "Gather the tokens of all devices to each expert and scatter the sums, instead \
                 of exchanging tokens.",
            )
            .no_effect_here(
                "tokens are always gathered to the devices of their experts, and outputs reduce-scattered",
            )
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "use_gather_mosaic_kernel",
                false,
                "Gather the tokens of each expert with a kernel written for TPUs.",
            )
            .no_effect_here("it selects a Pallas kernel; XLA compiles the gathering of tokens")
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "use_random_routing",
                false,
                "Send tokens to experts chosen at random, to measure speed with an even load. The choice follows \
                 from the number and the position of a token.",
            )
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::integer(
                "interleave_moe_layer_step",
                1,
                "Every layer whose number is a multiple of this has experts; 1 for experts in every layer.",
            )
            .at_least(1.0)
            .only_with("num_experts", &[])
            .acts_on("model"),
            Key::boolean(
                "moe_fsdp_use_two_stage_all_gather",
                false,
                "Gather the weights of experts over `fsdp` and `fsdp_transpose` one after the \
                 other.",
            )
            .no_effect_here("XLA decides how sharded weights are gathered")
            .acts_on("placement")
            .may_change(),
            Key::boolean(
                "shard_exp_on_fsdp",
                false,
                "Split the weights of experts over the `fsdp` axis by expert instead of by \
                 width.",
            )
            .only_with("num_experts", &[])
            .acts_on("placement")
            .may_change(),
            Key::boolean(
                "use_2d_fsdp_sharding",
                false,
                "Split two dimensions of the weights of experts, one over `fsdp` and one over \
                 `fsdp_transpose`.",
            )
            .only_with("num_experts", &[])
            .acts_on("placement")
            .may_change(),
            Key::boolean(
                "norm_topk_prob",
                false,
                "Scale the weights of the chosen experts so that they sum to 1.",
            )
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::boolean("float32_weight_sum", true, "Add up the weighted outputs of experts in float32.")
                .only_with("num_experts", &[])
                .acts_on("experts"),
            Key::boolean("float32_gate_logits", false, "Compute the scores of experts in float32.")
                .only_with("num_experts", &[])
                .acts_on("experts"),
            Key::boolean(
                "prefuse_moe_weights",
                false,
                "Join the gate and input weights of experts when the model is created.",
            )
            .no_effect_here("it prepares weights for vLLM; serving uses this program's own engine")
            .acts_on("server")
            .may_change(),
            Key::integer(
                "num_moe_token_chunks",
                1,
                "Number of chunks of tokens that are sent and computed in turn; 1 for no \
                 chunks.",
            )
            .at_least(1.0)
            .refused(features::EXPERT_PARALLELISM)
            .only_with("num_experts", &[])
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "moe_chunk_barrier",
                false,
                "Finish each chunk of tokens before the next begins, which saves memory but \
                 hides no transfer.",
            )
            .refused(features::EXPERT_PARALLELISM)
            .only_with("num_experts", &[])
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "moe_dispatch_no_expert_sharding",
                false,
                "Leave the expert axis out of the placement of batches inside the layers of \
                 experts.",
            )
            .refused(features::EXPERT_PARALLELISM)
            .only_with("num_experts", &[])
            .acts_on("placement")
            .may_change(),
            Key::boolean(
                "use_ragged_sort",
                false,
                "Sort tokens by expert with a kernel that skips the unfilled rows of the buffers.",
            )
            .no_effect_here(
                "it selects a kernel for the SparseCores of TPUs; XLA compiles the sorting of \
                 tokens",
            )
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "ragged_sort_use_single_sparsecore",
                false,
                "Run the kernels that sort tokens on one SparseCore of the chip only.",
            )
            .no_effect_here(
                "it tunes a kernel for the SparseCores of TPUs; XLA compiles the sorting of \
                 tokens",
            )
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "ragged_gather_fallback",
                false,
                "Gather tokens with plain operations instead of the SparseCore kernel.",
            )
            .no_effect_here(
                "it replaces a kernel for the SparseCores of TPUs; XLA always compiles the \
                 gathering of tokens",
            )
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "ragged_gather_reduce_fallback",
                false,
                "Gather and sum tokens with plain operations instead of the SparseCore kernel.",
            )
            .no_effect_here(
                "it replaces a kernel for the SparseCores of TPUs; XLA always compiles the \
                 summing of tokens",
            )
            .acts_on("experts")
            .may_change(),
            Key::integer(
                "ragged_gather_cost_estimate_flops",
                -1,
                "Operations that the compiler counts for the kernel that gathers tokens; -1 \
                 for its own estimate.",
            )
            .no_effect_here(
                "it describes a Pallas kernel to the scheduler; XLA knows the cost of its own code",
            )
            .acts_on("compilation")
            .may_change(),
            Key::integer(
                "ragged_gather_reduce_cost_estimate_flops",
                -1,
                "Operations that the compiler counts for the kernel that gathers and sums \
                 tokens; -1 for its own estimate.",
            )
            .no_effect_here(
                "it describes a Pallas kernel to the scheduler; XLA knows the cost of its own code",
            )
            .acts_on("compilation")
            .may_change(),
            Key::integer(
                "ragged_gather_cost_estimate_bytes_accessed",
                -1,
                "Bytes of memory that the compiler counts for the kernel that gathers tokens; \
                 -1 for its own estimate.",
            )
            .no_effect_here(
                "it describes a Pallas kernel to the scheduler; XLA knows the cost of its own code",
            )
            .acts_on("compilation")
            .may_change(),
            Key::integer(
                "ragged_gather_reduce_cost_estimate_bytes_accessed",
                -1,
                "Bytes of memory that the compiler counts for the kernel that gathers and sums \
                 tokens; -1 for its own estimate.",
            )
            .no_effect_here(
                "it describes a Pallas kernel to the scheduler; XLA knows the cost of its own code",
            )
            .acts_on("compilation")
            .may_change(),
            Key::boolean(
                "fuse_expert_scales",
                false,
                "Multiply the scale of each expert into its weights ahead of inference.",
            )
            .no_effect_here(
                "the scale of an expert is part of the weight that multiplies its output anyway, and needs no product \
                 of its own",
            )
            .acts_on("experts")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "DeepSeekMoE",
        title: "Experts of DeepSeek",
        prefix: None,
        keys: &[
            Key::integer(
                "first_num_dense_layers",
                0,
                "Number of first layers that have an ordinary feed-forward layer instead of \
                 experts.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("model"),
            Key::integer(
                "shared_experts",
                0,
                "Number of experts that process every token, in addition to the routed experts.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::float(
                "routed_scaling_factor",
                1.0,
                "Factor on the weights with which the results of the routed experts are summed.",
            )
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::of::<RoutedScores>(
                "routed_score_func",
                "",
                "Function that turns the router's logits into scores; the usual one of the \
                 model family if empty.",
            )
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::boolean("routed_bias", false, "Add a bias to each expert's score when experts are chosen.")
                .only_with("num_experts", &[])
                .acts_on("experts"),
            Key::float(
                "routed_bias_update_rate",
                0.0,
                "Update of the routing bias, which falls for busy experts and rises for idle ones; 0 turns \
                 it off.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("optimizer"),
            Key::boolean("mlp_bias", false, "Add biases to the projections of feed-forward layers.")
                .acts_on("experts"),
            Key::integer(
                "n_routing_groups",
                -1,
                "Number of groups that experts are divided into for routing; -1 for no groups.",
            )
            .at_least(-1.0)
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::integer(
                "topk_routing_group",
                -1,
                "Number of groups of experts that a token may choose from; -1 for no groups.",
            )
            .at_least(-1.0)
            .only_with("num_experts", &[])
            .acts_on("experts"),
            Key::boolean(
                "use_batch_split_schedule",
                false,
                "Process each layer for `batch_split_factor` pieces of a batch that do not depend on each \
                 other, so that transfers between experts overlap with computation.",
            )
            .only_with("num_experts", &[])
            .acts_on("experts")
            .may_change(),
            Key::integer(
                "batch_split_factor",
                1,
                "Number of pieces into which `use_batch_split_schedule` splits a batch.",
            )
            .at_least(1.0)
            .only_with("use_batch_split_schedule", &[])
            .acts_on("experts")
            .may_change(),
            Key::boolean(
                "log_moe_bias_norms",
                false,
                "Record the norm of each layer's routing bias among the metrics.",
            )
            .only_with("num_experts", &[])
            .acts_on("metrics")
            .run_level(),
            Key::integer(
                "first_num_hash_layers",
                0,
                "Number of first layers that choose experts by a table of token numbers \
                 instead of scores.",
            )
            .at_least(0.0)
            .only_with("num_experts", &[])
            .acts_on("experts"),
        ],
    },
];
