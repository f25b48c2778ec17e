"""Files of records by the programs that define their formats: array_record, TensorFlow, tfds, pyarrow, datasets, numpy, and
the repetitions that OLMo-core finds.

    pip install array_record tensorflow-cpu tensorflow_datasets pyarrow datasets numpy
    pip install --no-deps ai2-olmo-core
    python generate.py

writes the files beside this script. `texts.json` holds the texts and token ids that all of them have.
"""

import ast
import gzip
import importlib.util
import json
import os
import random
import shutil
import sys
import typing

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

HERE = os.path.dirname(os.path.abspath(__file__))
draw = random.Random(24)
WORDS = "river stone été 漢字 light of the old mill and a crow".split()
TEXTS = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 30))) for _ in range(23)] + [""]
TOKENS = [[draw.randrange(1, 250) for _ in range(draw.randrange(1, 25))] for _ in TEXTS]
SEGMENTS = [[1 + place // 9 for place in range(len(tokens))] for tokens in TOKENS]


def path(name):
    return os.path.join(HERE, name)


def example(index):
    integers = lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    feature = {
        "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[TEXTS[index].encode()])),
        "ids": integers(TOKENS[index]),
        "ids_segmentation": integers(SEGMENTS[index]),
        "score": tf.train.Feature(float_list=tf.train.FloatList(value=[index / 4])),
        "several": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def array_records():
    for name, options in {
        "uncompressed": "group_size:1,uncompressed",
        "brotli": "group_size:5,brotli:6",
        "zstd": "group_size:1,zstd:3",
        "snappy": "group_size:7,snappy",
    }.items():
        writer = ArrayRecordWriter(path(f"{name}.array_record"), options)
        for index in range(len(TEXTS)):
            writer.write(example(index))
        writer.close()
        # Blocks of 64 KiB are padded with zeros.
        with open(path(f"{name}.array_record"), "rb") as file, gzip.GzipFile(path(f"{name}.array_record.gz"), "wb", mtime=0) as packed:
            packed.write(file.read())
        os.remove(path(f"{name}.array_record"))


def tf_records():
    for compression in ["", "GZIP", "ZLIB"]:
        name = path(f"{compression.lower() or 'plain'}.tfrecord")
        with tf.io.TFRecordWriter(name, tf.io.TFRecordOptions(compression_type=compression)) as writer:
            for index in range(len(TEXTS)):
                writer.write(example(index))


class Poems(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.2.0")

    def _info(self):
        features = tfds.features.FeaturesDict({
            "text": tfds.features.Text(),
            "ids": tfds.features.Sequence(np.int64),
            "about": {"author": tfds.features.Text()},
        })
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        return {"train": self._generate_examples(range(18)), "validation": self._generate_examples(range(18, 24))}

    def _generate_examples(self, indices):
        for index in indices:
            yield index, {"text": TEXTS[index], "ids": TOKENS[index], "about": {"author": f"author {index}"}}


def tensorflow_datasets():
    expected = {}
    for format in ["tfrecord", "array_record"]:
        root = path(f"tfds_{format}")
        shutil.rmtree(root, ignore_errors=True)
        builder = Poems(data_dir=root, file_format=format)
        config = tfds.download.DownloadConfig(num_shards=2)
        builder.download_and_prepare(download_config=config)
        for split in ["train", "validation", "train[:25%]", "train[-4:]+validation[1:3]"]:
            source = builder.as_data_source(split) if format == "array_record" else None
            rows = source or builder.as_dataset(split, read_config=tfds.ReadConfig(interleave_cycle_length=1)).as_numpy_iterator()
            expected[f"{format} {split}"] = [row["text"].decode() if isinstance(row["text"], bytes) else row["text"] for row in rows]
        for directory, _, names in os.walk(root):
            for name in names:
                file = os.path.join(directory, name)
                if "array_record-" in name:
                    with open(file, "rb") as plain, gzip.GzipFile(file + ".gz", "wb", mtime=0) as packed:
                        packed.write(plain.read())
                    os.remove(file)
    return expected


def columns():
    table = pa.table({
        "text": TEXTS,
        "ids": pa.array(TOKENS, pa.list_(pa.int32())),
        "ids_segmentation": pa.array(SEGMENTS, pa.list_(pa.int8())),
        "wide": pa.array(TOKENS, pa.large_list(pa.int64())),
    })
    for name, codec in {"zstd": "zstd", "snappy": "snappy", "none": "none", "brotli": "brotli"}.items():
        pq.write_table(table, path(f"pyarrow_{name}.parquet"), compression=codec, row_group_size=7)
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "ids": TOKENS})
    dataset.to_parquet(path("datasets.parquet"))
    dataset.to_json(path("datasets.jsonl"), force_ascii=False)
    with open(path("datasets.jsonl"), "rb") as file, gzip.GzipFile(path("datasets.jsonl.gz"), "wb", mtime=0) as packed:
        packed.write(file.read())
    # The extension does not tell the compression.
    os.rename(path("datasets.jsonl.gz"), path("zipped.jsonl"))


def olmo_core():
    """OLMo-core's search for repetitions, without importing the package, which needs PyTorch."""
    names = {"RepetitionTuple", "group_consecutive_values", "find_start_last_consecutive_true", "find_end_first_consecutive_true", "find_periodic_sequences"}
    directory = importlib.util.find_spec("olmo_core").submodule_search_locations[0]
    with open(os.path.join(directory, "data", "utils.py")) as file:
        source = file.read()
    found = dict(vars(typing), np=np)
    for node in ast.parse(source).body:
        if getattr(node, "name", None) in names:
            exec(ast.get_source_segment(source, node), found)
    return found["find_periodic_sequences"]


def repetitions(tokens, search=[]):
    """Whether OLMo-core's filter, with the numbers of its recipes, leaves out a window: `_validate_instance` there."""
    if not search:
        search.append(olmo_core())
    return any(match.times >= 32 for match in search[0](np.asarray(tokens), max_period=13, min_period=1))


def olmo():
    length, files, offset, windows = 64, [], 0, []
    for number in range(3):
        count = 64 * (3 + number) + 11 * number
        tokens = np.array([draw.randrange(1, 250) for _ in range(count)], np.uint16)
        for start, unit, times in [(70, 1, 40), (130, 2, 31), (10 + 64 * 3, 1, 33 + number)]:
            repeated = np.tile(tokens[start : start + unit], times)[: max(0, count - start)]
            tokens[start : start + len(repeated)] = repeated
        name = f"olmo_{number}.npy"
        # AI2's files have no header; a file of numpy itself has one.
        if number == 2:
            np.save(path(name), tokens)
        else:
            tokens.tofile(path(name))
        files.append({"path": f"gs://mix/{name}", "label": "mix", "n_tokens": count, "n_instances": count // length, "instance_offset": offset})
        offset += count // length
        windows += [tokens[64 * place : 64 * place + 64].astype(np.int64) for place in range(count // length)]
    index = {"format_version": "1", "sequence_length": length, "dtype": "uint16", "tokenizer": "none", "total_instances": offset, "total_tokens": sum(file["n_tokens"] for file in files), "fingerprint": "sha256:none", "files": files}
    with open(path("olmo.json"), "w") as file:
        json.dump(index, file)
    draws = np.random.default_rng(7)
    cases = []
    for _ in range(300):
        tokens = draws.integers(1, 4 if draws.random() < 0.3 else 250, int(draws.integers(40, 200)))
        unit, start = int(draws.integers(1, 15)), int(draws.integers(0, 40))
        repeated = np.tile(draws.integers(1, 250, unit), int(draws.integers(25, 40)))[: len(tokens) - start]
        tokens[start : start + len(repeated)] = repeated
        if draws.random() < 0.5:
            tokens[start + len(repeated) // 2 : start + len(repeated)] = tokens[start : start + len(repeated) - len(repeated) // 2]
        cases.append({"tokens": tokens.tolist(), "repeats": repetitions(tokens)})
    return {"windows": [window.tolist() for window in windows], "repeats": [repetitions(window) for window in windows]}, cases


def main():
    array_records()
    tf_records()
    splits = tensorflow_datasets()
    columns()
    windows, cases = olmo()
    with open(path("repetitions.json"), "w") as file:
        json.dump(cases, file, separators=(",", ":"))
    with open(path("texts.json"), "w") as file:
        json.dump({"texts": TEXTS, "tokens": TOKENS, "segments": SEGMENTS, "splits": splits, "olmo": windows}, file, ensure_ascii=False)


sys.exit(main())
