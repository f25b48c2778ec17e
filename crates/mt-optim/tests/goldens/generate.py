"""Writes adamw.safetensors: ten steps of optax's AdamW behind clipping, under MaxText's schedule.

Needs jax, optax, numpy and safetensors.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

PEAK, FINAL_FRACTION, WARMUP, SCHEDULE, STEPS = 0.02, 0.1, 3, 8, 10
SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 3, 2)}


def falling(step):
    share = 0.5 * (jnp.cos(jnp.pi * step / (SCHEDULE - WARMUP)) + 1)
    return PEAK * share + PEAK * FINAL_FRACTION * (1 - share)


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
