"""Writes engram.safetensors and engram_streams.safetensors: a memory of n-grams of one residual stream and of several,
in float64, from its equations alone, with gradients by differences.

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

STREAMS = 2

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



def arguments_of(streams, of_x):
    made = {
        "x": normal(ROWS, LENGTH, *of_x),
        "table": normal(sum(map(sum, SIZES)), WIDTH),
        "key": normal(MEMORY, streams, EMBED),
        "key_bias": normal(streams, EMBED),
        "value": normal(MEMORY, EMBED),
        "value_bias": normal(EMBED),
        "k_norm": normal(streams, EMBED, mean=1.0),
        "q_norm": normal(streams, EMBED, mean=1.0),
        "conv_norm": normal(streams, EMBED, mean=1.0),
        "conv": normal(TAPS, 1, streams * EMBED),
    }
    return {name: value.astype(np.float32).astype(np.float64) for name, value in made.items()}


def before(row, place, distance):
    """The place `distance` tokens earlier in the same document, or none."""
    earlier = place - distance
    return earlier if earlier >= 0 and segments[row, earlier] == segments[row, place] else None


def rms(vector, scale):
    return vector / np.sqrt((vector**2).mean() + EPSILON) * scale


def forward(a):
    """All streams, [row, place, stream, embed], in the shape of `x`."""
    x = a["x"].reshape(ROWS, LENGTH, -1, EMBED)
    streams = range(x.shape[2])
    values = np.zeros(x.shape)
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
            for g in streams:
                k = rms(e @ a["key"][:, g] + a["key_bias"][g], a["k_norm"][g])
                q = rms(x[row, place, g], a["q_norm"][g])
                s = q @ k / np.sqrt(EMBED)
                gate = 1 / (1 + np.exp(-np.sign(s) * np.sqrt(max(abs(s), 1e-6))))
                values[row, place, g] = gate * (e @ a["value"] + a["value_bias"])
    kernel = a["conv"].reshape(TAPS, -1, EMBED)
    y = values.copy()
    for row in range(ROWS):
        for place in range(LENGTH):
            for g in streams:
                total = np.zeros(EMBED)
                for tap in range(TAPS):
                    earlier = before(row, place, (TAPS - 1 - tap) * LONGEST)
                    if earlier is not None:
                        total += kernel[tap, g] * rms(values[row, earlier, g], a["conv_norm"][g])
                y[row, place, g] += total / (1 + np.exp(-total))
    return y.reshape(a["x"].shape)


def write(name, arguments):
    y = forward(arguments)
    # Padding has no meaning.
    is_token = (segments != 0).reshape(ROWS, LENGTH, *[1] * (y.ndim - 2))
    cotangent = normal(*y.shape) * is_token
    tensors = {"y": y * is_token, "cotangent": cotangent}
    for argument, value in arguments.items():
        tensors[argument] = value.copy()
        gradient = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            made = []
            for step in (1e-5, -1e-5):
                changed = dict(arguments, **{argument: value.copy()})
                changed[argument][index] += step
                made.append((forward(changed) * cotangent).sum())
            gradient[index] = (made[0] - made[1]) / 2e-5
        tensors[f"gradient.{argument}"] = gradient
    tensors = {key: value.astype(np.float32) for key, value in tensors.items()}
    tensors |= {"segments": segments, "numbers": numbers}
    save_file(tensors, pathlib.Path(__file__).parent / f"{name}.safetensors")


write("engram", arguments_of(1, [EMBED]))
write("engram_streams", arguments_of(STREAMS, [STREAMS, EMBED]))
