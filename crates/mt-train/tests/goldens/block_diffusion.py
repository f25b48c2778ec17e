"""Writes block_diffusion.safetensors: masked batches of block diffusion and their losses in float64.

Needs torch, transformers 5.23 and safetensors. Hidden tokens are drawn by a second implementation of the masking. Logits
are those of transformers' Llama in float64, with a mask that plain loops write out; losses and their alignment
follow MaxText's definition, in numpy.
"""

import pathlib

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, BLOCK, VOCAB, MASK, SEED, MIN_NOISE = 4, 15, 5, 48, 47, 9, 0.05
DOCUMENTS = [[15], [7, 8], [1, 4, 6], [11]]
WORD = (1 << 64) - 1
TRAINING, EVALUATION = 0, 1


def mix(value):
    z = (value + 0x9E3779B97F4A7C15) & WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def key(parts):
    state = 0x6D61787465787400
    for part in parts:
        state = mix(state ^ mix(part))
    return state


def uniform(block_key, index):
    return (mix(block_key ^ mix(index)) >> 11) / 2**53


def hide(segments, positions, has_seeds, kind, number):
    """Masks of hidden tokens and of tokens with a loss."""
    hidden = np.zeros((ROWS, LENGTH), bool)
    counted = np.zeros((ROWS, LENGTH), bool)
    for row in range(ROWS):
        blocks = {}
        for place in range(LENGTH):
            if segments[row, place]:
                blocks.setdefault((segments[row, place], positions[row, place] // BLOCK), []).append(place)
        for (_, block), places in blocks.items():
            block_key = mix(key([SEED, kind, number, row]) ^ mix(places[0]))
            noise = MIN_NOISE + (1 - MIN_NOISE) * uniform(block_key, 0)
            eligible = places[1:] if has_seeds else places
            chosen = [p for i, p in enumerate(eligible) if uniform(block_key, 2 + i) < noise]
            if eligible and not chosen:
                chosen = [eligible[int(uniform(block_key, 1) * len(eligible))]]
            hidden[row, chosen] = True
            counted[row, chosen] = True
            if has_seeds and block > 0:
                counted[row, places[0]] = True
    return hidden, counted


torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5 + ("norm" in name))
tensors = {}
for name, parameter in model.named_parameters():
    value = parameter.detach().numpy()
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        value = value.T.reshape(12, -1, 4)
    elif name.endswith("o_proj.weight"):
        value = value.T.reshape(3, 4, 12)
    elif name.endswith("_proj.weight") or name == "lm_head.weight":
        value = value.T
    tensors[name] = np.ascontiguousarray(value)
model = model.double()

segments = np.zeros((ROWS, LENGTH), np.int32)
positions = np.zeros((ROWS, LENGTH), np.int32)
for row, documents in enumerate(DOCUMENTS):
    place = 0
    for number, size in enumerate(documents):
        segments[row, place : place + size] = number + 1
        positions[row, place : place + size] = np.arange(size)
        place += size
clean = np.random.default_rng(5).integers(0, VOCAB - 1, (ROWS, LENGTH)).astype(np.int32)
tensors |= {"segments": segments, "positions": positions, "clean": clean}

allowed = np.zeros((ROWS, 1, LENGTH, LENGTH), bool)
for row in range(ROWS):
    for q in range(LENGTH):
        for k in range(LENGTH):
            same = segments[row, q] == segments[row, k]
            allowed[row, 0, q, k] = same and positions[row, k] // BLOCK <= positions[row, q] // BLOCK
mask = torch.from_numpy(np.where(allowed, 0.0, -1e30))

for name, has_seeds, kind in [
    ("same_position", False, TRAINING),
    ("shifted", True, TRAINING),
    ("evaluation", True, EVALUATION),
]:
    hidden, counted = hide(segments, positions, has_seeds, kind, 1)
    inputs = np.where(hidden, MASK, clean)
    model.zero_grad()
    logits = model(
        torch.from_numpy(inputs).long(), attention_mask=mask, position_ids=torch.from_numpy(positions).long()
    ).logits
    if has_seeds:
        # The logits of the position before, as MaxText aligns them.
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    scores = logits.detach().numpy()
    largest = scores.max(-1, keepdims=True)
    log_z = (np.log(np.exp(scores - largest).sum(-1, keepdims=True)) + largest)[..., 0]
    losses = log_z - np.take_along_axis(scores, clean[..., None].astype(int), -1)[..., 0]
    loss = (losses * counted).sum() / counted.sum()
    weights = torch.from_numpy(counted / counted.sum())
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.from_numpy(clean).long(), reduction="none"
    )
    (each * weights).sum().backward()
    tensors[f"{name}.inputs"] = inputs.astype(np.int32)
    tensors[f"{name}.counted"] = counted.astype(np.int32)
    tensors[f"{name}.loss"] = np.array([loss], np.float32)
    tensors[f"{name}.embedding_gradient"] = model.model.embed_tokens.weight.grad.numpy().astype(np.float32)
    tensors[f"{name}.query_gradient"] = np.ascontiguousarray(
        model.model.layers[0].self_attn.q_proj.weight.grad.numpy().T.reshape(12, 3, 4).astype(np.float32)
    )
    print(name, loss, counted.sum(), hidden.sum())

save_file(tensors, pathlib.Path(__file__).parent / "block_diffusion.safetensors")
