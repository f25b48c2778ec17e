"""The one model that is measured, and its optimizer: what every contestant computes, with the standard library alone."""

EMBED, LAYERS, HEADS, HEAD_DIM, MLP, VOCAB = 512, 8, 8, 64, 2048, 32000
LENGTH, BATCH = 512, 4
EPSILON, ROPE_BASE = 1e-5, 10000.0

LEARNING_RATE, BETA1, BETA2, ADAM_EPSILON, WEIGHT_DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0

# Decoding: a prompt, and as many tokens after it.
PROMPT, GENERATED = 32, 256

# The names that a layer's parameters have in published models, with their shapes: outputs first.
LAYER = {
    "input_layernorm": (EMBED,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, EMBED),
    "self_attn.k_proj": (HEADS * HEAD_DIM, EMBED),
    "self_attn.v_proj": (HEADS * HEAD_DIM, EMBED),
    "self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
    "post_attention_layernorm": (EMBED,),
    "mlp.gate_proj": (MLP, EMBED),
    "mlp.up_proj": (MLP, EMBED),
    "mlp.down_proj": (EMBED, MLP),
}


def parameters():
    """The names and shapes of all parameters, as published models have them."""
    yield "model.embed_tokens.weight", (VOCAB, EMBED)
    for index in range(LAYERS):
        for name, shape in LAYER.items():
            yield f"model.layers.{index}.{name}.weight", shape
    yield "model.norm.weight", (EMBED,)
    yield "lm_head.weight", (VOCAB, EMBED)
