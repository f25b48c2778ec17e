"""Writes the directories beside this script: tiny random models of every family in the format of `save_pretrained`,
and the results of transformers for them, in f32 with eager attention.

    pip install torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6
    python generate.py [NAME ...]

README.md lists the files. The script loads every directory that it has written, and checks that the logits are the same.
If the directory has a `config_legacy.json`, in the spelling of older releases, the logits must be the same with it, too.
"""

import json
import pathlib
import shutil
import sys
import zlib

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DeepseekV4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from conditioning import relative, sensitivity
from consolidated import write_consolidated
from indexers import choose_clearly, closest_choice
from mamba import bamba, mamba2

HERE = pathlib.Path(__file__).parent
ROWS, LENGTH = 2, 21
LEARNING_RATE, BETA_1, BETA_2, EPSILON, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0
EAGER = dict(attn_implementation="eager", experts_implementation="eager")
LOCAL, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LLAMA4 = {"llama4", "llama4_text"}


def heads(query, key_value, head_dim):
    return dict(num_attention_heads=query, num_key_value_heads=key_value, head_dim=head_dim)


def sizes(vocab, hidden, intermediate, layers):
    return dict(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        max_position_embeddings=64,
    )


def rope(theta, kind="default", **settings):
    return dict(rope_type=kind, rope_theta=theta, **settings)


def llama():
    yield "llama_six_on_two", LlamaConfig(
        **sizes(80, 24, 32, 2), **heads(6, 2, 6), rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=rope(10000.0), pad_token_id=0,
    )
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48)
    yield "llama_scaled_tied", LlamaConfig(
        **sizes(97, 20, 32, 3), **heads(4, 1, 12), rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=rope(5000.0, "llama3", **scaling), eos_token_id=[2, 5, 7],
    ), dict(rope_theta=5000.0, rope_scaling=dict(rope_type="llama3", **scaling))
    yield "llama_biases_linear_one_layer", LlamaConfig(
        **sizes(101, 30, 44, 1), **heads(3, 1, 10), rms_norm_eps=1e-6, tie_word_embeddings=False,
        attention_bias=True, mlp_bias=True, rope_parameters=rope(1000.0, "linear", factor=4.0),
    ), dict(rope_theta=1000.0, rope_scaling=dict(type="linear", factor=4.0))
    yield "llama_yarn", LlamaConfig(
        **sizes(89, 20, 32, 2), **heads(5, 5, 12), rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=rope(
            100.0, "yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=64, truncate=False
        ),
    )
    # Longer than `max_position_embeddings`, where the base begins to grow with the length.
    yield "llama_dynamic_ntk", LlamaConfig(
        **(sizes(80, 24, 32, 2) | dict(max_position_embeddings=12)), **heads(4, 2, 8), rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=rope(100.0, "dynamic", factor=3.0),
    )
    # As wide as all heads together, as Llama's original format requires.
    yield "llama_square_heads", LlamaConfig(
        **sizes(84, 24, 32, 2), **heads(4, 2, 6), rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=rope(500000.0),
    )


def mistral():
    yield "mistral_window", MistralConfig(
        **sizes(95, 18, 32, 3), **heads(6, 2, 8), rms_norm_eps=1e-5, sliding_window=6, tie_word_embeddings=False,
        rope_parameters=rope(10000.0),
    ), dict(rope_theta=10000.0)
    yield "mistral_full", MistralConfig(
        **sizes(88, 25, 36, 2), **heads(5, 5, 8), rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=True,
        rope_parameters=rope(1000000.0),
    )
    yield "mistral_window_one_layer", MistralConfig(
        **sizes(120, 24, 48, 1), **heads(3, 1, 10), rms_norm_eps=1e-6, sliding_window=2, tie_word_embeddings=False,
        rope_parameters=rope(50.0),
    )


def gemma():
    yield "gemma_multi_query", GemmaConfig(
        **sizes(101, 20, 32, 3), **heads(4, 1, 10), rope_parameters=rope(10000.0), tie_word_embeddings=True
    ), dict(rope_theta=10000.0, hidden_act="gelu", hidden_activation=None)
    yield "gemma_wide_heads_one_layer", GemmaConfig(
        **sizes(90, 27, 50, 1), **heads(3, 3, 14), rms_norm_eps=1e-5, rope_parameters=rope(100.0),
        tie_word_embeddings=True,
    )


def gemma2():
    yield "gemma2_even", Gemma2Config(
        **sizes(80, 24, 32, 2), **heads(6, 2, 8), rope_parameters=rope(10000.0), query_pre_attn_scalar=20,
        sliding_window=5, attn_logit_softcapping=2.5, final_logit_softcapping=3.0, tie_word_embeddings=True,
    )
    yield "gemma2_odd_untied", Gemma2Config(
        **sizes(84, 18, 28, 5), **heads(3, 1, 6), rope_parameters=rope(500.0), query_pre_attn_scalar=10,
        sliding_window=8, attn_logit_softcapping=1.5, final_logit_softcapping=4.0, tie_word_embeddings=False,
    ), dict(rope_theta=500.0, layer_types=None)
    yield "gemma2_uncapped_one_layer", Gemma2Config(
        **sizes(100, 20, 36, 1), **heads(5, 5, 10), rope_parameters=rope(10000.0), query_pre_attn_scalar=4,
        sliding_window=7, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True,
    )


def gemma3():
    # One cycle of six and a remainder of two.
    yield "gemma3_cycle_of_six", Gemma3TextConfig(
        **sizes(80, 20, 24, 8), **heads(4, 1, 8), query_pre_attn_scalar=8, sliding_window=6, tie_word_embeddings=True,
        rope_parameters={LOCAL: rope(10000.0), GLOBAL: rope(1000000.0, "linear", factor=8.0)},
    ), dict(
        rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0),
        sliding_window_pattern=6, layer_types=None, _sliding_window_pattern=None,
    )
    yield "gemma3_cycle_of_three_untied", Gemma3TextConfig(
        **sizes(92, 18, 32, 4), **heads(6, 2, 6), query_pre_attn_scalar=15, sliding_window=4, tie_word_embeddings=False,
        layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL], final_logit_softcapping=3.0, rms_norm_eps=1e-5,
        rope_parameters={LOCAL: rope(30.0), GLOBAL: rope(200.0, "linear", factor=2.0)},
    )
    yield "gemma3_one_layer", Gemma3TextConfig(
        **sizes(104, 30, 40, 1), **heads(5, 5, 10), query_pre_attn_scalar=10, sliding_window=9,
        rope_parameters={LOCAL: rope(10000.0), GLOBAL: rope(1000000.0)}, tie_word_embeddings=True,
    )


def gemma4():
    # One cycle of six and a remainder, whose last layer is made global.
    yield "gemma4_dense_cycle_of_six", Gemma4TextConfig(
        **sizes(80, 20, 20, 8), **heads(4, 2, 6), global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=6, final_logit_softcapping=3.0,
        rope_parameters={
            LOCAL: rope(10000.0), GLOBAL: rope(1000000.0, "proportional", partial_rotary_factor=0.25),
        },
    ), dict(per_layer_config=None, global_head_dim=16, num_global_key_value_heads=1)
    yield "gemma4_dense_separate_values", Gemma4TextConfig(
        **sizes(90, 18, 28, 3), **heads(6, 2, 8), global_head_dim=12, attention_k_eq_v=False,
        hidden_size_per_layer_input=0, sliding_window=4, layer_types=[LOCAL, LOCAL, GLOBAL], rms_norm_eps=1e-5,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(500.0, "proportional", partial_rotary_factor=0.5)},
    )
    yield "gemma4_dense_one_layer", Gemma4TextConfig(
        **sizes(110, 27, 40, 1), **heads(3, 3, 6), global_head_dim=14, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=8, layer_types=[GLOBAL],
        final_logit_softcapping=30.0,
        rope_parameters={
            LOCAL: rope(10000.0), GLOBAL: rope(1000.0, "proportional", partial_rotary_factor=0.75),
        },
    )


def gemma4_moe():
    # One cycle of three and a remainder, whose last layer is made global.
    yield "gemma4_moe_two_of_five", Gemma4TextConfig(
        **sizes(80, 20, 28, 5), **heads(4, 2, 6), global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=6, final_logit_softcapping=3.0,
        layer_types=[LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL], enable_moe_block=True, num_experts=5, top_k_experts=2,
        moe_intermediate_size=18,
        rope_parameters={
            LOCAL: rope(10000.0), GLOBAL: rope(1000000.0, "proportional", partial_rotary_factor=0.25),
        },
    )
    # More experts than tokens.
    yield "gemma4_moe_many_experts_one_layer", Gemma4TextConfig(
        **sizes(90, 18, 20, 1), **heads(3, 3, 8), global_head_dim=12, attention_k_eq_v=False,
        hidden_size_per_layer_input=0, sliding_window=4, layer_types=[GLOBAL], rms_norm_eps=1e-5,
        enable_moe_block=True, num_experts=45, top_k_experts=3, moe_intermediate_size=8,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(500.0, "proportional", partial_rotary_factor=0.5)},
    )
    # All experts are chosen.
    yield "gemma4_moe_all_chosen", Gemma4TextConfig(
        **sizes(85, 16, 24, 2), **heads(5, 1, 6), global_head_dim=6, attention_k_eq_v=False,
        hidden_size_per_layer_input=0, sliding_window=5, layer_types=[LOCAL, GLOBAL], enable_moe_block=True,
        num_experts=3, top_k_experts=3, moe_intermediate_size=10,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(1000.0, "proportional", partial_rotary_factor=1.0)},
    )


def gemma4_small():
    # Three layers borrow keys and values of both kinds and have MLPs of twice the width.
    yield "gemma4_small_double_wide", Gemma4TextConfig(
        **sizes(80, 20, 16, 7), **heads(4, 1, 6), global_head_dim=10, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=80, num_kv_shared_layers=3, use_double_wide_mlp=True, sliding_window=5,
        layer_types=[LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL], final_logit_softcapping=3.0,
        rope_parameters={
            LOCAL: rope(10000.0), GLOBAL: rope(1000000.0, "proportional", partial_rotary_factor=0.25),
        },
    ), dict(per_layer_config=None, global_head_dim=10, num_global_key_value_heads=None)
    yield "gemma4_small_cycle_of_six", Gemma4TextConfig(
        **sizes(81, 20, 16, 7), **heads(3, 1, 8), global_head_dim=10, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=81, num_kv_shared_layers=1, use_double_wide_mlp=False, sliding_window=7,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(1000.0, "proportional", partial_rotary_factor=0.5)},
    )


def wrapped():
    """Text models inside multimodal ones, as most of their sizes are published. The goldens are of text alone."""
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    text = dict(
        **sizes(80, 20, 28, 2), **heads(4, 1, 8), query_pre_attn_scalar=8, sliding_window=6,
        layer_types=[LOCAL, GLOBAL],
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(10000.0, "linear", factor=8.0)},
    )
    images = dict(mm_tokens_per_image=4, image_token_index=79, boi_token_index=77, eoi_token_index=78)
    yield "gemma3_multimodal", Gemma3Config(
        text_config=text, vision_config=vision | dict(image_size=28, patch_size=14), **images
    )
    text = dict(
        **sizes(80, 20, 20, 3), **heads(4, 1, 6), global_head_dim=8, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=80, num_kv_shared_layers=1, use_double_wide_mlp=True, sliding_window=6,
        layer_types=[LOCAL, GLOBAL, GLOBAL], final_logit_softcapping=3.0,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(1000.0, "proportional", partial_rotary_factor=0.5)},
    )
    yield "gemma4_multimodal", Gemma4Config(
        text_config=text, audio_config=None, image_token_id=79, boi_token_id=77, eoi_token_id=78, video_token_id=76,
        vision_config=vision | dict(head_dim=4, num_key_value_heads=2, position_embedding_size=16),
    )


def qwen2():
    yield "qwen2_untied", Qwen2Config(
        **sizes(85, 20, 36, 2), num_attention_heads=5, num_key_value_heads=1, tie_word_embeddings=False,
        rope_parameters=rope(1000000.0), eos_token_id=[3, 4],
    ), dict(rope_theta=1000000.0, sliding_window=4096, layer_types=None)
    yield "qwen2_tied", Qwen2Config(
        **sizes(99, 24, 40, 2), num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters=rope(10000.0), rms_norm_eps=1e-5,
    )
    # The first two layers are global, the others local.
    yield "qwen2_late_windows", Qwen2Config(
        **sizes(82, 16, 32, 5), num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=6, max_window_layers=2, rope_parameters=rope(200.0),
    )


def qwen3():
    yield "qwen3_untied", Qwen3Config(
        **sizes(80, 20, 28, 2), **heads(6, 2, 8), tie_word_embeddings=False, rope_parameters=rope(1000000.0)
    )
    yield "qwen3_tied", Qwen3Config(
        **sizes(92, 20, 32, 3), **heads(5, 5, 6), tie_word_embeddings=True, rope_parameters=rope(100.0),
        rms_norm_eps=1e-5,
    ), dict(rope_theta=100.0, rope_scaling=None)
    yield "qwen3_yarn_one_layer", Qwen3Config(
        **sizes(104, 24, 40, 1), **heads(3, 1, 12), tie_word_embeddings=False,
        rope_parameters=rope(
            100.0, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, attention_factor=1.3
        ),
    )


def olmo3():
    # One cycle of four and a remainder of two.
    yarn = dict(factor=8.0, original_max_position_embeddings=64, beta_fast=6.0, beta_slow=1.0)
    yield "olmo3_yarn", Olmo3Config(
        **sizes(80, 16, 24, 6), num_attention_heads=4, num_key_value_heads=2, sliding_window=6, eos_token_id=2,
        rope_parameters={LOCAL: rope(500000.0), GLOBAL: rope(500000.0, "yarn", attention_factor=1.25, **yarn)},
        tie_word_embeddings=False,
    ), dict(
        rope_theta=500000.0, rope_scaling=dict(rope_type="yarn", attention_factor=1.25, **yarn), layer_types=None
    )
    yield "olmo3_yarn_own_factor", Olmo3Config(
        **sizes(88, 24, 32, 4), num_attention_heads=3, num_key_value_heads=1, sliding_window=8, eos_token_id=2,
        rope_parameters={LOCAL: rope(100.0), GLOBAL: rope(100.0, "yarn", **yarn)}, tie_word_embeddings=False,
    )
    yield "olmo3_default_tied_one_layer", Olmo3Config(
        **sizes(96, 30, 40, 1), num_attention_heads=5, num_key_value_heads=5, sliding_window=3, eos_token_id=2,
        rope_parameters={LOCAL: rope(500000.0), GLOBAL: rope(500000.0)}, tie_word_embeddings=True,
    )


def gpt2():
    yield "gpt2_two_layers", GPT2Config(
        vocab_size=90, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0
    )
    yield "gpt2_narrow_one_layer", GPT2Config(
        vocab_size=111, n_positions=21, n_embd=30, n_layer=1, n_head=5, n_inner=50, layer_norm_epsilon=1e-3,
        bos_token_id=0, eos_token_id=0,
    )


def mixtral():
    yield "mixtral_two_of_five", MixtralConfig(
        **sizes(80, 24, 20, 2), **heads(6, 2, 6), num_local_experts=5, num_experts_per_tok=2, sliding_window=None,
        tie_word_embeddings=False, rope_parameters=rope(10000.0),
    ), dict(rope_theta=10000.0)
    yield "mixtral_window_one_expert", MixtralConfig(
        **sizes(84, 18, 32, 3), **heads(3, 1, 8), num_local_experts=1, num_experts_per_tok=1, sliding_window=6,
        tie_word_embeddings=True, rope_parameters=rope(1000000.0), rms_norm_eps=1e-6,
    )
    # More experts than tokens.
    yield "mixtral_many_experts_one_layer", MixtralConfig(
        **sizes(90, 20, 8, 1), **heads(5, 5, 6), num_local_experts=45, num_experts_per_tok=3, sliding_window=None,
        tie_word_embeddings=False, rope_parameters=rope(100.0),
    )


def qwen3_moe():
    yield "qwen3_moe_three_of_seven", Qwen3MoeConfig(
        **sizes(80, 20, 28, 2), **heads(6, 2, 8), num_experts=7, num_experts_per_tok=3, moe_intermediate_size=18,
        norm_topk_prob=True, tie_word_embeddings=False, rope_parameters=rope(1000000.0),
    ), dict(rope_theta=1000000.0, rope_scaling=None)
    # All experts are chosen.
    yield "qwen3_moe_all_chosen_tied", Qwen3MoeConfig(
        **sizes(92, 16, 32, 3), **heads(5, 5, 6), num_experts=4, num_experts_per_tok=4, moe_intermediate_size=12,
        norm_topk_prob=False, tie_word_embeddings=True, rope_parameters=rope(100.0), rms_norm_eps=1e-5,
    )
    yield "qwen3_moe_one_of_six_one_layer", Qwen3MoeConfig(
        **sizes(85, 24, 40, 1), **heads(3, 1, 12), num_experts=6, num_experts_per_tok=1, moe_intermediate_size=30,
        norm_topk_prob=False, tie_word_embeddings=False, rope_parameters=rope(500.0), use_sliding_window=True,
        sliding_window=5, max_window_layers=0,
    )
    # One cycle of two and a remainder.
    yield "qwen3_moe_every_second", Qwen3MoeConfig(
        **sizes(88, 20, 28, 5), **heads(4, 1, 6), num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14,
        norm_topk_prob=True, tie_word_embeddings=False, rope_parameters=rope(200.0), decoder_sparse_step=2,
    )
    yield "qwen3_moe_dense_first", Qwen3MoeConfig(
        **sizes(83, 18, 26, 3), **heads(6, 3, 4), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        norm_topk_prob=True, tie_word_embeddings=True, rope_parameters=rope(300.0), mlp_only_layers=[0],
    )


def gpt_oss():
    yarn = dict(factor=4.0, beta_fast=4.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64)
    yield "gpt_oss_two_of_four", GptOssConfig(
        **sizes(80, 24, 20, 3), **heads(6, 2, 8), num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        swiglu_limit=2.0, tie_word_embeddings=False, rope_parameters=rope(10000.0, "yarn", **yarn),
    )
    yield "gpt_oss_one_expert_one_layer", GptOssConfig(
        **sizes(91, 18, 30, 1), **heads(3, 3, 6), num_local_experts=1, num_experts_per_tok=1, sliding_window=4,
        tie_word_embeddings=False, rope_parameters=rope(100.0), rms_norm_eps=1e-6,
    )


def deepseek():
    latent = dict(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
    yarn = dict(factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=64)
    # Groups of experts, and layers of both kinds.
    yield "deepseek3_groups", DeepseekV3Config(
        **sizes(80, 24, 28, 4), **latent, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=14,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=18, n_group=4,
        topk_group=2, first_k_dense_replace=2, routed_scaling_factor=2.5, tie_word_embeddings=False,
        rope_parameters=rope(10000.0, "yarn", mscale=1.0, mscale_all_dim=0.7, **yarn),
    )
    # Queries without a latent vector, one group, and experts in every layer.
    yield "deepseek3_direct_queries", DeepseekV3Config(
        **sizes(90, 18, 28, 2), **(latent | dict(v_head_dim=5)), num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=None, n_routed_experts=5, num_experts_per_tok=5, n_shared_experts=2, moe_intermediate_size=12,
        n_group=1, topk_group=1, first_k_dense_replace=0, rope_interleave=False, tie_word_embeddings=False,
        rope_parameters=rope(100.0),
    )
    # Kimi K2: one group of many experts, and other corrections of a longer context. transformers calls it DeepSeek-V3.
    kimi = dict(factor=4.0, beta_fast=1.0, beta_slow=1.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
    yield "kimi_k2_eleven_experts", DeepseekV3Config(
        **sizes(86, 22, 26, 3), **(latent | dict(v_head_dim=7)), num_attention_heads=5, num_key_value_heads=5,
        q_lora_rank=13, n_routed_experts=11, num_experts_per_tok=4, n_shared_experts=1, moe_intermediate_size=9,
        n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope_parameters=rope(50000.0, "yarn", **kimi),
    ), dict(model_type="kimi_k2", rope_theta=50000.0, rope_scaling=dict(type="yarn", **kimi))
    # Experts in the only layer, all of them chosen, and a correction of the longer context that scales attention.
    wide = dict(factor=8.0, beta_fast=2.0, beta_slow=1.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.8)
    yield "kimi_k2_all_chosen_one_layer", DeepseekV3Config(
        **sizes(74, 16, 20, 1), **(latent | dict(qk_nope_head_dim=5, v_head_dim=9)), num_attention_heads=3, num_key_value_heads=3,
        q_lora_rank=8, n_routed_experts=4, num_experts_per_tok=4, n_shared_experts=2, moe_intermediate_size=11,
        n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=2.446, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters=rope(800000.0, "yarn", **wide),
    ), dict(model_type="kimi_k2", rope_theta=800000.0, rope_scaling=dict(type="yarn", **wide))
    yield "deepseek2_greedy", DeepseekV2Config(
        **sizes(85, 24, 30, 3), **latent, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=14,
        first_k_dense_replace=1, tie_word_embeddings=False, topk_method="greedy",
        rope_parameters=rope(10000.0, "yarn", mscale=0.7, mscale_all_dim=0.7, **yarn),
    )
    yield "deepseek2_grouped", DeepseekV2Config(
        **sizes(95, 20, 30, 2), **latent, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=12,
        n_routed_experts=9, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=10, n_group=3,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=4.0, tie_word_embeddings=False,
        topk_method="group_limited_greedy", rope_parameters=rope(500.0),
    )
    # Fewer keys than tokens, more heads of the indexer than of attention, and layers of both kinds.
    yield "deepseek32_groups", DeepseekV32Config(
        **sizes(80, 24, 28, 3), **latent, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=14,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=18, n_group=4,
        topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5, tie_word_embeddings=False,
        index_topk=6, index_head_dim=10, index_n_heads=7,
        rope_parameters=rope(10000.0, "yarn", mscale=1.0, mscale_all_dim=0.7, **yarn),
    )
    # The indexer rotates all of its dimensions.
    yield "deepseek32_one_layer", DeepseekV32Config(
        **sizes(90, 18, 28, 1), **(latent | dict(v_head_dim=5)), num_attention_heads=5, num_key_value_heads=5,
        q_lora_rank=11, n_routed_experts=5, num_experts_per_tok=5, n_shared_experts=2, moe_intermediate_size=12,
        n_group=1, topk_group=1, first_k_dense_replace=0, tie_word_embeddings=False, index_topk=2, index_head_dim=4,
        index_n_heads=6, rope_parameters=rope(100.0),
    )


def deepseek4():
    window, sparse, heavy = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    # The layers of the published model: three with experts by token number, then cycles of two.
    yield "deepseek4_two_cycles", DeepseekV4Config(
        **sizes(80, 20, 14, 7), **heads(6, 1, 12), qk_rope_head_dim=4, q_lora_rank=10, o_groups=3, o_lora_rank=6,
        layer_types=[window, window, sparse, heavy, sparse, heavy, sparse],
        compress_rates={sparse: 4, heavy: 6}, num_hash_layers=3, hc_mult=4, hc_sinkhorn_iters=20, sliding_window=5,
        n_routed_experts=6, num_experts_per_tok=2, swiglu_limit=1.5, index_n_heads=9,
        index_head_dim=8, index_topk=2, rope_theta=10000.0, compress_rope_theta=300.0,
    )
    # As many groups as heads, streams that are no power of two, and a longer context.
    yield "deepseek4_yarn", DeepseekV4Config(
        **sizes(91, 15, 9, 3), **heads(3, 1, 10), qk_rope_head_dim=6, q_lora_rank=7, o_groups=3, o_lora_rank=5,
        layer_types=[heavy, sparse, window], compress_rates={sparse: 4, heavy: 5}, num_hash_layers=1, hc_mult=3,
        hc_sinkhorn_iters=3, sliding_window=4, n_routed_experts=5, num_experts_per_tok=3,
        routed_scaling_factor=0.75, swiglu_limit=2.0, index_n_heads=7, index_head_dim=6, index_topk=3,
        rope_theta=100.0, compress_rope_theta=500.0, rms_norm_eps=1e-5,
        rope_parameters=rope(100.0, "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
    )


def llama4():
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48)
    # One cycle of four and a remainder; layers of all four kinds, and a third and fourth interval of positions.
    yield "llama4_every_second", Llama4TextConfig(
        **sizes(80, 20, 18, 5), **heads(6, 2, 8), intermediate_size_mlp=28, num_local_experts=3, num_experts_per_tok=1,
        interleave_moe_layer_step=2, no_rope_layer_interval=4, attention_chunk_size=6, floor_scale=5, attn_scale=0.4,
        use_qk_norm=True, tie_word_embeddings=False, rope_parameters=rope(5000.0, "llama3", **scaling),
    ), dict(
        rope_theta=5000.0, rope_scaling=dict(rope_type="llama3", **scaling), layer_types=None, moe_layers=None,
        no_rope_layers=[],
    )
    # More experts than tokens, of which each token uses several, and no norms of queries and keys.
    yield "llama4_many_experts", Llama4TextConfig(
        **sizes(92, 16, 10, 3), **heads(5, 5, 6), num_local_experts=45, num_experts_per_tok=3, no_rope_layers=[1, 0, 1],
        attention_chunk_size=8, attn_temperature_tuning=False, use_qk_norm=False, attention_bias=True,
        tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope(100.0),
    )
    # One expert, no chunks, and scaling without a range of interpolation.
    yield "llama4_one_expert_one_layer", Llama4TextConfig(
        **sizes(85, 24, 30, 1), **heads(3, 1, 10), num_local_experts=1, num_experts_per_tok=1, no_rope_layers=[1],
        layer_types=[GLOBAL], tie_word_embeddings=False,
        rope_parameters=rope(500.0, "llama3", **scaling | dict(factor=16.0, high_freq_factor=1.0)),
    )
    yield "llama4_multimodal", Llama4Config(
        text_config=dict(
            **sizes(80, 20, 12, 2), **heads(4, 1, 6), intermediate_size_mlp=28, num_local_experts=2,
            interleave_moe_layer_step=2, no_rope_layer_interval=2, attention_chunk_size=7, floor_scale=6,
            rope_parameters=rope(500000.0),
        ),
        vision_config=dict(
            hidden_size=8, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14,
            vision_output_dim=8, projector_input_dim=8, projector_output_dim=8,
        ),
        image_token_index=79, boi_token_index=77, eoi_token_index=78,
    )




def linear_heads(key, value, key_dim, value_dim, kernel):
    return dict(
        linear_num_key_heads=key, linear_num_value_heads=value, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=kernel,
    )


def qwen3_next():
    # One cycle of four and a remainder of one.
    yield "qwen3_next_cycle", Qwen3NextConfig(
        **sizes(80, 24, 28, 5), **heads(4, 2, 8), **linear_heads(2, 4, 6, 8, 4), num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=18, shared_expert_intermediate_size=18, tie_word_embeddings=False, rms_norm_eps=1e-2,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ), dict(rope_theta=10000.0, partial_rotary_factor=0.5, rope_scaling=None, layer_types=None)
    # Dense layers between those with experts, and three value heads for each key head.
    yield "qwen3_next_dense_between_tied", Qwen3NextConfig(
        **sizes(90, 20, 26, 4), **heads(3, 1, 12), **linear_heads(2, 6, 10, 5, 3), num_experts=4, num_experts_per_tok=4,
        moe_intermediate_size=12, shared_expert_intermediate_size=24, norm_topk_prob=False, decoder_sparse_step=2,
        layer_types=[LINEAR, GLOBAL, LINEAR, GLOBAL], tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters=rope(100.0, partial_rotary_factor=1.0),
    )
    yield "qwen3_next_linear_one_layer", Qwen3NextConfig(
        **sizes(85, 18, 30, 1), **heads(2, 2, 16), **linear_heads(3, 3, 7, 9, 2), num_experts=9, num_experts_per_tok=1,
        moe_intermediate_size=10, shared_expert_intermediate_size=10, layer_types=[LINEAR], tie_word_embeddings=False,
        rope_parameters=rope(500.0, partial_rotary_factor=0.25),
    )


def qwen3_5():
    sections = dict(mrope_interleaved=True, mrope_section=[1, 1, 0])
    # Two cycles of three.
    yield "qwen3_5_dense_cycle_of_three", Qwen3_5TextConfig(
        **sizes(80, 24, 28, 6), **heads(4, 2, 8), **linear_heads(2, 4, 6, 8, 4),
        layer_types=[LINEAR, LINEAR, GLOBAL] * 2, tie_word_embeddings=False,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5, **sections),
    )
    # Layers that repeat in no cycle.
    yield "qwen3_5_dense_irregular_tied", Qwen3_5TextConfig(
        **sizes(91, 20, 36, 4), **heads(5, 1, 16), **linear_heads(3, 9, 4, 6, 3),
        layer_types=[GLOBAL, LINEAR, LINEAR, GLOBAL], tie_word_embeddings=True,
        rope_parameters=rope(200.0, partial_rotary_factor=0.25, **sections),
    )
    yield "qwen3_5_moe_cycle", Qwen3_5MoeTextConfig(
        **({key: value for key, value in sizes(85, 24, 0, 4).items() if key != "intermediate_size"}), **heads(6, 2, 8),
        **linear_heads(2, 6, 8, 4, 4), num_experts=6, num_experts_per_tok=3, moe_intermediate_size=14,
        shared_expert_intermediate_size=14, tie_word_embeddings=False,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5, **sections),
    )
    yield "qwen3_5_moe_linear_one_layer", Qwen3_5MoeTextConfig(
        **({key: value for key, value in sizes(95, 18, 0, 1).items() if key != "intermediate_size"}), **heads(2, 1, 16),
        **linear_heads(1, 1, 5, 11, 4), num_experts=3, num_experts_per_tok=3, moe_intermediate_size=10,
        shared_expert_intermediate_size=20, layer_types=[LINEAR], tie_word_embeddings=False,
        rope_parameters=rope(100.0, partial_rotary_factor=0.25, **sections),
    )


FAMILIES = [llama, mistral, gemma, gemma2, gemma3, gemma4, gemma4_moe, gemma4_small, wrapped, qwen2, qwen3, olmo3, gpt2, mixtral, qwen3_moe, gpt_oss, deepseek, deepseek4, llama4, qwen3_next, qwen3_5, mamba2, bamba]
WITH_GRADIENTS = {"llama_six_on_two", "gemma2_even", "qwen3_untied", "mixtral_two_of_five", "gpt_oss_two_of_four", "deepseek3_groups", "deepseek32_groups", "llama4_every_second", "qwen3_next_cycle", "mamba2_two_groups", "bamba_every_second"}
# Models whose steps are checked to be well conditioned: noise of the size of f32 rounding in the weights, with all steps
# in f64, changes their gradient norms and updates by much less than the tolerance of tests.
WELL_CONDITIONED = {"mamba2_two_groups", "bamba_every_second"}
# Gradients alone, computed in f64: Adam would amplify the noise of small gradients, such as those of a mixture of equal
# streams.
WITH_EXACT_GRADIENTS = {"deepseek4_two_cycles"}
# Keys that older releases did not write.
ABSENT = {"layer_types", "per_layer_config", "_sliding_window_pattern"}
# Added to the seeds of models whose logits would be far from exact in f32: a head's output is normalized, however small.
SALTS = {
    "qwen3_next_cycle": 224, "qwen3_next_dense_between_tied": 1, "qwen3_5_dense_cycle_of_three": 74,
    "qwen3_5_dense_irregular_tied": 4, "qwen3_5_moe_cycle": 1, "mamba2_two_groups": 25, "bamba_every_second": 199,
}
# Copies of the same weights: in several files, and in narrower types.
COPIES = {
    "llama_six_on_two": {"sharded": "12KB", "bfloat16": torch.bfloat16},
    "gemma3_cycle_of_three_untied": {"sharded": "30KB", "float16": torch.float16},
}


def is_transposed(model, key):
    """Whether a tensor of all experts has inputs before outputs."""
    return model.config.model_type in LLAMA4 | {"gpt_oss"} and (key.endswith("experts.gate_up_proj") or key.endswith("experts.down_proj"))


def randomize(model):
    """Gives every parameter and stored buffer values for which it affects the results."""
    centred = {"gemma", "gemma2", "gemma3_text", "gemma3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    for key, value in model.state_dict(keep_vars=True).items():
        noise = torch.randn(value.shape)
        if key.endswith("tid2eid"):
            new = torch.rand(value.shape[0], model.config.n_routed_experts).argsort()[:, : value.shape[1]]
        elif key.endswith("_hc.scale") or key.endswith("hc_scale"):
            new = 0.8 + 0.3 * noise
        elif key.endswith("layer_scalar") or key.endswith("router.scale") or key.endswith("per_expert_scale"):
            new = 0.6 + 0.8 * torch.rand(value.shape)
        elif "norm" in key or "ln_" in key:
            offset_norms = model.config.model_type in centred and "linear_attn" not in key
            new = 0.3 * noise + (0.0 if offset_norms or key.endswith("bias") else 1.0)
            # Gemma 4 does not scale its attention logits.
            new *= 0.6 if "gemma4" in model.config.model_type and ("q_norm" in key or "k_norm" in key) else 1.0
        elif key.endswith("bias") or key.endswith("sinks"):
            new = 0.5 * noise
        elif "embed" in key or "wte" in key or "wpe" in key or "lm_head" in key:
            new = 1.5 * noise * model.config.get_text_config().hidden_size**-0.5
        else:
            fan_in = value.shape[-2] if model.config.model_type == "gpt2" or is_transposed(model, key) else value.shape[-1]
            new = 1.4 * noise * fan_in**-0.5
        with torch.no_grad():
            value.copy_(new)


def class_of(config):
    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def make(name, config):
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(zlib.crc32(name.encode()) + SALTS.get(name, 0))
    model = class_of(config).from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.tie_weights()
    # Excludes the padding token, whose embedding gets no gradient in transformers.
    text = config.get_text_config()
    padding = text.vocab_size - 1 if text.pad_token_id is None else text.pad_token_id
    # The last tokens of a multimodal vocabulary are not text.
    tokens = torch.randint(0, text.vocab_size - (5 if text is not config else 1), (ROWS, LENGTH))
    return model, tokens + (tokens >= padding)


def forward(model, tokens):
    """Logits, and the hidden states before the first layer and after each layer, the last before the final norm."""
    # Some multimodal models hold a whole text model, with its head.
    body = model.transformer.h if hasattr(model, "transformer") else getattr(model, "model", None) or getattr(model, "backbone", None) or model.language_model.model
    layers = getattr(getattr(body, "language_model", body), "layers", body)
    hidden = []
    hooks = [layers[0].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].clone()))]
    for layer in layers:
        hooks.append(layer.register_forward_hook(lambda _, inputs, output: hidden.append((output[0] if isinstance(output, tuple) else output).clone())))
    logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, hidden


def loss_of(model, tokens):
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gradients_of(model, tokens):
    model.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    # Choices of the best keys or blocks have no gradient.
    gradient = lambda value: torch.zeros_like(value) if value.grad is None else value.grad.clone()
    return loss.detach(), {key: gradient(parameter) for key, parameter in model.named_parameters()}


# The names in files of an expert's projections, and of the router.
EXPERTS = {
    "mixtral": ("block_sparse_moe", ["w1", "w3", "w2"]),
    "deepseek_v3": ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    "deepseek_v32": ("mlp", ["gate_proj", "up_proj", "down_proj"]),
    "qwen3_next": ("mlp", ["gate_proj", "up_proj", "down_proj"]),
}


def published(model, tensors):
    """The tensors as in the files, which have some for each expert."""
    if model.config.model_type == "deepseek_v4":
        others = {key: tensors[key] for key in tensors.keys() - dict(model.named_parameters()).keys()}
        tensors = {key: value for key, value in tensors.items() if key not in others}
        return revert_weight_conversion(model, tensors | dict(model.named_buffers(remove_duplicate=False))) | others
    if model.config.model_type not in EXPERTS:
        return tensors
    block, [gate, up, down] = EXPERTS[model.config.model_type]
    # Buffers have no gradients and stay as they are. Tests do not look at them.
    buffers = {key: value for key, value in model.named_buffers() if "correction_bias" in key}
    result = {}
    for key, value in (tensors | buffers).items():
        stem, fused, kind = key.partition("mlp.experts.")
        for expert, matrix in enumerate(value if fused else []):
            parts = {down: matrix} if kind == "down_proj" else dict(zip([gate, up], matrix.chunk(2)))
            result |= {f"{stem}{block}.experts.{expert}.{name}.weight": part for name, part in parts.items()}
        if not fused:
            result[key.replace(".mlp.gate.", f".{block}.gate.")] = value
    return result


def three_steps(model, tokens):
    """AdamW after clipping by the global norm: update = -rate * (m / (sqrt(v) + epsilon) + decay * parameter)."""
    parameters = dict(model.named_parameters())
    first = {key: torch.zeros_like(value) for key, value in parameters.items()}
    second = {key: torch.zeros_like(value) for key, value in parameters.items()}
    losses, norms = [], []
    for step in range(1, 4):
        loss, gradients = gradients_of(model, tokens)
        norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in gradients.values()))
        losses.append(loss)
        norms.append(norm)
        for key, parameter in parameters.items():
            gradient = gradients[key] * min(1.0, CLIP / norm.item())
            first[key] = BETA_1 * first[key] + (1 - BETA_1) * gradient
            second[key] = BETA_2 * second[key] + (1 - BETA_2) * gradient.square()
            mean, square = first[key] / (1 - BETA_1**step), second[key] / (1 - BETA_2**step)
            with torch.no_grad():
                parameter.sub_(LEARNING_RATE * (mean / (square.sqrt() + EPSILON) + DECAY * parameter))
    content = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    return content | {"losses": torch.stack(losses).float(), "gradient_norms": torch.stack(norms).float()}


def write(path, tensors):
    save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, path)


def fuse_experts(model, path):
    """Writes the experts of each layer as the published files have them: in one tensor, not in one for each expert."""
    tensors = {key: value for key, value in model.state_dict().items() if key in dict(model.named_parameters())}
    save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, path, metadata={"format": "pt"})


def write_case(name, config, legacy=None):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model, tokens = make(name, config)
    assert closest_choice(model, tokens) > 1e-3, f"{name}: {closest_choice(model, tokens)}"
    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_5_moe_text":
        fuse_experts(model, folder / "model.safetensors")
    with torch.no_grad():
        logits, hidden = forward(model, tokens)
        names = {f"hidden_{index}": state for index, state in enumerate(hidden)}
        write(folder / "golden.safetensors", {"tokens": tokens.int(), "logits": logits} | names)
        model.double()
        noise = (model(tokens, use_cache=False).logits - logits).abs().max().item() / logits.std().item()
        assert choose_clearly(model, tokens), f"{name}: keys tie"
    assert logits.std() >= 0.5 and noise < 2e-5, f"{name}: deviation {logits.std()}, noise {noise}"

    loaded = class_of(config).from_pretrained(folder, **EAGER)
    # Convolutions round by the alignment of their kernels in memory.
    slack = 1e-5 if any(hasattr(config, key) for key in ["linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"]) else 0.0
    assert (loaded(tokens, use_cache=False).logits - logits).abs().max() <= slack, f"{name} loads as another model"
    if legacy:
        spelled = json.loads((folder / "config.json").read_text())
        spelled["torch_dtype"] = spelled.pop("dtype")
        if "rope_theta" in legacy:
            del spelled["rope_parameters"]
        spelled |= legacy
        for key in ABSENT & legacy.keys():
            del spelled[key]
        (folder / "config_legacy.json").write_text(json.dumps(spelled, indent=2) + "\n")
        old = AutoConfig.for_model(**(spelled | {"model_type": model.config.model_type}))
        loaded = AutoModelForCausalLM.from_pretrained(folder, config=old, **EAGER)
        assert (loaded(tokens, use_cache=False).logits - logits).abs().max() <= slack, f"{name}: the older spelling is another model"

    if name in WITH_GRADIENTS:
        _, expected = gradients_of(make(name, config)[0].double(), tokens)
        model, _ = make(name, config)
        loss, gradients = gradients_of(model, tokens)
        write(folder / "gradients.safetensors", published(model, gradients) | {"loss": loss})
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        after = three_steps(model, tokens)
        write(folder / "adamw.safetensors", published(model, after))
        exact = three_steps(make(name, config)[0].double(), tokens)
        worst = max(relative(gradients[key], expected[key]) for key in expected)
        drift = max(relative(after[key] - value, exact[key].float() - value) for key, value in before.items())
        assert worst < 1e-5 and drift < 3e-4, f"{name}: gradients {worst}, steps {drift}"
        if name in WELL_CONDITIONED:
            of_norms, of_updates = sensitivity(lambda: make(name, config)[0], three_steps, tokens, exact, before)
            assert of_norms < 3e-5 and of_updates < 3e-4, f"{name}: norms {of_norms}, updates {of_updates}"
        print(f"  gradients {worst:.1e}, steps {drift:.1e}, norms {after['gradient_norms'].tolist()}")

    if name in WITH_EXACT_GRADIENTS:
        model = make(name, config)[0].double()
        loss, gradients = gradients_of(model, tokens)
        own = {key: value.float() if value.is_floating_point() else value for key, value in published(model, gradients).items()}
        write(folder / "gradients.safetensors", own | {"loss": loss.float()})
        _, single = gradients_of(make(name, config)[0], tokens)
        worst = {key: relative(single[key], value) for key, value in gradients.items() if value.abs().max() > 1e-7}
        assert max(worst.values()) < 5e-5, f"{name}: gradients {worst}"

    for suffix, kind in COPIES.get(name, {}).items():
        copy = HERE / f"{name}_{suffix}"
        shutil.rmtree(copy, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if suffix == "sharded" else kind)
        model.save_pretrained(copy, max_shard_size=kind if suffix == "sharded" else "5GB")
    if name == "llama_square_heads":
        for suffix, shards in [("consolidated", 1), ("consolidated_shards", 2)]:
            write_consolidated(loaded, HERE / f"{name}_{suffix}", shards)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: deviation {logits.std():.2f}, noise {noise:.1e}, {size / 1000:.0f} kB")


if __name__ == "__main__":
    chosen = set(sys.argv[1:])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name, config, *legacy in (case for family in FAMILIES for case in family()):
        if not chosen or name in chosen:
            write_case(name, config, *legacy)
