"""Writes muon_hybrid.safetensors: ten steps of Muon with DeepSeek-V4's ten iterations, on the parameters and gradients of
optimizers.safetensors. An iteration maps each singular value s to a·s + b·s³ + c·s⁵, so the values come from singular
value decompositions in f64. The same code with the usual five iterations has to give optax's results.

    pip install safetensors==0.8.0 numpy==2.4.6
    python muon_hybrid.py
"""

import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent
BETA, EPSILON, DECAY, STEPS = 0.95, 1e-8, 0.05, 10
USUAL = [(3.4445, -4.7750, 2.0315)] * 5
# Eight iterations bring singular values near 1, and two more settle them there (DeepSeek-AI, 2026: DeepSeek-V4).
HYBRID = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2
# The number of input axes of each matrix, and whether it is a stack of layers.
MATRICES = {"a": (1, False), "c": (1, False), "e": (2, False), "d": (1, True)}


def orthogonalized(matrix, iterations):
    matrix = matrix / (np.linalg.norm(matrix) + EPSILON)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    for a, b, c in iterations:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def steps(start, gradients, rates, num_inputs, iterations):
    value, momentum = start.astype(np.float64), np.zeros(start.shape)
    inputs = int(np.prod(start.shape[:num_inputs]))
    outputs = start.size // inputs
    for step, gradient in enumerate(gradients):
        momentum = BETA * momentum + (1 - BETA) * gradient
        ahead = BETA * momentum / (1 - BETA ** (step + 2)) + (1 - BETA) * gradient / (1 - BETA ** (step + 1))
        update = orthogonalized(ahead.reshape(inputs, outputs), iterations).reshape(start.shape)
        update = update * max(1, outputs / inputs) ** 0.5
        value = value - rates[step] * (update + DECAY * value)
        yield value


def main():
    given = load_file(HERE / "optimizers.safetensors")
    rates = load_file(HERE / "adamw.safetensors")["rates"].astype(np.float64)
    made = {}
    for name, (num_inputs, is_stacked) in MATRICES.items():
        start = given[f"start.{name}"]
        gradients = [given[f"gradient.{step}.{name}"].astype(np.float64) for step in range(STEPS)]
        for iterations, case in [(USUAL, "muon"), (HYBRID, "muon_hybrid")]:
            if is_stacked:
                layers = [
                    list(steps(start[layer], [gradient[layer] for gradient in gradients], rates, num_inputs, iterations))
                    for layer in range(len(start))
                ]
                values = [np.stack(of_step) for of_step in zip(*layers)]
            else:
                values = list(steps(start, gradients, rates, num_inputs, iterations))
            for step, value in enumerate(values):
                key = f"{case}.{step}.{name}"
                if case == "muon":
                    assert np.abs(value - given[key]).max() < 1e-5, key
                else:
                    made[key] = value.astype(np.float32)
    # Adam's parameter does not depend on the iteration.
    made |= {f"muon_hybrid.{step}.b": given[f"muon.{step}.b"] for step in range(STEPS)}
    save_file(made, HERE / "muon_hybrid.safetensors")


main()
