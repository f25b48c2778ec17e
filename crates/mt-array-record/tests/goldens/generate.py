"""Writes the ArrayRecord files of the tests with the package `array_record` 0.8.6.

Usage: python generate.py. The files are mostly padding, so the program `zstd` compresses them.
"""

import hashlib
import pathlib
import subprocess
import tempfile

from array_record.python.array_record_module import ArrayRecordWriter

HERE = pathlib.Path(__file__).parent

SMALL = [0, 1, 127, 128, 300, 4097, 5]
LARGE = [70000, 65472, 1, 200001, 64000]


def record(index, length):
    """Bytes that the tests compute too."""
    return bytes((j * j + 17 * index) % 251 for j in range(length))


def write(path, options, lengths):
    writer = ArrayRecordWriter(str(path), options)
    for index, length in enumerate(lengths):
        writer.write(record(index, length))
    writer.close()
    return path.read_bytes()


FILES = {
    "no_records": ("group_size:1,uncompressed", []),
    "no_records_default": ("", []),
    "empty_records": ("group_size:2,uncompressed", [0, 0, 3, 0, 0]),
    "many_empty_records": ("group_size:5000,zstd:3", [0] * 5001),
    "group_1": ("group_size:1,uncompressed", SMALL),
    "group_2": ("group_size:2,uncompressed", SMALL),
    "default": ("", SMALL),
    "zstd": ("group_size:3,zstd:5", SMALL),
    "brotli": ("group_size:3,brotli:6", SMALL),
    "snappy": ("group_size:3,snappy", SMALL),
    "blocks": ("group_size:2,uncompressed", LARGE),
    "blocks_snappy": ("group_size:2,snappy", LARGE),
    "padded": ("group_size:2,uncompressed,pad_to_block_boundary:true", SMALL),
    "transposed": ("group_size:2,transpose:true", SMALL),
}


def main():
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "file"
        for name, (options, sizes) in FILES.items():
            write(path, options, sizes)
            compressed = HERE / f"{name}.array_record.zst"
            subprocess.run(["zstd", "-19", "-q", "-f", str(path), "-o", str(compressed)], check=True)
        # One record whose chunk, then whose footer, ends at every position around the end of a block.
        sums = [
            f"{length} {hashlib.sha256(write(path, 'group_size:1,uncompressed', [length])).hexdigest()}"
            for length in range(65230, 65460)
        ]
    (HERE / "sha256_by_length.txt").write_text("\n".join(sums) + "\n")


if __name__ == "__main__":
    main()
