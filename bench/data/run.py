"""Throughput of packed rows beside Grain and datasets, on the same files and tokenizer.

    pip install grain array_record protobuf datasets pyarrow tokenizers numpy
    cargo build --release -p mt-data --example rows
    python bench/data/run.py target/release/examples/rows

The program may also be `maxtext` itself, whose `data stats` reads the same rows; its time then includes the start of the
program. ROUNDS repeats everything, so that changes of the machine's load show.

Grain packs with `FirstFitPackIterDataset` (MaxText's default); `datasets` concatenates and cuts, as the usual recipe of
transformers does. Prints one JSON object for each program and file. All see two cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "true"

import datasets
import grain.python as grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LENGTH = 2048
DOCUMENTS = int(os.environ.get("DOCUMENTS", 20_000))
ROUNDS = int(os.environ.get("ROUNDS", 1))


def documents():
    draws = np.random.default_rng(24)
    words = ["".join(draws.choice(list("abdeiklmnoprstu"), draws.integers(2, 9))) for _ in range(5000)]
    ranks = 1 / np.arange(1, 5001)
    lengths = np.clip(np.exp(draws.normal(np.log(250), 1.0, DOCUMENTS)), 5, 1500).astype(int)
    return [" ".join(draws.choice(words, length, p=ranks / ranks.sum())) for length in lengths]


def example_class():
    """The message `tf.train.Example` with lists of integers, so that TensorFlow need not be installed."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="bench", syntax="proto3")
    lists = file.message_type.add(name="Int64List")
    lists.field.add(name="value", number=1, type=3, label=3)
    feature = file.message_type.add(name="Feature")
    feature.field.add(name="int64_list", number=3, type=11, label=1, type_name=".bench.Int64List")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, label=1, type_name=".bench.Feature")
    features.field.add(name="feature", number=1, type=11, label=3, type_name=".bench.Features.FeatureEntry")
    file.message_type.add(name="Example").field.add(name="features", number=1, type=11, label=1, type_name=".bench.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Example"))


Example = example_class()


def example(ids):
    message = Example()
    message.features.feature["ids"].int64_list.value.extend(ids)
    return message.SerializeToString()


def report(program, file, tokens, seconds, **more):
    print(json.dumps({"program": program, "file": file, "tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds), **more}), flush=True)


def grain_rows(file, read, map_row):
    source = read()
    data = grain.MapDataset.source(source).shuffle(seed=1).map(map_row).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=500))
    from grain.experimental import FirstFitPackIterDataset

    packed = FirstFitPackIterDataset(data, length_struct={"inputs": LENGTH}, num_packing_bins=64)
    begin, tokens = time.time(), 0
    for row in packed.batch(16):
        tokens += int((row["inputs_segment_ids"] != 0).sum()) if "inputs_segment_ids" in row else int((row[1]["inputs"] != 0).sum())
    report("grain", file, tokens, time.time() - begin)


def main(ours):
    texts = documents()
    with tempfile.TemporaryDirectory() as directory:
        path = lambda name: os.path.join(directory, name)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(texts[:2000], trainers.BpeTrainer(vocab_size=4096, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        tokenizer.save(path("tokenizer.json"))
        begin = time.time()
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        report("tokenizers", "texts in memory", sum(map(len, encoded)), time.time() - begin)
        pq.write_table(pa.table({"ids": pa.array(encoded, pa.list_(pa.int32()))}), path("ids.parquet"), row_group_size=2000)
        pq.write_table(pa.table({"text": texts}), path("text.parquet"), row_group_size=2000)
        writer = ArrayRecordWriter(path("ids.array_record"), "group_size:1")
        for ids in encoded:
            writer.write(example(ids))
        writer.close()

        def program(kind, name, column, *more):
            if os.path.basename(ours) == "maxtext":
                return statistics(kind, name, column, *more)
            lines = subprocess.run([ours, kind, path(name), column, str(LENGTH), *more], check=True, capture_output=True, text=True)
            for line in map(json.loads, lines.stdout.splitlines()):
                report("maxtext", name, line["tokens"], line["seconds"], packing=line["packing"], padding_share=round(line["padding_share"], 4))

        def statistics(kind, name, column, *more):
            tokens = [f"tokenizer_path={more[0]}", "add_bos=false", "add_eos=false"] if more else ["tokenize_train_data=false"]
            for packing in ["first_fit", "best_fit", "concat_then_split"]:
                keys = ["dataset_type=grain", f"grain_file_type={kind}", f"grain_train_files={path(name)}", f"train_data_columns=[{column}]", f"grain_packing_type={packing}", f"max_target_length={LENGTH}", "vocab_size=4096", "num_epoch=1", *tokens]
                begin = time.time()
                done = subprocess.run([ours, "data", "stats", "--json", "--rows", str(10**9), *keys], capture_output=True, text=True)
                seconds = time.time() - begin
                assert done.returncode == 0, done.stderr
                line = json.loads(done.stdout.strip().splitlines()[-1])
                assert line["ended"]
                report("maxtext", name, round(line["positions"] * (1 - line["padding_share"])), seconds, packing=packing, padding_share=round(line["padding_share"], 4))

        def of_program():
            program("parquet", "ids.parquet", "ids")
            program("arrayrecord", "ids.array_record", "ids")
            program("parquet", "text.parquet", "text", path("tokenizer.json"))

        def parse(record):
            message = Example.FromString(record)
            return {"inputs": np.array(message.features.feature["ids"].int64_list.value, np.int32)[:LENGTH]}

        def of_grain():
            grain_rows("ids.array_record", lambda: grain.ArrayRecordDataSource(path("ids.array_record")), parse)
            table = datasets.Dataset.from_parquet(path("ids.parquet"), cache_dir=path("cache")).with_format("numpy")
            grain_rows("ids.parquet (through datasets)", lambda: table, lambda row: {"inputs": np.asarray(row["ids"], np.int32)[:LENGTH]})
            text = datasets.Dataset.from_parquet(path("text.parquet"), cache_dir=path("cache"))
            grain_rows("text.parquet (through datasets)", lambda: text, lambda row: {"inputs": np.array(tokenizer.encode(row["text"]).ids, np.int32)[:LENGTH]})

        def cut(batch):
            joined = np.concatenate([np.asarray(ids) for ids in batch["ids"]])
            used = len(joined) // LENGTH * LENGTH
            return {"rows": joined[:used].reshape(-1, LENGTH)}

        def counted(data, name):
            begin, tokens = time.time(), 0
            for rows in data.batch(16):
                tokens += np.asarray(rows["rows"]).size
            report("datasets", name, tokens, time.time() - begin)

        def of_datasets():
            stream = datasets.load_dataset("parquet", data_files=path("ids.parquet"), split="train", streaming=True).shuffle(seed=1, buffer_size=1000)
            counted(stream.with_format("numpy").map(cut, batched=True, batch_size=1000, remove_columns=["ids"]), "ids.parquet")
            stream = datasets.load_dataset("parquet", data_files=path("text.parquet"), split="train", streaming=True).shuffle(seed=1, buffer_size=1000)
            encode = lambda batch: cut({"ids": [encoding.ids for encoding in tokenizer.encode_batch(batch["text"])]})
            counted(stream.map(encode, batched=True, batch_size=1000, remove_columns=["text"]), "text.parquet")

        for _ in range(ROUNDS):
            of_program()
            of_grain()
            of_datasets()


if __name__ == "__main__":
    main(sys.argv[1])
