"""Writes maxtext_states: states of tiny models after three steps, written by Orbax in MaxText's layout, and
maxtext_states.safetensors: the losses of the next five steps, and the states after them.

The steps are those of plain JAX and optax, in f64, on what MaxText stores: AdamW with clipping, warm-up and decay. Names
and axes are those of the trees that MaxText's own checkpoints have. Needs jax, optax, numpy, safetensors and
orbax-checkpoint.
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

from plain_models import ADAM, CLIP, DECAY, LAYERS, first, loss, positions, schedule, segments, shapes, targets, tokens

BEFORE, AFTER = 3, 5
HERE = pathlib.Path(__file__).parent

OF_MODEL = {
    "token_embedder.embedding": "token_embedder/embedding",
    "final_norm.scale": "decoder/decoder_norm/scale",
    "head.kernel": "decoder/logits_dense/kernel",
}
NORMS = {"pre_attention_norm": "pre_self_attention_layer_norm", "pre_mlp_norm": "post_self_attention_layer_norm"}
OF_GEMMAS = {
    "pre_attention_norm": "pre_self_attention_norm",
    "post_attention_norm": "post_self_attention_norm",
    "pre_mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}
# The directories of attention and of experts.
ATTENTION = {"gpt_oss": "GptOssAttention"}
EXPERTS = {"mixtral": "MoeBlock_0", "gpt_oss": "GptOssMlp", "deepseek": "DeepSeekMoeBlock_0/MoeBlock_0"}


def place(family, layer, scanned):
    """The directory of a layer, and its index among those that share it; `None` if it has one of its own."""
    if family == "deepseek":
        kind = "dense_layers" if layer == 0 else "moe_layers"
        return (f"decoder/{kind}", 0) if scanned else (f"decoder/{kind}_0", None)
    if family in ("gemma3", "gpt_oss"):
        return (f"decoder/layers/layers_{layer}", 0) if scanned else (f"decoder/layers_{layer}", None)
    if family == "gemma2":
        return ("decoder/layers", 0) if scanned else ("decoder/layers_0", None)
    return ("decoder/layers", layer) if scanned else (f"decoder/layers_{layer}", None)


def within(family, layer, role):
    """The name of a weight in the directory of its layer."""
    part, *rest = role.split(".")
    rest = "/".join(rest)
    if part == "attention":
        made = f"{ATTENTION.get(family, 'self_attention')}/{rest}"
    elif part == "router":
        made = f"{EXPERTS[family]}/gate/{rest}"
    elif part == "experts":
        made = f"{EXPERTS[family]}/{rest}"
    elif part == "shared":
        made = f"DeepSeekMoeBlock_0/shared_experts/{rest.removeprefix('mlp/')}"
    elif part == "mlp":
        made = f"mlp/{rest}"
    else:
        made = f"{(OF_GEMMAS if family.startswith('gemma') else NORMS)[part]}/{rest}"
    if family == "gemma2":
        directory, rest = made.split("/", 1)
        made = f"{directory}_{'local' if layer == 0 else 'global'}/{rest}"
    return made


def stored(family, weights, scanned):
    """Arrays by MaxText's paths, with layers along axis 1."""
    arrays, layers = {}, {}
    for name, array in weights.items():
        if name in OF_MODEL:
            arrays[OF_MODEL[name]] = np.asarray(array, np.float32)
            continue
        _, layer, role = name.split(".", 2)
        directory, index = place(family, int(layer), scanned)
        path = f"{directory}/{within(family, int(layer), role)}"
        if index is None:
            arrays[path] = np.asarray(array, np.float32)
        else:
            layers.setdefault(path, {})[index] = np.asarray(array, np.float32)
    return arrays | {path: np.stack([of[i] for i in sorted(of)], 1) for path, of in layers.items()}


def nested(arrays):
    tree = {}
    for path, array in arrays.items():
        *directories, name = path.split("/")
        node = tree
        for directory in directories:
            node = node.setdefault(directory, {})
        node[name] = array
    return {"params": tree}


def write(case, family, scanned, weights, state):
    adam, *_ = state
    tree = lambda weights: nested(stored(family, weights, scanned))
    count = np.asarray(BEFORE, np.int32)
    optimizer = (
        adam._replace(count=count, mu=tree(adam.mu), nu=tree(adam.nu)),
        optax.EmptyState(),
        optax.ScaleByScheduleState(count=count),
    )
    whole = {"params": tree(weights), "opt_state": optimizer, "step": count}
    directory = HERE / "maxtext_states" / case
    with ocp.CheckpointManager(directory, item_names=("items",), item_handlers={"items": ocp.PyTreeCheckpointHandler()}) as manager:
        manager.save(BEFORE - 1, args=ocp.args.Composite(items=ocp.args.PyTreeSave(whole)))


integers = {"inputs": tokens, "targets": targets, "segmentation": segments, "positions": positions}
tensors = {f"batch.{name}": value.astype(np.int32) for name, value in integers.items()}
shutil.rmtree(HERE / "maxtext_states", ignore_errors=True)
rounded = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float32), jnp.float64), tree)
for family, tied, scanned in [
    ("llama2", True, True), ("llama2", False, False), ("gemma2", True, True), ("gemma2", False, False),
    ("gemma3", True, True), ("gemma3", False, False), ("mixtral", False, True), ("mixtral", False, False),
    ("gpt_oss", False, True), ("gpt_oss", False, False), ("deepseek", False, True), ("deepseek", False, False),
]:
    case = f"{family}_{'tied' if tied else 'untied'}_{'scanned' if scanned else 'unscanned'}"
    weights = {name: first(family, name, shape) for name, shape in shapes(family, tied).items()}
    gradient = jax.jit(jax.value_and_grad(lambda weights: loss(weights, family, tied)))
    clip, adamw = optax.clip_by_global_norm(CLIP), optax.adamw(schedule, weight_decay=DECAY, **ADAM)
    state, losses, norms = adamw.init(weights), [], []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            adam, rest, count = state
            weights, adam = rounded(weights), adam._replace(mu=rounded(adam.mu), nu=rounded(adam.nu))
            state = (adam, rest, count)
            write(case, family, scanned, weights, state)
        value, gradients = gradient(weights)
        clipped, _ = clip.update(gradients, clip.init(weights))
        updates, state = adamw.update(clipped, state, weights)
        weights = optax.apply_updates(weights, updates)
        losses.append(value)
        norms.append(optax.global_norm(gradients))
    tensors[f"{case}.losses"] = np.array(losses[BEFORE:])
    for kind, of in [("params", weights), ("mu", state[0].mu), ("nu", state[0].nu)]:
        for path, array in stored(family, of, scanned).items():
            tensors[f"{case}.{kind}.{path.replace('/', '.')}"] = array
    print(case, np.round(losses, 4), np.round(norms, 3))

f32 = lambda array: np.asarray(array, np.int32 if array.dtype == np.int32 else np.float32)
save_file({name: np.ascontiguousarray(f32(array)) for name, array in tensors.items()}, HERE / "maxtext_states.safetensors")
