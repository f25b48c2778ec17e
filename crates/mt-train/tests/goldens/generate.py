"""Writes optimizer_trees.json: the keys that Orbax gives the state of every optimizer, built as MaxText builds it.

Needs jax, optax, numpy and orbax-checkpoint.
"""

import json
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

# A model in the form of MaxText's scanned checkpoints: the tiny model of the crate's tests with a width of 128 and MLPs
# of 136, which Adafactor factors.
WIDTH, WITHIN, VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD = 128, 136, 256, 2, 4, 2, 8
SHAPES = {
    "token_embedder/embedding": (VOCABULARY, WIDTH),
    "decoder/decoder_norm/scale": (WIDTH,),
    "decoder/logits_dense/kernel": (WIDTH, VOCABULARY),
    "decoder/layers/pre_self_attention_layer_norm/scale": (WIDTH, LAYERS),
    "decoder/layers/post_self_attention_layer_norm/scale": (WIDTH, LAYERS),
    "decoder/layers/mlp/wi_0/kernel": (WIDTH, LAYERS, WITHIN),
    "decoder/layers/mlp/wi_1/kernel": (WIDTH, LAYERS, WITHIN),
    "decoder/layers/mlp/wo/kernel": (WITHIN, LAYERS, WIDTH),
    "decoder/layers/self_attention/query/kernel": (WIDTH, LAYERS, HEADS, HEAD),
    "decoder/layers/self_attention/key/kernel": (WIDTH, LAYERS, KV_HEADS, HEAD),
    "decoder/layers/self_attention/value/kernel": (WIDTH, LAYERS, KV_HEADS, HEAD),
    "decoder/layers/self_attention/out/kernel": (HEADS, LAYERS, HEAD, WIDTH),
}
INTERVAL = 4

parameters = {}
for name, shape in SHAPES.items():
    *holders, last = ("params", *name.split("/"))
    within = parameters
    for holder in holders:
        within = within.setdefault(holder, {})
    within[last] = jnp.zeros(shape)


def fitting(patterns, yes, no):
    """For each parameter, whether any pattern matches its name."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return yes if any(re.search(pattern, name) for pattern in patterns) else no

    return lambda tree: jax.tree_util.tree_map_with_path(label, tree)


def matrices():
    """The parameters that Muon treats as matrices. The numbers of their axes do not affect the state's tree."""
    dimensions = optax.contrib.MuonDimensionNumbers((0,), (-1,))
    label = lambda path, _: "layers" in str(path) and "scale" not in str(path)
    return jax.tree_util.tree_map_with_path(lambda *leaf: dimensions if label(*leaf) else None, parameters)


# The transformations of `get_optimizer` in MaxText's optimizers.py, by the keys of the configuration. The learning rate
# is a schedule, so steps are counted.
def optimizer(opt_type, adamw_mask, trainable_parameters_mask, skip_step_on_spikes):
    mask = fitting(adamw_mask, False, True) if adamw_mask else None
    rate = optax.constant_schedule(0.1)
    made = {
        "adamw": lambda: optax.adamw(rate, weight_decay=0.1, mask=mask),
        # Pax's Adam has the state of optax's Adam, without a chain.
        "adam_pax": optax.scale_by_adam,
        "sgd": lambda: optax.sgd(rate),
        "muon": lambda: optax.contrib.muon(
            rate, ns_coeffs=(3.4445, -4.7750, 2.0315), muon_weight_dimension_numbers=matrices()
        ),
        # MaxText has no SGD; this is optax's.
        "adafactor": lambda: optax.adafactor(rate),
    }
    chosen = made[opt_type]()
    if skip_step_on_spikes:
        inner = chosen
        init = lambda tree: {
            "inner_state": inner.init(tree),
            "losses": jnp.zeros(INTERVAL),
            "grad_norms": jnp.zeros(INTERVAL),
            "count": jnp.zeros((), dtype=jnp.int32),
            "is_skipped": jnp.array(False),
        }
        chosen = optax.GradientTransformation(init, inner.update)
    if trainable_parameters_mask:
        labels = fitting(trainable_parameters_mask, "trainable", "frozen")
        chosen = optax.multi_transform({"trainable": chosen, "frozen": optax.set_to_zero()}, labels)
    return chosen


def stored(state):
    """The tree that Orbax reports after saving: type and shape for each path, or the kind of an empty node."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "items"
        ocp.PyTreeCheckpointer().save(path, {"opt_state": state})
        described = json.loads((path / "_METADATA").read_text())["tree_metadata"]
        arrays = ocp.PyTreeCheckpointer().metadata(path).item_metadata.tree
    found = {}
    for entry in described.values():
        segments = [
            int(part["key"]) if part["key_type"] == 1 else part["key"] for part in entry["key_metadata"]
        ]
        within = arrays
        for segment in segments:
            within = within[segment]
        is_array = hasattr(within, "shape")
        name = ".".join(f"[{segment}]" if isinstance(segment, int) else segment for segment in segments)
        found[name] = (
            f"{jnp.dtype(within.dtype).name}{list(within.shape)}"
            if is_array
            else entry["value_metadata"]["value_type"]
        )
    return dict(sorted(found.items()))


# The masks of undecayed and of trained parameters, and whether spikes are skipped. One training mask matches all
# parameters; others leave Muon no matrices, or only matrices.
WAYS = {
    opt_type: [([], [], False), ([], [".*"], False), ([], ["norm", "embedding"], False), ([], ["wi_0"], True)]
    for opt_type in ("adamw", "adam_pax", "sgd", "muon", "adafactor")
}
WAYS["adamw"] += [(["norm"], [], False), (["norm"], ["wi_0"], True)]
WAYS["adam_pax"] += [(["norm"], [], False)]
KEYS = ["opt_type", "adamw_mask", "trainable_parameters_mask", "skip_step_on_spikes"]
lines = []
for opt_type, ways in WAYS.items():
    for way in ways:
        case = dict(zip(KEYS, (opt_type, *way))) | {"tree": stored(optimizer(opt_type, *way).init(parameters))}
        lines.append(json.dumps(case, separators=(",", ":")))
written = "[\n" + ",\n".join(lines) + "\n]\n"
pathlib.Path(__file__).with_name("optimizer_trees.json").write_text(written)
