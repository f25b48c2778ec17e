"""Trains the model with JAX and optax. Usage: jax_train.py JOB, see job.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_model
import job
import model

asked = job.read()
jax_model.keep_programs(asked["cache"])
variant, dtype = asked["variant"], jnp.dtype(asked["dtype"])
optimizer = optax.chain(
    optax.clip_by_global_norm(model.CLIP),
    optax.adamw(
        model.LEARNING_RATE,
        b1=model.BETA1,
        b2=model.BETA2,
        eps=model.ADAM_EPSILON,
        weight_decay=model.WEIGHT_DECAY,
    ),
)


def state_of(parameters):
    if variant["layers"] == "scanned":
        parameters = jax_model.stacked(parameters)
    return parameters, optimizer.init(parameters)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, rows):
    parameters, slots = state
    value, gradients = jax.value_and_grad(jax_model.loss)(parameters, rows, variant, dtype)
    updates, slots = optimizer.update(gradients, slots, parameters)
    return (optax.apply_updates(parameters, updates), slots), value


def main():
    if asked["weights"]:
        state = jax.jit(state_of, donate_argnums=0)(jax_model.published(asked["weights"]))
    else:
        state = jax.jit(lambda key: state_of(jax_model.initial(key)))(jax.random.key(0))
    rows = np.load(asked["tokens"]).reshape(-1, model.BATCH, model.LENGTH + 1)

    def advance(number):
        nonlocal state
        state, value = step(state, rows[number % len(rows)])
        return float(value)

    job.steps(asked, advance)


main()
