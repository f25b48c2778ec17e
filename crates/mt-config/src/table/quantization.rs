//! Quantization and sparsity.

use super::{KeyGroup, features};
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[KeyGroup {
    name: "Quantization",
    title: "Quantization",
    prefix: None,
    keys: &[
        Key::choice(
            "quantization",
            "",
            &[
                "",
                "fp4",
                "int4",
                "int8",
                "intmp",
                "fp8_e5m2",
                "fp8_e4m3",
                "fp8",
                "nanoo_fp8",
                "fp8_nanoo",
                "fp8_gpu",
                "fp8_full",
                "te_fp8_delayedscaling",
                "te_fp8_currentscaling",
                "te_mxfp8",
                "te_nvfp4",
                "te_nvfp4_no_rht",
            ],
            "Number format of quantized matrix products or served weights; none if empty.",
        )
        .or_none()
        .neutral(&[Literal::None])
        .refused(features::QUANTIZATION)
        .acts_on("quantization"),
        Key::boolean(
            "replicate_quant_scale",
            false,
            "Replicate the scales of quantized weights instead of sharding them.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("placement")
        .may_change(),
        Key::text(
            "quant_cfg_path",
            "",
            "JSON file that gives bits, scales and tile sizes by layer for mixed precision \
             (`intmp`).",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::boolean("quantize_kvcache", false, "Quantize the KV cache when decoding.")
            .refused(features::QUANTIZED_CACHE)
            .acts_on("decoding")
            .may_change(),
        Key::choice(
            "kv_quant_axis",
            "heads_and_dkv",
            &["", "dkv", "heads_and_dkv"],
            "Axes that share a scale in the quantized cache: each head on its own (`dkv`) \
             or all heads together.",
        )
        .refused(features::QUANTIZED_CACHE)
        .only_with("quantize_kvcache", &[])
        .acts_on("decoding")
        .may_change(),
        Key::choice(
            "kv_quant_dtype",
            "int8",
            &["int8", "int4"],
            "Type of the quantized keys and values in the cache.",
        )
        .refused(features::QUANTIZED_CACHE)
        .only_with("quantize_kvcache", &[])
        .acts_on("decoding")
        .may_change(),
        Key::integer(
            "quantization_local_shard_count",
            -1,
            "Number of shards that each calibrate their own range; -1 for one per slice.",
        )
        .at_least(-1.0)
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::boolean(
            "use_qwix_quantization",
            false,
            "Quantize by the rules of the Qwix library instead of those of the older AQT.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::boolean(
            "use_manual_quantization",
            false,
            "Quantize tensors by hand, at fixed ranges, in the schedule that splits \
             batches.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::text(
            "weight_quantization_calibration_method",
            "absmax",
            "How the range of quantized weights is found: from the largest magnitude \
             (`absmax`) or fixed.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::text(
            "act_quantization_calibration_method",
            "absmax",
            "How the range of quantized activations is found: from the largest magnitude \
             (`absmax`) or fixed.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::text(
            "bwd_quantization_calibration_method",
            "absmax",
            "How the range of quantized gradients in the backward pass is found: from the \
             largest magnitude (`absmax`) or fixed.",
        )
        .refused(features::QUANTIZATION)
        .only_with("quantization", &[])
        .acts_on("quantization"),
        Key::optional_integer(
            "weight_sparsity_n",
            "Largest number of weights other than zero in each block of \
             `weight_sparsity_m`; off if none.",
        )
        .at_least(1.0)
        .refused(features::SPARSE_WEIGHTS)
        .acts_on("model"),
        Key::optional_integer(
            "weight_sparsity_m",
            "Number of weights in each block of which at most `weight_sparsity_n` stay; \
             off if none.",
        )
        .at_least(1.0)
        .refused(features::SPARSE_WEIGHTS)
        .only_with("weight_sparsity_n", &[])
        .acts_on("model"),
        Key::integer(
            "weight_sparsity_update_step",
            10,
            "Number of steps between updates of the masks of sparse weights.",
        )
        .at_least(1.0)
        .refused(features::SPARSE_WEIGHTS)
        .only_with("weight_sparsity_n", &[])
        .acts_on("model"),
        Key::integer(
            "weight_sparsity_start_step",
            50,
            "Number of steps before the masks of sparse weights are first computed.",
        )
        .at_least(0.0)
        .refused(features::SPARSE_WEIGHTS)
        .only_with("weight_sparsity_n", &[])
        .acts_on("model"),
        Key::choice(
            "te_comm_gemm_overlap",
            "disabled",
            &["disabled", "mlp", "full"],
            "Layers whose matrix products overlap with communication by TransformerEngine.",
        )
        .no_effect_here(
            "TransformerEngine is not used; XLA overlaps communication and matrix products \
             itself",
        )
        .acts_on("runtime")
        .may_change(),
    ],
}];
