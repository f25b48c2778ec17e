"""Checks that array_record, TensorFlow, pyarrow and datasets read what `maxtext data convert` writes.

    pip install array_record tensorflow-cpu pyarrow datasets
    python read_ours.py target/debug/maxtext
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import datasets
import pyarrow.parquet as pq
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordReader

HERE = os.path.dirname(os.path.abspath(__file__))
ROWS = [json.loads(line) for line in open(os.path.join(HERE, "datasets.jsonl"))]


def example(record):
    features = tf.train.Example.FromString(record).features.feature
    return {"text": features["text"].bytes_list.value[0].decode(), "ids": list(features["ids"].int64_list.value)}


def main(program):
    program = os.path.abspath(program)
    with tempfile.TemporaryDirectory() as directory:
        path = lambda name: os.path.join(directory, name)

        def convert(name, *options):
            source = os.path.join(HERE, "datasets.jsonl")
            subprocess.run([program, "data", "convert", source, "--output", path(name), *options], check=True, stdout=subprocess.DEVNULL)
            return path(name)

        checks = 0
        for compression in ["none", "zstd", "brotli", "snappy"]:
            for group in ["1", "7"]:
                reader = ArrayRecordReader(convert("a.array_record", "--compression", compression, "--group-size", group))
                assert [example(record) for record in reader.read_all()] == ROWS, compression
                checks += 1
        for compression in ["none", "gzip"]:
            name = convert("a.tfrecord", "--compression", compression)
            records = tf.data.TFRecordDataset(name, compression_type="GZIP" if compression == "gzip" else "")
            assert [example(record) for record in records.as_numpy_iterator()] == ROWS, compression
            checks += 1
        for compression in ["none", "snappy", "gzip", "zstd"]:
            name = convert("a.parquet", "--compression", compression)
            assert pq.read_table(name).to_pylist() == [{"ids": row["ids"], "text": row["text"]} for row in ROWS], compression
            table = datasets.Dataset.from_parquet(name, cache_dir=path(f"cache_{compression}"))
            assert list(table) == [{"ids": row["ids"], "text": row["text"]} for row in ROWS]
            checks += 2
        with gzip.open(convert("a.jsonl.gz"), "rt") as file:
            assert [json.loads(line) for line in file] == ROWS
        print(f"{checks + 1} files are read")


main(sys.argv[1])
