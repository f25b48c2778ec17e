"""Gemma in the layout of Kaggle, from the directories of families/: python generate.py. Orbax writes the checkpoints.

The parameters are those of Google's library, whose keys are paths: `transformer/layer_0/attn/q_einsum` with `w`. Heads
are an axis of their own, both halves of the gate are one array, and outputs come last.
"""

import json
import pathlib
import shutil

import numpy
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
FAMILIES = HERE.parent / "families"


def parameters(folder, nests, transposes_gate):
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    split = lambda name, count: state[name].reshape(count, width, -1).transpose(0, 2, 1)
    tree = {
        "transformer/embedder": {"input_embedding": state["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": state["model.norm.weight"]},
    }
    for layer in range(config["num_hidden_layers"]):
        theirs, own = f"model.layers.{layer}.", f"transformer/layer_{layer}/"
        queries, keys, values = (
            split(f"{theirs}self_attn.{name}_proj.weight", count)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if heads == kv_heads:
            tree[f"{own}attn/qkv_einsum"] = {"w": numpy.stack([queries, keys, values])}
        else:
            tree[f"{own}attn/q_einsum"] = {"w": queries}
            tree[f"{own}attn/kv_einsum"] = {"w": numpy.stack([keys, values])}
        output = state[f"{theirs}self_attn.o_proj.weight"]
        tree[f"{own}attn/attn_vec_einsum"] = {"w": output.T.reshape(heads, width, -1)}
        gate = numpy.stack([state[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        gate = gate if transposes_gate else gate.transpose(0, 2, 1)
        down = state[f"{theirs}mlp.down_proj.weight"].T
        if nests:
            tree[f"{own}mlp/gating_einsum"], tree[f"{own}mlp/linear"] = {"w": gate}, {"w": down}
        else:
            tree[f"{own}mlp"] = {"gating_einsum": gate, "linear": down}
        norms = {"pre_attention_norm": "input_layernorm"}
        if config["model_type"] == "gemma":
            norms["pre_ffw_norm"] = "post_attention_layernorm"
        else:
            norms |= {"post_attention_norm": "post_attention_layernorm"}
            norms |= {f"{place}_ffw_norm": f"{place}_feedforward_layernorm" for place in ("pre", "post")}
        for name, norm in norms.items():
            tree[own + name] = {"scale": state[f"{theirs}{norm}.weight"]}
        if config["model_type"] == "gemma3_text":
            for name in ("query", "key"):
                tree[f"{own}attn/_{name}_norm"] = {"scale": state[f"{theirs}self_attn.{name[0]}_norm.weight"]}
    if config["model_type"] == "gemma3_text":
        tree["SigLiPFromPatches_0/siglip_encoder/embedding"] = {"kernel": numpy.zeros((2, 3), numpy.float32)}
    return tree


for name, nests, transposes_gate in (
    ("gemma_multi_query", False, False),
    ("gemma2_even", True, True),
    ("gemma3_one_layer", True, True),
):
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    tree = {key: {name: numpy.ascontiguousarray(array) for name, array in value.items()}
            for key, value in parameters(FAMILIES / name, nests, transposes_gate).items()}
    ocp.PyTreeCheckpointer().save(target.absolute(), tree)
