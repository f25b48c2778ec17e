"""Writes engram.safetensors: a memory of n-grams in float64, from its equations alone, with gradients by differences.

Needs numpy and safetensors. Everything is computed token by token, without padding of sequences: earlier tokens of the
same document are looked up one by one.
"""

import pathlib

import numpy as np
from safetensors.numpy import save_file

ROWS, LENGTH, EMBED, WIDTH, TAPS, EPSILON = 2, 11, 6, 2, 3, 1e-5
LONGEST, PADDING, VOCABULARY = 3, 4, 17
DOCUMENTS = [[5, 6], [1, 7]]
MULTIPLIERS = [126322567, 90112011, 33]
SIZES = [[11, 13, 17], [19, 23, 29]]
TABLES = sum(map(len, SIZES))
MEMORY = TABLES * WIDTH

random = np.random.default_rng(11)
segments = np.zeros((ROWS, LENGTH), np.int32)
for row, documents in enumerate(DOCUMENTS):
    place = 0
    for number, size in enumerate(documents):
        segments[row, place : place + size] = number + 1
        place += size
numbers = random.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
# Repeated n-grams share entries, whose gradients add up.
numbers[0, 8:11] = numbers[0, 1:4]


def normal(*shape, mean=0.0):
    return random.standard_normal(shape).astype(np.float32).astype(np.float64) * 0.7 + mean


arguments = {
    "x": normal(ROWS, LENGTH, EMBED),
    "table": normal(sum(map(sum, SIZES)), WIDTH),
    "key": normal(MEMORY, 1, EMBED),
    "key_bias": normal(1, EMBED),
    "value": normal(MEMORY, EMBED),
    "value_bias": normal(EMBED),
    "k_norm": normal(1, EMBED, mean=1.0),
    "q_norm": normal(1, EMBED, mean=1.0),
    "conv_norm": normal(1, EMBED, mean=1.0),
    "conv": normal(TAPS, 1, EMBED),
}
arguments = {name: value.astype(np.float32).astype(np.float64) for name, value in arguments.items()}


def before(row, place, distance):
    """The place `distance` tokens earlier in the same document, or none."""
    earlier = place - distance
    return earlier if earlier >= 0 and segments[row, earlier] == segments[row, place] else None


def rms(vector, scale):
    return vector / np.sqrt((vector**2).mean() + EPSILON) * scale


def forward(a):
    values = np.zeros((ROWS, LENGTH, EMBED))
    for row in range(ROWS):
        for place in range(LENGTH):
            tokens = []
            for distance in range(LONGEST):
                earlier = before(row, place, distance)
                tokens.append(PADDING if earlier is None else int(numbers[row, earlier]))
            memory, offset = [], 0
            for sizes, length in zip(SIZES, range(2, LONGEST + 1)):
                value = 0
                for token, multiplier in zip(tokens[:length], MULTIPLIERS):
                    value ^= token * multiplier
                for size in sizes:
                    memory.append(a["table"][offset + value % size])
                    offset += size
            e = np.concatenate(memory)
            k = rms(e @ a["key"][:, 0] + a["key_bias"][0], a["k_norm"][0])
            q = rms(a["x"][row, place], a["q_norm"][0])
            s = q @ k / np.sqrt(EMBED)
            gate = 1 / (1 + np.exp(-np.sign(s) * np.sqrt(max(abs(s), 1e-6))))
            values[row, place] = gate * (e @ a["value"] + a["value_bias"])
    y = values.copy()
    for row in range(ROWS):
        for place in range(LENGTH):
            total = np.zeros(EMBED)
            for tap in range(TAPS):
                earlier = before(row, place, (TAPS - 1 - tap) * LONGEST)
                if earlier is not None:
                    total += a["conv"][tap, 0] * rms(values[row, earlier], a["conv_norm"][0])
            y[row, place] += total / (1 + np.exp(-total))
    return y


y = forward(arguments)
# Padding has no meaning.
cotangent = normal(ROWS, LENGTH, EMBED) * (segments != 0)[..., None]
tensors = {"y": y * (segments != 0)[..., None], "cotangent": cotangent}
for name, value in arguments.items():
    tensors[name] = value.copy()
    gradient = np.zeros_like(value)
    for index in np.ndindex(value.shape):
        made = []
        for step in (1e-5, -1e-5):
            changed = dict(arguments, **{name: value.copy()})
            changed[name][index] += step
            made.append((forward(changed) * cotangent).sum())
        gradient[index] = (made[0] - made[1]) / 2e-5
    tensors[f"gradient.{name}"] = gradient
tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
tensors |= {"segments": segments, "numbers": numbers}
save_file(tensors, pathlib.Path(__file__).parent / "engram.safetensors")
