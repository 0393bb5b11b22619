"""Checkpoint folders for tests: headers and sparse files, so that the released model takes no space."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from conformance.checkpoint import INDEX, SHARD_DTYPES
from conformance.checkpoint_layout import SCALE_DTYPE, Layout, scale_name

Stored = tuple[str, tuple[int, ...]]
"""Element type and shape in the file."""


def stored_tensors(layout: Layout) -> dict[str, Stored]:
    """Every tensor in its usual form, scales included."""
    tensors: dict[str, Stored] = {}
    for name, parameter in layout.parameters.items():
        form = parameter.forms[0]
        tensors[name] = (form.dtype, form.stored(parameter.shape))
        scale = form.scale(parameter.shape)
        if scale is not None:
            tensors[scale_name(name)] = (SCALE_DTYPE, scale)
    return tensors


def header_of(tensors: Mapping[str, Stored]) -> tuple[dict[str, Any], int]:
    """The header of a shard and the number of bytes behind it."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + -(-prod(shape) * SHARD_DTYPES[dtype] // 8)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header, offset


def write_raw(path: Path, header: bytes, data_bytes: int) -> None:
    """A shard with any header and a hole for its data."""
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data_bytes)


def write_shard(path: Path, tensors: Mapping[str, Stored]) -> None:
    header, data_bytes = header_of(tensors)
    write_raw(path, json.dumps(header).encode(), data_bytes)


def write_index(directory: Path, placed: Mapping[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(placed)}))


def write_folder(directory: Path, tensors: Mapping[str, Stored], shards: int) -> dict[str, str]:
    """Shards and index; returns the shard of each tensor."""
    directory.mkdir(exist_ok=True)
    names = list(tensors)
    size = -(-len(names) // shards)
    placed: dict[str, str] = {}
    for number in range(shards):
        part: Iterable[str] = names[number * size : (number + 1) * size]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_shard(directory / file, {name: tensors[name] for name in part})
        placed |= dict.fromkeys(part, file)
    write_index(directory, placed)
    return placed
