"""Writes learned_maps.safetensors: losses of students whose attention is a learned map of a teacher's, and their gradients.

Needs torch, transformers 5.23 and safetensors. Two small Llamas with random weights are applied to one batch in float64. The
projections of the student are computed from the teacher's by MaxText's equations, which hold for kernels with the scale
of attention folded into the query.
"""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH, VOCAB, WIDTH, LAYERS = 6, 13, 40, 12, 2
# Tokens of each row, and the first of its targets with a loss.
SIZES = [(8, 3), (7, 0), (13, 4), (11, 7), (3, 1), (9, 8)]
# Heads of queries, of keys, and their width.
TEACHER, STUDENT = (4, 2, 4), (3, 1, 6)

torch.manual_seed(11)
torch.set_default_dtype(torch.float64)


def model(heads, middle, scale):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=middle, num_hidden_layers=LAYERS,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2], rms_norm_eps=1e-5, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager", tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Stored numbers are exact in float32.
            parameter.copy_((torch.randn_like(parameter) * scale + ("norm" in name)).float().double())
    return made.eval()


def drawn(*dims):
    return (torch.randn(dims) * 0.5).float().double()


teacher, student = model(TEACHER, 20, 0.5), model(STUDENT, 12, 0.4)
own = dict(student.named_parameters())
frozen = {name: value.detach() for name, value in teacher.named_parameters()}
maps = {}
for layer in range(LAYERS):
    for name in "qkvo":
        x, u = (TEACHER[0], STUDENT[0]) if name in "qo" else (TEACHER[1], STUDENT[1])
        y, v = TEACHER[2], STUDENT[2]
        key = f"model.layers.{layer}.self_attn.{name}_proj"
        maps[f"{key}.A"] = drawn(x, u)
        maps[f"{key}.B"] = drawn(v, y) if name == "o" else drawn(y, v)
        maps[f"{key}.W"] = drawn(x, y, u, v)

tokens = torch.randint(3, VOCAB, (ROWS, LENGTH + 1))
places = torch.arange(LENGTH)
present = torch.stack([places < size for size, _ in SIZES]).long()
counted = torch.stack([(places >= first) & (places < size) for size, first in SIZES])
inputs, targets = tokens[:, :-1] * present, tokens[:, 1:]
tensors = {"inputs": inputs, "targets": targets, "segments": present, "counted": counted.long()}
tensors = {name: value.to(torch.int32) for name, value in tensors.items()}
for prefix, values in [("teacher", frozen), ("student", own), ("student", maps)]:
    tensors |= {f"{prefix}.{name}": value.detach().float().clone() for name, value in values.items()}


def projection(key, arrays, is_general):
    """The published weight of a projection of the student."""
    is_out = key.endswith("o_proj")
    heads = TEACHER[1] if key[-6] in "kv" else TEACHER[0]
    weight = frozen[f"{key}.weight"]
    if is_out:
        kernel = weight.T.reshape(heads, TEACHER[2], WIDTH)
        made = (
            torch.einsum("xyb,xyuv->uvb", kernel, arrays[f"{key}.W"]) if is_general
            else torch.einsum("xyb,xu,vy->uvb", kernel, arrays[f"{key}.A"], arrays[f"{key}.B"])
        )
        return made.reshape(-1, WIDTH).T
    kernel = weight.T.reshape(WIDTH, heads, TEACHER[2])
    if key.endswith("q_proj"):
        kernel = kernel * TEACHER[2] ** -0.5
    made = (
        torch.einsum("bxy,xyuv->buv", kernel, arrays[f"{key}.W"]) if is_general
        else torch.einsum("bxy,xu,yv->buv", kernel, arrays[f"{key}.A"], arrays[f"{key}.B"])
    )
    if key.endswith("q_proj"):
        made = made / STUDENT[2] ** -0.5
    return made.reshape(WIDTH, -1).T


def record(case, layers=range(LAYERS), is_general=False, shared=()):
    wanted = "W" if is_general else "AB"
    arrays = {name: value.clone().requires_grad_() for name, value in maps.items() if name[-1] in wanted}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in own.items()} | arrays
    values = dict(leaves)
    for source, target in shared:
        values[target] = values[source]
    parameters = {name: values[name] for name in own}
    for layer in layers:
        for name in "qkvo":
            key = f"model.layers.{layer}.self_attn.{name}_proj"
            parameters[f"{key}.weight"] = projection(key, values, is_general)
    logits = functional_call(student, parameters, kwargs={"input_ids": inputs, "attention_mask": present}).logits
    other = teacher(input_ids=inputs, attention_mask=present).logits.detach()
    soft = F.kl_div(
        F.log_softmax(logits[counted], -1), F.log_softmax(other[counted], -1), reduction="none", log_target=True
    ).sum(-1).mean()
    loss = 0.5 * F.cross_entropy(logits[counted], targets[counted]) + 0.5 * soft
    loss.backward()
    tensors[f"{case}.loss"] = loss.detach().float().reshape(1)
    for name, value in leaves.items():
        # Parameters that others determine have no gradient, and are left out.
        if value.grad is not None:
            tensors[f"{case}.{name}"] = value.grad.float().clone()
    print(f"{case:12} {loss.item():.6f}")


record("bilinear")
record("general", is_general=True)
record("one_layer", layers=[1])
record("shared", shared=[
    ("model.layers.0.self_attn.q_proj.A", "model.layers.1.self_attn.q_proj.A"),
    ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"),
    ("model.layers.1.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
])
path = pathlib.Path(__file__).parent / "learned_maps.safetensors"
save_file({name: value.contiguous() for name, value in tensors.items()}, path)
