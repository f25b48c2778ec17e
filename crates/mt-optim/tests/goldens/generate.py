"""Writes adamw.safetensors: ten steps of optax's AdamW with clipping and MaxText's schedule. Also writes
optimizers.safetensors: ten steps of every optimizer, and the other schedules.

Needs jax, optax, numpy and safetensors.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

PEAK, FINAL_FRACTION, WARMUP, SCHEDULE, STEPS = 0.02, 0.1, 3, 8, 10
SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 3, 2)}


# From `make_cos_schedule` in MaxText's maxtext_utils.py.
def cosine(peak, final, steps):
    def rate(step):
        progress = step / (steps - 1) if steps > 1 else 1.0
        share = 0.5 * (jnp.cos(jnp.pi * progress) + 1)
        return peak * share + final * (1 - share)

    return rate


falling = cosine(PEAK, PEAK * FINAL_FRACTION, SCHEDULE - WARMUP)
schedule = optax.join_schedules(
    [optax.linear_schedule(0.0, PEAK, WARMUP), falling, optax.constant_schedule(0.0)], [WARMUP, SCHEDULE]
)
random = np.random.default_rng(3)
draw = lambda scale: {name: (random.normal(size=shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}

tensors = {}
for name, dtype in [("f32", jnp.float32), ("bf16_moments", jnp.bfloat16)]:
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, eps_root=1e-9, weight_decay=0.1, mu_dtype=dtype)
    clip = optax.clip_by_global_norm(1.0)
    parameters = draw(1.0)
    state = adamw.init(parameters)
    for key, value in parameters.items():
        tensors[f"{name}.start.{key}"] = value
    for step in range(STEPS):
        # Odd steps stay below the threshold.
        gradients = draw(2.0 if step % 2 == 0 else 0.05)
        clipped, _ = clip.update(gradients, clip.init(parameters))
        updates, state = adamw.update(clipped, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        for key in SHAPES:
            tensors[f"{name}.gradient.{step}.{key}"] = gradients[key]
            tensors[f"{name}.parameter.{step}.{key}"] = np.asarray(parameters[key])
        tensors[f"{name}.norm.{step}"] = np.asarray(optax.global_norm(gradients))
    for key in SHAPES:
        tensors[f"{name}.mu.{key}"] = np.asarray(state[0].mu[key], dtype=np.float32)
        tensors[f"{name}.nu.{key}"] = np.asarray(state[0].nu[key])
tensors["rates"] = np.asarray([schedule(step) for step in range(STEPS)], dtype=np.float32)
save_file(tensors, pathlib.Path(__file__).with_name("adamw.safetensors"))

# optimizers.safetensors: ten steps of each optimizer on the same gradients. `d` is a stack of layers, which the
# reference treats as separate parameters.
LAYERS = 3
shapes = {"a": (5, 3), "b": (7,), "c": (4, 3, 2), "e": (2, 3, 5)} | {f"d{layer}": (4, 6) for layer in range(LAYERS)}
random = np.random.default_rng(5)
draw = lambda scale: {name: (random.normal(size=shape) * scale).astype(np.float32) for name, shape in shapes.items()}
start = draw(1.0)
gradients = [draw(0.3) for _ in range(STEPS)]
# Some gradients are so small that epsilon matters.
for gradient in gradients:
    gradient["b"][:3] *= 1e-8
    gradient["d1"] *= 1e-8
dimensions = optax.contrib.MuonDimensionNumbers
linear = {"a": dimensions((0,), (1,)), "b": None, "c": dimensions((0,), (1, 2)), "e": dimensions((0, 1), (2,))}
linear |= {f"d{layer}": dimensions((0,), (1,)) for layer in range(LAYERS)}
adam = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
decays = {name: name != "c" for name in shapes}
cases = {
    "adam_masked": optax.adamw(schedule, eps_root=1e-6, weight_decay=0.1, mask=decays, **adam),
    "adam_nesterov": optax.adamw(schedule, weight_decay=0.1, nesterov=True, **adam),
    # Pax's form is the same except for rounding.
    "adam_pax": optax.adamw(schedule, eps_root=1e-6, weight_decay=0.1, mask=decays, **adam),
    "sgd": optax.sgd(schedule),
    "adafactor": optax.adafactor(schedule, min_dim_size_to_factor=2),
    "frozen": optax.multi_transform(
        {"trainable": optax.adamw(schedule, weight_decay=0.1, **adam), "frozen": optax.set_to_zero()},
        {name: "frozen" if name in ("b", "e") else "trainable" for name in shapes},
    ),
}
for name, consistent_rms in [("muon", None), ("muon_rms", 0.2)]:
    cases[name] = optax.contrib.muon(
        schedule, ns_coeffs=(3.4445, -4.7750, 2.0315), beta=0.95, eps=1e-8, weight_decay=0.05, adam_b1=0.9,
        adam_b2=0.95, adam_weight_decay=0.1, muon_weight_dimension_numbers=linear, consistent_rms=consistent_rms,
    )


def stacked(values):
    rest = {name: np.asarray(value) for name, value in values.items() if not name.startswith("d")}
    return rest | {"d": np.stack([values[f"d{layer}"] for layer in range(LAYERS)])}


tensors = {f"start.{name}": value for name, value in stacked(start).items()}
for step in range(STEPS):
    tensors |= {f"gradient.{step}.{name}": value for name, value in stacked(gradients[step]).items()}
for case, optimizer in cases.items():
    parameters, state = start, optimizer.init(start)
    for step in range(STEPS):
        updates, state = optimizer.update(gradients[step], state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        tensors |= {f"{case}.{step}.{name}": value for name, value in stacked(parameters).items()}

# The other shapes of schedules. `fall` is the number of decay steps of a `wsd` schedule.
def rates(peak, final, warmup, total, fall, shape):
    line = lambda steps: optax.linear_schedule(peak, final, max(steps - 1, 1))
    rise = optax.linear_schedule(0.0, peak, warmup)
    constant = optax.constant_schedule
    stable = total - fall
    pieces, boundaries = {
        "cosine": ([rise, cosine(peak, final, total - warmup)], [warmup]),
        "linear": ([rise, line(total - warmup)], [warmup]),
        "constant": ([rise, constant(peak)], [warmup]),
        "wsd_linear": ([rise, constant(peak), line(fall)], [warmup, stable]),
        "wsd_cosine": ([rise, constant(peak), cosine(peak, final, fall)], [warmup, stable]),
    }[shape]
    joined = optax.join_schedules([*pieces, constant(0.0)], [*boundaries, total])
    return np.asarray([joined(step) for step in range(total + 3)], dtype=np.float32)


for shape in ["cosine", "linear", "constant", "wsd_linear", "wsd_cosine"]:
    tensors[f"rates.{shape}"] = rates(0.02, 0.002, 4, 21, 7, shape)
    # Decays of one step.
    tensors[f"rates.{shape}.short"] = rates(0.02, 0.002, 4, 5, 1, shape)
tensors["rates.cosine.whole"] = rates(1.0, 0.1, 0, 100, 0, "cosine")
save_file(tensors, pathlib.Path(__file__).with_name("optimizers.safetensors"))
