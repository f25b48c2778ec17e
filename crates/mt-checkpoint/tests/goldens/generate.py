"""Writes the files of weights that the tests read: with the safetensors library, huggingface_hub and torch themselves.

Needs torch, numpy, safetensors and huggingface_hub. Beside each readable .pth file lies its contents as safetensors.
"""

import collections
import json
import os
import pathlib

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
PT = {"format": "pt"}
torch.manual_seed(0)


def bits(dtype, *dims):
    """Random numbers of a type, among them its extremes."""
    if dtype == torch.bool:
        return torch.rand(dims) < 0.5
    if dtype.is_floating_point:
        values = (torch.randn(dims) * 3).to(dtype)
        if values.numel() > 3:
            extremes = [torch.inf, -torch.inf, torch.nan, -0.0]
            values.view(-1)[:4] = torch.tensor(extremes).to(dtype)
        return values
    limits = torch.iinfo(dtype)
    if dtype.is_signed or dtype == torch.uint8:
        return torch.randint(limits.min, limits.max, dims, dtype=dtype)
    return torch.randint(0, 256, (*dims, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(dims)


DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]

# Safetensors.
mixed = {f"of.{dtype}": bits(dtype, 3, 5) for dtype in DTYPES}
mixed |= {
    "scalar": bits(torch.float32),
    "no elements": bits(torch.bfloat16, 0, 7),
    "no rows, 3d": bits(torch.float16, 4, 0, 2),
    "": bits(torch.int64, 1),
    "quote\" back\\slash": bits(torch.float32, 2, 2),
    "line\nfeed\ttab": bits(torch.uint8, 3),
    "grüße/漢字/🦀": bits(torch.bfloat16, 2, 3, 2),
}
save_file(mixed, HERE / "mixed.safetensors", PT)
save_file({"weight": bits(torch.float32, 2, 3)}, HERE / "no_metadata.safetensors")
save_file(
    {"scale": bits(torch.bfloat16, 4), "weight": torch.ones(3, 4).to(torch.float8_e4m3fn)},
    HERE / "float8.safetensors", PT,
)

sharded = {
    "model.embed_tokens.weight": bits(torch.bfloat16, 16, 8),  # larger than a shard
    "model.layers.0.mlp.up_proj.weight": bits(torch.bfloat16, 6, 8),
    "model.layers.0.input_layernorm.weight": bits(torch.float32, 8),
    "model.layers.0.count": bits(torch.int64),
    "model.layers.1.mlp.up_proj.weight": bits(torch.bfloat16, 6, 8),
    "model.layers.1.input_layernorm.weight": bits(torch.float32, 8),
    "model.norm.weight": bits(torch.float16, 8),
    "lm_head.weight": bits(torch.bfloat16, 4, 8),
}
(HERE / "sharded").mkdir(exist_ok=True)
save_torch_state_dict(sharded, HERE / "sharded", max_shard_size=200)
(HERE / "sharded" / "order.json").write_text(json.dumps(list(sharded)) + "\n")


# PyTorch.
def save(name, values, expected):
    torch.save(values, HERE / f"{name}.pth")
    save_file({key: value.detach().clone().contiguous() for key, value in expected.items()}, HERE / f"{name}.safetensors")


base = bits(torch.float32, 6, 4)
wide = bits(torch.bfloat16, 5, 3, 4)
plain = {
    "base": base,
    "base.rows": base[2:5],
    "base.transposed": base.t(),
    "base.column": base[:, 1],
    "base.every_other": base[::2, 1:3],
    "wide": wide,
    "wide.permuted": wide.permute(2, 0, 1),
    "wide.one_row_transposed": wide[:1].transpose(0, 1),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "no elements": bits(torch.float16, 0, 3),
    "no elements at the end": base[6:],
    "large.index": bits(torch.int64, 300),
} | {f"of.{dtype}": bits(dtype, 2, 3) for dtype in DTYPES}
save("views", plain, plain)

module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
save("module", module.state_dict(), module.state_dict())
torch.save(module.state_dict(), HERE / "module_protocol_4.pth", pickle_protocol=4)
nested = {
    "model": collections.OrderedDict(weight=torch.nn.Parameter(base), tied=base),
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "average": wide}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
    "epoch": 3, "best": 1 << 40, "done": True, "note": None, "name": "run",
}
save("nested", nested, {
    "model.weight": base, "model.tied": base, "optimizer.state.0.step": torch.tensor(3.0),
    "optimizer.state.0.average": wide,
})
torch.save({"weight": torch.ones(3, 4).to(torch.float8_e5m2), "waves": torch.ones(2, dtype=torch.complex64)}, HERE / "unreadable.pth")

(HERE / "consolidated").mkdir(exist_ok=True)
kernel, norm = bits(torch.bfloat16, 4, 6), bits(torch.bfloat16, 6)
for rank in range(2):
    shard = {"layers.0.wo.weight": kernel[:, 3 * rank : 3 * rank + 3].clone(), "norm.weight": norm}
    torch.save(shard, HERE / "consolidated" / f"consolidated.{rank:02}.pth")

# Refused.
class Command:
    def __reduce__(self):
        return os.system, ("echo executed",)


torch.save({"weight": base, "command": Command()}, HERE / "command.pth")
torch.save({"weight": torch.ones(1).expand(1000)}, HERE / "repeated.pth")
# Its storages are named by their addresses, which differ from run to run.
torch.save({"weight": base}, HERE / "before_1_6.pth", _use_new_zipfile_serialization=False)
torch.save([base], HERE / "list.pth")
