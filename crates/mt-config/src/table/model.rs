//! The model: its shape, its numbers, and how its layers are executed.

use super::KeyGroup;
use crate::key::Key;

/// Every decoder block of MaxText.
const DECODER_BLOCKS: &[&str] = &[
    "default",
    "llama2",
    "mistral",
    "mixtral",
    "deepseek",
    "deepseek4",
    "envy",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_small",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_custom_moe",
    "qwen3_next",
    "qwen3_5",
    "gpt3",
    "gpt_oss",
    "simple",
    "simple_mlp",
    "llama4",
    "olmo3",
];

const MISSING_BLOCKS: &[(&str, &str)] = &[
    ("default", "the model family `default`"),
    ("mixtral", "the model family `mixtral`"),
    ("deepseek", "the model family `deepseek`"),
    ("deepseek4", "the model family `deepseek4`"),
    ("envy", "the model family `envy`"),
    ("gemma", "the model family `gemma`"),
    ("gemma2", "the model family `gemma2`"),
    ("gemma3", "the model family `gemma3`"),
    ("gemma4", "the model family `gemma4`"),
    ("gemma4_small", "the model family `gemma4_small`"),
    ("qwen2", "the model family `qwen2`"),
    ("qwen3", "the model family `qwen3`"),
    ("qwen3_moe", "the model family `qwen3_moe`"),
    ("qwen3_custom_moe", "the model family `qwen3_custom_moe`"),
    ("qwen3_next", "the model family `qwen3_next`"),
    ("qwen3_5", "the model family `qwen3_5`"),
    ("gpt3", "the model family `gpt3`"),
    ("gpt_oss", "the model family `gpt_oss`"),
    ("simple", "the model family `simple`"),
    ("simple_mlp", "the model family `simple_mlp`"),
    ("llama4", "the model family `llama4`"),
    ("olmo3", "the model family `olmo3`"),
];

const DTYPES: &[&str] = &["bfloat16", "float32", "float16"];

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "ModelArchitecture",
        title: "Model",
        keys: &[
            Key::choice(
                "decoder_block",
                "llama2",
                DECODER_BLOCKS,
                "The kind of layer the decoder is made of.",
            )
            .refuse_choices(MISSING_BLOCKS)
            .acts_on("model"),
            Key::integer(
                "global_parameter_scale",
                1,
                "Makes the model this many times larger, a power of two spread over its dimensions.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_emb_dim",
                2048,
                "Width of the residual stream, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_query_heads",
                16,
                "Number of query heads, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_kv_heads",
                16,
                "Number of key and value heads, before `global_parameter_scale`; it divides the query \
                 heads.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_mlp_dim",
                7168,
                "Width of the feed-forward layers, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer(
                "base_num_decoder_layers",
                16,
                "Number of decoder layers, before `global_parameter_scale`.",
            )
            .at_least(1.0)
            .acts_on("model"),
            Key::integer("head_dim", 128, "Width of one attention head.").at_least(1.0).acts_on("attention"),
            Key::choices(
                "mlp_activations",
                &["silu", "linear"],
                &["silu", "gelu", "relu", "linear"],
                "Activations whose product gates the feed-forward layer.",
            )
            .acts_on("feed-forward layers"),
            Key::float("dense_init_scale", 1.0, "Variance scale of the initial weights of dense layers.")
                .at_least(0.0)
                .acts_on("initialization"),
            Key::float(
                "normalization_layer_epsilon",
                1e-5,
                "What RMS normalization adds to the mean square.",
            )
            .at_least(0.0)
            .acts_on("normalization"),
            Key::boolean("fused_qkv", false, "Compute queries, keys and values with one matrix.")
                .refused("fused query, key and value projections")
                .acts_on("attention"),
            Key::boolean(
                "fused_mlp",
                false,
                "Compute the gate and the input of the feed-forward layer with one matrix.",
            )
            .refused("fused feed-forward projections")
            .acts_on("feed-forward layers"),
            Key::boolean("attention_bias", false, "Add biases to the attention projections.")
                .refused("attention biases")
                .acts_on("attention"),
        ],
    },
    KeyGroup {
        name: "DataTypes",
        title: "Precision",
        keys: &[
            Key::choice("dtype", "bfloat16", DTYPES, "Type in which activations are computed.")
                .refuse_choices(&[("float16", "float16 computation")])
                .acts_on("model"),
            Key::choice("weight_dtype", "float32", DTYPES, "Type in which weights are kept.")
                .refuse_choices(&[("float16", "float16 weights"), ("bfloat16", "bfloat16 weights")])
                .acts_on("model"),
            Key::choice("grad_dtype", "float32", DTYPES, "Type of the weights' gradients.")
                .refuse_choices(&[("float16", "float16 gradients"), ("bfloat16", "bfloat16 gradients")])
                .acts_on("optimizer"),
            Key::choice(
                "matmul_precision",
                "default",
                &["default", "high", "highest", "bfloat16", "float32"],
                "Precision of matrix products inside the compiler.",
            )
            .refused("other matrix product precisions")
            .acts_on("model"),
            Key::boolean("activations_in_float32", false, "Apply activation functions in float32.")
                .refused("float32 activation functions in a bfloat16 model")
                .acts_on("feed-forward layers"),
        ],
    },
    KeyGroup {
        name: "Logits",
        title: "Output head",
        keys: &[
            Key::boolean("logits_via_embedding", false, "Use the embedding table as the output matrix.")
                .acts_on("output head"),
            Key::boolean(
                "normalize_embedding_logits",
                true,
                "With the embedding table as output matrix, divide logits by the square root of the \
                 width.",
            )
            .acts_on("output head"),
            Key::boolean(
                "logits_dot_in_fp32",
                false,
                "Compute the product with the output matrix in float32.",
            )
            .acts_on("output head"),
            Key::boolean("cast_logits_to_fp32", true, "Convert logits to float32 before the loss.")
                .no_effect_here("the loss is always computed in float32")
                .acts_on("output head"),
            Key::optional_float("final_logits_soft_cap", "Bounds the logits smoothly at this magnitude.")
                .at_least(0.0)
                .refused("soft caps on logits")
                .acts_on("output head"),
            Key::float("z_loss_multiplier", 0.0, "Weight of the squared log-partition function in the loss.")
                .refused("the z-loss")
                .acts_on("loss"),
        ],
    },
    KeyGroup {
        name: "Attention",
        title: "Attention",
        keys: &[
            Key::choice(
                "attention",
                "autoselected",
                &[
                    "autoselected",
                    "dot_product",
                    "flash",
                    "cudnn_flash_te",
                    "cudnn_flash_jax",
                    "paged",
                    "vllm_rpa",
                ],
                "How attention is computed: dense (`dot_product`), block by block in memory linear in \
                 the length (`flash`), or by size.",
            )
            .refuse_choices(&[
                ("cudnn_flash_te", "cuDNN attention"),
                ("cudnn_flash_jax", "cuDNN attention"),
                ("paged", "paged attention"),
                ("vllm_rpa", "paged attention"),
            ])
            .acts_on("attention")
            .may_change(),
            Key::choice(
                "attention_type",
                "global",
                &["global", "local_sliding", "chunk", "mla", "full", "compressed", "block_diffusion"],
                "Which earlier positions a position attends to.",
            )
            .refused("other attention types")
            .acts_on("attention"),
            Key::boolean("float32_qk_product", false, "Multiply queries and keys in float32.")
                .acts_on("attention"),
            Key::boolean("float32_logits", false, "Apply the attention softmax in float32.")
                .acts_on("attention"),
            Key::integer("sliding_window_size", 0, "Number of positions that local attention sees.")
                .at_least(0.0)
                .refused("local attention")
                .acts_on("attention"),
            Key::optional_float(
                "attn_logits_soft_cap",
                "Bounds attention logits smoothly at this magnitude.",
            )
            .at_least(0.0)
            .refused("soft caps on attention logits")
            .acts_on("attention"),
            Key::boolean("attention_sink", false, "Give each head a learned logit that attends to nothing.")
                .refused("attention sinks")
                .acts_on("attention"),
            Key::boolean("use_qk_norm", false, "Normalize queries and keys.")
                .refused("query and key normalization")
                .acts_on("attention"),
        ],
    },
    KeyGroup {
        name: "Rope",
        title: "Positions",
        keys: &[
            Key::choice(
                "rope_type",
                "default",
                &["default", "llama3.1", "yarn"],
                "How rotary frequencies are scaled to longer contexts.",
            )
            .refuse_choices(&[("llama3.1", "Llama 3.1 rotary scaling"), ("yarn", "YaRN rotary scaling")])
            .acts_on("rotary embedding"),
            Key::boolean("rope_use_scale", true, "Scale frequencies when `rope_type=llama3.1`.")
                .no_effect_here("it belongs to `rope_type=llama3.1`")
                .acts_on("rotary embedding"),
            Key::integer("rope_min_timescale", 1, "Shortest rotary wavelength, over 2π.")
                .at_least(1.0)
                .acts_on("rotary embedding"),
            Key::integer("rope_max_timescale", 10_000, "Longest rotary wavelength, over 2π (theta).")
                .at_least(1.0)
                .acts_on("rotary embedding"),
            Key::float("rope_linear_scaling_factor", 1.0, "Divides positions before they are embedded.")
                .refused("linear rotary scaling")
                .acts_on("rotary embedding"),
            Key::boolean("use_iota_embed", false, "Look embeddings up by a product with one-hot vectors.")
                .no_effect_here("embeddings are gathered, which gives the same numbers")
                .acts_on("embedding")
                .may_change(),
        ],
    },
    KeyGroup {
        name: "RematAndOffload",
        title: "Execution of layers",
        keys: &[
            Key::choice(
                "remat_policy",
                "full",
                &[
                    "full",
                    "minimal",
                    "none",
                    "minimal_with_context",
                    "minimal_with_quantization",
                    "minimal_with_context_and_quantization",
                    "save_dot_with_context_except_mlp",
                    "save_dot_except_mlpwi",
                    "save_dot_except_mlp",
                    "save_qkv_proj",
                    "save_out_proj",
                    "qkv_proj_offloaded",
                    "minimal_offloaded",
                    "custom",
                ],
                "What the backward pass recomputes: all of a layer (`full`), all but the results of \
                 its matrix products (`minimal`), or nothing (`none`).",
            )
            .refuse_choices(&[
                ("minimal_with_context", "the remat policy `minimal_with_context`"),
                ("minimal_with_quantization", "the remat policy `minimal_with_quantization`"),
                (
                    "minimal_with_context_and_quantization",
                    "the remat policy `minimal_with_context_and_quantization`",
                ),
                ("save_dot_with_context_except_mlp", "the remat policy `save_dot_with_context_except_mlp`"),
                ("save_dot_except_mlpwi", "the remat policy `save_dot_except_mlpwi`"),
                ("save_dot_except_mlp", "the remat policy `save_dot_except_mlp`"),
                ("save_qkv_proj", "the remat policy `save_qkv_proj`"),
                ("save_out_proj", "the remat policy `save_out_proj`"),
                ("qkv_proj_offloaded", "offloading activations"),
                ("minimal_offloaded", "offloading activations"),
                ("custom", "custom remat policies"),
            ])
            .acts_on("autodiff")
            .may_change(),
            Key::boolean("scan_layers", true, "Compile one layer and loop over the stacked weights of all.")
                .acts_on("model"),
            Key::integer(
                "param_scan_axis",
                1,
                "Where stacked weights have their layer axis in a checkpoint.",
            )
            .at_least(0.0)
            .at_most(1.0)
            .acts_on("checkpoint"),
        ],
    },
];
