"""Writes optimizer_space.safetensors: five steps of tiny models in plain JAX and optax, in f64. Weights are held, clipped,
decayed and stepped in the form that MaxText's checkpoints store.

Needs jax, optax, numpy and safetensors. The models are those of plain_models.py.
"""

import pathlib

import jax
import numpy as np
import optax
from safetensors.numpy import save_file

from plain_models import (
    ADAM, CLIP, DECAY, LAYERS, LAYERS_OF, first, form, loss, positions, schedule, segments, shapes, targets, tokens,
)

STEPS, MUON_BETA, MUON_DECAY = 5, 0.95, 0.2


def matrix(name):
    """The input and output axes of a linear map, which Muon treats as a matrix."""
    if not name.startswith("layers.") or not name.endswith("kernel"):
        return None
    inputs, axes = (2, 3) if "attention.out" in name else (1, 2 if "mlp" in name else 3)
    return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, axes)))


def optimizer(kind, names):
    if kind == "adamw":
        return optax.adamw(schedule, weight_decay=DECAY, **ADAM)
    return optax.contrib.muon(
        schedule, ns_coeffs=(3.4445, -4.7750, 2.0315), beta=MUON_BETA, eps=ADAM["eps"], weight_decay=MUON_DECAY,
        adam_b1=ADAM["b1"], adam_b2=ADAM["b2"], adam_eps_root=ADAM["eps_root"], adam_weight_decay=DECAY,
        muon_weight_dimension_numbers={name: matrix(name) for name in names},
    )


def stacked(prefix, arrays):
    """Arrays by name, with layers stacked along the first axis."""
    of_model = {f"{prefix}.{name}": array for name, array in arrays.items() if not name.startswith("layers.")}
    roles = {name.removeprefix("layers.0.") for name in arrays if name.startswith("layers.0.")}
    layers = lambda role: np.stack([np.asarray(arrays[f"layers.{layer}.{role}"]) for layer in range(LAYERS)])
    return of_model | {f"{prefix}.layers.{role}": layers(role) for role in sorted(roles)}


integers = {"inputs": tokens, "targets": targets, "segmentation": segments, "positions": positions}
tensors = {f"batch.{name}": value.astype(np.int32) for name, value in integers.items()}
for family in LAYERS_OF:
    for tied in (True, False):
        model = f"{family}_{'tied' if tied else 'untied'}"
        start = {name: first(family, name, shape) for name, shape in shapes(family, tied).items()}
        tensors |= stacked(f"{model}.start", start)
        tensors |= stacked(f"{model}.form", {name: np.array(form(family, name)) for name in start})
        gradient = jax.jit(jax.value_and_grad(lambda weights: loss(weights, family, tied)))
        clip = optax.clip_by_global_norm(CLIP)
        for kind in ("adamw", "muon"):
            steps = optimizer(kind, start)
            weights, state = start, steps.init(start)
            reported = {"losses": [], "gradient_norms": [], "parameter_norms": []}
            for _ in range(STEPS):
                value, gradients = gradient(weights)
                clipped, _ = clip.update(gradients, clip.init(weights))
                updates, state = steps.update(clipped, state, weights)
                weights = optax.apply_updates(weights, updates)
                reported["losses"].append(value)
                reported["gradient_norms"].append(optax.global_norm(gradients))
                reported["parameter_norms"].append(optax.global_norm(weights))
            case = f"{model}.{kind}"
            tensors |= {f"{case}.{name}": np.array(values) for name, values in reported.items()}
            tensors |= stacked(f"{case}.update", {name: weights[name] - start[name] for name in start})
            # The norm of each moment.
            adam = state[0] if kind == "adamw" else state.inner_states["adam"].inner_state[0]
            of_matrices = {} if kind == "adamw" else state.inner_states["muon"].inner_state[0].mu
            for slot, moments in [("mu", of_matrices), ("mu", adam.mu), ("nu", adam.nu)]:
                arrays = {name: moment for name, moment in moments.items() if hasattr(moment, "shape")}
                norms = {name: np.linalg.norm(moment) for name, moment in arrays.items()}
                tensors |= stacked(f"{case}.{slot}", norms)
            print(case, *(np.round(values, 4) for values in reported.values()))

f32 = lambda array: np.asarray(array, np.int32 if array.dtype == np.int32 else np.float32)
written = {name: np.ascontiguousarray(f32(array)) for name, array in tensors.items()}
save_file(written, pathlib.Path(__file__).with_name("optimizer_space.safetensors"))
