"""GPT-3 in the layout of Pax, from the directories of GPT-2 in families/: python generate.py. TensorStore writes the arrays,
compressed as JAX's own serialization does.

Pax stacks layers along the first axis and joins queries, keys and values; the scale of a norm is one less than GPT-2's.
"""

import json
import pathlib
import shutil

import numpy
import tensorstore
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).parent
FAMILIES = HERE.parent / "families"
LAYERS = "transformer.repeat.sub.x_layers_0"


def arrays(folder):
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    state = {name.removeprefix("transformer."): array for name, array in state.items()}
    heads, dims, count = config["n_head"], config["n_embd"], config["n_layer"]
    stack = lambda name, change=lambda array: array: numpy.stack([change(state[f"h.{i}.{name}"]) for i in range(count)])
    return {
        "softmax.logits_ffn.linear.w": state["wte.weight"].T,
        "position_emb.emb_var": state["wpe.weight"],
        "final_ln.scale": state["ln_f.weight"] - 1,
        "final_ln.bias": state["ln_f.bias"],
        f"{LAYERS}.layer_norm.scale": stack("ln_1.weight") - 1,
        f"{LAYERS}.layer_norm.bias": stack("ln_1.bias"),
        f"{LAYERS}.self_attention.combined_qkv.w": stack(
            "attn.c_attn.weight", lambda array: array.reshape(dims, 3, heads, -1).transpose(1, 0, 2, 3)
        ),
        f"{LAYERS}.self_attention.combined_qkv.b": stack("attn.c_attn.bias", lambda array: array.reshape(3, heads, -1)),
        f"{LAYERS}.self_attention.post.w": stack("attn.c_proj.weight", lambda array: array.T.reshape(dims, heads, -1)),
        f"{LAYERS}.self_attention.post.b": stack("attn.c_proj.bias"),
        f"{LAYERS}.ff_layer.layer_norm.scale": stack("ln_2.weight") - 1,
        f"{LAYERS}.ff_layer.layer_norm.bias": stack("ln_2.bias"),
        f"{LAYERS}.ff_layer.ffn_layer1.linear.w": stack("mlp.c_fc.weight"),
        f"{LAYERS}.ff_layer.ffn_layer1.bias.b": stack("mlp.c_fc.bias"),
        f"{LAYERS}.ff_layer.ffn_layer2.linear.w": stack("mlp.c_proj.weight"),
        f"{LAYERS}.ff_layer.ffn_layer2.bias.b": stack("mlp.c_proj.bias"),
    }


def write(path, array):
    array = numpy.ascontiguousarray(array)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "shape": array.shape, "chunks": [*array.shape[:-1], (array.shape[-1] + 1) // 2] if array.shape else [],
            "dtype": array.dtype.str, "compressor": {"id": "gzip"},
        },
        "create": True,
    }
    tensorstore.open(spec).result().write(array).result()


for name, place in [("gpt2_two_layers", "state"), ("gpt2_narrow_one_layer", "")]:
    shutil.rmtree(HERE / name, ignore_errors=True)
    for key, array in arrays(FAMILIES / name).items():
        write(HERE / name / place / f"mdl_vars.params.lm.{key}", array)
        # The optimizer's moments are left out when weights are read.
        if key.startswith("final"):
            write(HERE / name / place / f"opt_states_0.no_prefix_2.m.params.lm.{key}", array * 0)
    write(HERE / name / place / "step", numpy.int32(4000))
