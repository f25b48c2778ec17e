"""Writes teacher_top_k_part_00000_host_000.array_record.zst as MaxText's `save_top_k_teacher_logits` writes its files.

Needs array-record, protobuf, numpy and zstandard. Records are serialized by protobuf's own library from the definition of
`tf.train.Example`. Also checks files of ours: `generate.py check DIRECTORY` prints the rows of a directory as JSON lines.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import zstandard
from array_record.python import array_record_module
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ROWS, LENGTH, TOP_K, VOCAB = 4, 5, 3, 11
LISTS = [("bytes_list", "BytesList", 12), ("float_list", "FloatList", 2), ("int64_list", "Int64List", 3)]


def example_class():
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf.train", syntax="proto3")

    def message(name, fields):
        made = file.message_type.add(name=name)
        for field in fields:
            made.field.add(**field)
        return made

    for _, name, kind in LISTS:
        message(name, [dict(name="value", number=1, type=kind, label=3)])
    feature = message("Feature", [])
    feature.oneof_decl.add(name="kind")
    for number, (field, name, _) in enumerate(LISTS, 1):
        feature.field.add(name=field, number=number, type=11, label=1, type_name=f".tf.train.{name}", oneof_index=0)
    features = message("Features", [])
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, label=1, type_name=".tf.train.Feature")
    features.field.add(name="feature", number=1, type=11, label=3, type_name=".tf.train.Features.FeatureEntry")
    message("Example", [dict(name="features", number=1, type=11, label=1, type_name=".tf.train.Features")])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.train.Example"))


Example = example_class()


def row(number):
    tokens = [(number * 3 + place) % VOCAB for place in range(LENGTH + 1)]
    logits = [[number + 0.5 - place - 0.25 * k for k in range(TOP_K)] for place in range(LENGTH)]
    indices = [[(number + place + 4 * k) % VOCAB for k in range(TOP_K)] for place in range(LENGTH)]
    return {
        "inputs": tokens[:-1],
        "top_k_logits": np.float32(logits).ravel().tolist(),
        "top_k_indices": np.int64(indices).ravel().tolist(),
        "sequence_hash": [-1234567890123456789 + number],
        "inputs_position": list(range(LENGTH)),
        "inputs_segmentation": [1] * LENGTH,
        "targets_segmentation": [int(place >= 2) for place in range(LENGTH)],
        "targets": tokens[1:],
    }


def write(path):
    with tempfile.TemporaryDirectory() as directory:
        file = f"{directory}/file.array_record"
        writer = array_record_module.ArrayRecordWriter(file, "group_size:1")
        for number in range(ROWS):
            example = Example()
            for name, values in row(number).items():
                feature = example.features.feature[name]
                (feature.float_list if name == "top_k_logits" else feature.int64_list).value.extend(values)
            writer.write(example.SerializeToString())
        writer.close()
        path.write_bytes(zstandard.compress(pathlib.Path(file).read_bytes(), 19))


def check(directory):
    for file in sorted(pathlib.Path(directory).glob("*.array_record")):
        reader = array_record_module.ArrayRecordReader(str(file))
        for _ in range(reader.num_records()):
            example = Example.FromString(reader.read())
            features = example.features.feature
            values = {name: list(features[name].float_list.value or features[name].int64_list.value) for name in features}
            print(json.dumps(dict(sorted(values.items()))))


if sys.argv[1:2] == ["check"]:
    check(sys.argv[2])
else:
    write(pathlib.Path(__file__).parent / "teacher_top_k_part_00000_host_000.array_record.zst")
