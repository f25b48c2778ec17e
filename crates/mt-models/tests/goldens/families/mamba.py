"""The models with layers of Mamba-2, for `generate.py`."""

from transformers import BambaConfig, Mamba2Config


def mamba2():
    # Chunks that do not divide the length, three heads for each of two groups, and a factor of three between the widths.
    yield "mamba2_two_groups", Mamba2Config(
        vocab_size=85, hidden_size=20, num_hidden_layers=3, num_heads=6, head_dim=10, expand=3, n_groups=2, state_size=7,
        conv_kernel=4, chunk_size=8, layer_norm_epsilon=1e-3, tie_word_embeddings=False,
    )
    # One group, biases of projections, and none of the convolution.
    yield "mamba2_biases_tied_one_layer", Mamba2Config(
        vocab_size=90, hidden_size=18, num_hidden_layers=1, num_heads=4, head_dim=9, expand=2, n_groups=1, state_size=5,
        conv_kernel=3, chunk_size=5, use_bias=True, use_conv_bias=False, residual_in_fp32=False, tie_word_embeddings=True,
    )


def bamba():
    # Attention in the second of each two layers.
    yield "bamba_every_second", BambaConfig(
        vocab_size=85, hidden_size=24, intermediate_size=28, num_hidden_layers=4, max_position_embeddings=64,
        num_attention_heads=3, num_key_value_heads=1, attn_layer_indices=[1, 3],
        mamba_n_heads=8, mamba_d_head=6, mamba_n_groups=4, mamba_d_state=5, mamba_d_conv=4, mamba_chunk_size=8,
        rms_norm_eps=1e-3, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    )
    yield "bamba_first_layer_attends_tied", BambaConfig(
        vocab_size=91, hidden_size=20, intermediate_size=36, num_hidden_layers=3, max_position_embeddings=64,
        num_attention_heads=5, num_key_value_heads=1, attn_layer_indices=[0],
        mamba_n_heads=3, mamba_d_head=20, mamba_expand=3, mamba_n_groups=1, mamba_d_state=9, mamba_d_conv=2,
        mamba_chunk_size=4, mamba_conv_bias=False, mamba_proj_bias=True, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=200.0, partial_rotary_factor=0.5),
    )
