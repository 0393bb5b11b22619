"""Tensors of requests and results: safetensors files, read and written by hand.

A reference to a tensor says at which byte of which file it lies, so that reading needs nothing of the file's header.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import recipe

STORED = {
    "F64": np.float64,
    "F32": np.float32,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "U8": np.uint8,
    "I64": np.int64,
    "I32": np.int32,
    "BOOL": np.bool_,
}
WRITTEN = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def widened(data, dtype):
    """bf16 as float32; everything else as it is."""
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else data


def read(reference, folder=""):
    """The tensor of a reference; file names are relative to `folder`, unless they are absolute."""
    dtype, shape = reference["dtype"], reference["shape"]
    if "recipe" in reference:
        return widened(recipe.make(reference["recipe"]), dtype)
    with Path(folder, reference["file"]).open("rb") as file:
        file.seek(reference["offset"])
        data = np.frombuffer(file.read(reference["bytes"]), STORED[dtype])
    return widened(data.reshape(shape), dtype)


class Weights(Mapping):
    """Weights by name, each read when it is asked for and then kept."""

    def __init__(self, references, folder=""):
        self.references, self.folder, self.kept = references, folder, {}

    def __getitem__(self, name):
        if name not in self.kept:
            self.kept[name] = read(self.references[name], self.folder)
        return self.kept[name]

    def __iter__(self):
        return iter(self.references)

    def __len__(self):
        return len(self.references)


def write(path, tensors):
    """A safetensors file: the length of the header, the header, then the tensors one after the other."""
    header, chunks, offset = {}, [], 0
    for name, tensor in tensors.items():
        chunk = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": WRITTEN[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    text = json.dumps(header).encode()
    partial = Path(f"{path}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(chunks)
    partial.replace(path)  # whoever looks meanwhile sees no half file
