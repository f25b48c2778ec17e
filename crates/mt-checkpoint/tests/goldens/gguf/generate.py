"""Writes the GGUF files that the tests read, with the package gguf (0.19.0), and the tensors' values as safetensors."""

import pathlib

import gguf
import numpy as np
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
random = np.random.default_rng(0)


def write(name, alignment):
    writer = gguf.GGUFWriter(HERE / name, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Bär")
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float64("a.f64", 0.1)
    writer.add_array("a.texts", ["one", "two words", ""])
    writer.add_array("a.numbers", [1, -2, 3])
    plain = {
        "float32": random.standard_normal((3, 4)).astype(np.float32),
        "float16": random.standard_normal((5,)).astype(np.float16),
        "float64": random.standard_normal((2, 2, 3)),
        "int8": random.integers(-128, 127, (7,), np.int8),
        "int16": random.integers(-30000, 30000, (3,), np.int16),
        "int32": random.integers(-(2**31), 2**31 - 1, (2, 3), np.int32),
        "int64": random.integers(-(2**60), 2**60, (3,), np.int64),
    }
    for key, value in plain.items():
        writer.add_tensor(key, value)
    wide = random.standard_normal((2, 64)).astype(np.float32)
    for key, kind in [("bfloat16", "BF16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0")]:
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(key, gguf.quants.quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain, wide


plain, wide = write("all.gguf", None)
save_file({**plain, "wide": wide}, HERE / "all.safetensors")
write("aligned.gguf", 256)
