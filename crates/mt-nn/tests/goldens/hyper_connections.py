"""Writes hyper_connections.safetensors beside this script: hyper-connections in f64, from their equations.

    pip install torch==2.15.0 safetensors==0.8.0
    python hyper_connections.py

Each case has the arguments, the result `y`, and the gradients of the sum of the result weighted by `cotangent`.
"""

import itertools
import pathlib

import torch
from safetensors.torch import save_file

EPSILON = 1e-6


def mixing(logits, streams, iterations):
    if iterations == 0:
        matrices = torch.zeros(logits.shape[-1], streams, streams, dtype=torch.float64)
        for number, order in enumerate(itertools.permutations(range(streams))):
            for source, target in enumerate(order):
                matrices[number, source, target] = 1
        return torch.einsum("btn,nij->btij", logits.softmax(-1), matrices)
    matrix = logits.unflatten(-1, (streams, streams)).softmax(-1) + EPSILON
    for step in range(iterations):
        if step > 0:
            matrix = matrix / (matrix.sum(-1, keepdim=True) + EPSILON)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPSILON)
    return matrix


def connected(x, p, iterations):
    """The streams after a part that is the function tanh."""
    streams = x.shape[2]
    flat = x.flatten(2)
    normalized = flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + 1e-5)
    if "norm" in p:
        normalized = normalized * p["norm"]
    read = torch.sigmoid(p["pre_scale"] * (normalized @ p["pre_alpha"]) + p["pre_beta"]) + EPSILON
    written = 2 * torch.sigmoid(p["post_scale"] * (normalized @ p["post_alpha"]) + p["post_beta"])
    matrix = mixing(p["res_scale"] * (normalized @ p["res_alpha"]) + p["res_beta"].flatten(), streams, iterations)
    given = torch.einsum("btk,btkd->btd", read, x)
    mixed = torch.einsum("btij,btid->btjd", matrix, x)
    return mixed + written[..., None] * torch.tanh(given)[:, :, None]


def summed(x, p):
    flat = x.flatten(2)
    normalized = flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + 1e-5)
    weights = torch.sigmoid(p["scale"] * (normalized @ p["fn"]) + p["base"]) + EPSILON
    return torch.einsum("btk,btkd->btd", weights, x)


def case(name, arguments, function):
    # The arguments are those that the file holds.
    arguments = {key: value.float().double().requires_grad_() for key, value in arguments.items()}
    y = function(arguments)
    cotangent = torch.randn(*y.shape).double()
    (y * cotangent).sum().backward()
    tensors = arguments | dict(y=y, cotangent=cotangent)
    tensors |= {f"gradient.{key}": value.grad for key, value in arguments.items()}
    return {f"{name}.{key}": value.detach().float().contiguous() for key, value in tensors.items()}


def main():
    torch.manual_seed(3)
    draw = lambda *dims: torch.randn(*dims, dtype=torch.float64)
    tensors = {}
    for name, streams, embed, iterations, scaled in [
        ("sinkhorn", 4, 5, 20, True), ("one_iteration", 3, 6, 1, False), ("lite", 3, 7, 0, True), ("two_lite", 2, 5, 0, False),
    ]:
        outputs = len(list(itertools.permutations(range(streams)))) if iterations == 0 else streams * streams
        width = streams * embed
        p = dict(
            pre_alpha=draw(width, streams) / 3, post_alpha=draw(width, streams) / 3, res_alpha=draw(width, outputs) / 3,
            pre_beta=draw(streams), post_beta=draw(streams),
            res_beta=draw(outputs) if iterations == 0 else draw(streams, streams),
            pre_scale=1 + draw(1) / 4, post_scale=1 + draw(1) / 4, res_scale=1 + draw(1) / 4,
        )
        if scaled:
            p["norm"] = 1 + draw(width) / 4
        x = draw(2, 3, streams, embed)
        tensors |= case(name, p | dict(x=x), lambda p: connected(p["x"], p, iterations))
    p = dict(fn=draw(20, 4) / 3, base=draw(4), scale=1 + draw(1) / 4, x=draw(2, 3, 4, 5))
    tensors |= case("head", p, lambda p: summed(p["x"], p))
    save_file(tensors, pathlib.Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
