"""Tensors of arguments as safetensors files in a directory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.lazy import LazyTensors
from conformance.protocol.values import Reference
from conformance.recipe import RecipeScale, RecipeTensor
from conformance.tensors import Tensor, read_header, write_safetensors

KEPT_WEIGHTS = 1 << 30
"""Bytes of weights that stay on disk from case to case: room for the small sets many times over; at the released sizes,
for the attention of a few layers."""

STORED_AS_BYTES = frozenset({"F8_E4M3", "F8_E8M0", "F4_E2M1"})
"""Dtypes that files hold as U8: few readers of safetensors know them."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], shown: str | None = None) -> dict[str, Reference]:
    """Write tensors to one file and return a reference to each, by the same names.

    `shown` is the path as references name it; None for the path itself.
    """
    write_safetensors(path, {name: _stored(tensor) for name, tensor in tensors.items()})
    entries = read_header(path).entries
    return {
        name: {
            "file": str(path) if shown is None else shown,
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "offset": entries[name].begin,
            "bytes": entries[name].end - entries[name].begin,
        }
        for name, tensor in tensors.items()
    }


def _stored(tensor: Tensor) -> Tensor:
    return Tensor("U8", tensor.data) if tensor.dtype in STORED_AS_BYTES else tensor


def recipe_reference(made: RecipeTensor | RecipeScale) -> Reference:
    """How a tensor of the recipe is made (`fixtures/RECIPE.md`), for whoever makes it instead of reading it.

    `shape` and `dtype` are those of the made tensor; `recipe.shape` is [N, K] also where FP4 packs two to a byte.
    """
    if isinstance(made, RecipeScale):
        recipe: dict[str, Any] = {"kind": "scale", "exponent": made.e}
        return {
            "recipe": {"name": f"{made.weight}.scale", "seed": made.seed, "shape": list(made.shape), **recipe},
            "dtype": "F8_E8M0",
            "shape": list(made.shape),
        }
    recipe = {"kind": made.kind, "gain": made.gain}
    return {
        "recipe": {"name": made.name, "seed": made.seed, "shape": list(made.shape), **recipe},
        "dtype": made.dtype,
        "shape": list(made.stored_shape),
    }


@dataclass(frozen=True)
class _Written:
    """The files of a unit's weights.  `weights` is kept so that its identity stays its own."""

    weights: Mapping[str, Tensor]
    references: Mapping[str, Reference]
    files: tuple[Path, ...]
    size: int


class TemporaryStore:
    """Files for a conversation: arguments are removed after each request, weights when they are too many.

    Args:
        directory: an existing directory for the files alone.
        recipe: weights that follow from the recipe are described rather than written.
    """

    def __init__(self, directory: Path, recipe: bool = False) -> None:
        self._directory = directory
        self.recipe = recipe
        self._arguments = directory / "arguments.safetensors"
        self._weights: OrderedDict[int, _Written] = OrderedDict()
        self._units = 0
        self._has_arguments = False

    def tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """Write the tensor arguments of one request; they stay until `forget_arguments`."""
        references = write_tensors(self._arguments, tensors)
        _seal(self._arguments)
        self._has_arguments = True
        return references

    def weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Reference]:
        """Write the weights of a unit the first time; tensors that are made on demand one by one."""
        known = self._weights.get(id(weights))
        if known is None:
            known = self._weights[id(weights)] = self._write(weights)
        self._weights.move_to_end(id(weights))
        return known.references

    def forget_arguments(self) -> bool:
        """The request was answered: remove its tensors; whether they were as they had been written."""
        unchanged = not self._has_arguments or _unchanged(self._arguments)
        self._has_arguments = False
        self._arguments.unlink(missing_ok=True)
        return unchanged

    def forget_weights(self) -> bool:
        """The case has ended: remove changed weights, and those not used for longest down to `KEPT_WEIGHTS`.

        Returns whether all weights were as they had been written.
        """
        changed = [key for key, unit in self._weights.items() if not all(_unchanged(file) for file in unit.files)]
        for key in changed:
            self._remove(key)
        while sum(unit.size for unit in self._weights.values()) > KEPT_WEIGHTS:
            self._remove(next(iter(self._weights)))
        return not changed

    def _remove(self, key: int) -> None:
        for file in self._weights.pop(key).files:
            file.unlink(missing_ok=True)

    def _write(self, weights: Mapping[str, Tensor]) -> _Written:
        self._units += 1
        stem = f"weights-{self._units:04d}"
        if not isinstance(weights, LazyTensors):
            path = self._directory / f"{stem}.safetensors"
            references = write_tensors(path, weights)
            return _Written(weights, references, (path,), _seal(path))
        references = {}
        files: list[Path] = []
        for name in weights:
            made = weights.recipe(name) if self.recipe else None
            if made is not None:
                references[name] = recipe_reference(made)
                continue
            files.append(self._directory / f"{stem}-{len(files):04d}.safetensors")
            references |= write_tensors(files[-1], {name: weights[name]})
        return _Written(weights, references, tuple(files), sum(map(_seal, files)))


def _seal(path: Path) -> int:
    """Mark a file so that any later change shows; its size."""
    path.chmod(0o400)
    # Whoever writes to it afterwards moves the time on from 0, however soon and however little.
    os.utime(path, (0, 0))
    return path.stat().st_size


def _unchanged(path: Path) -> bool:
    try:
        return path.stat(follow_symlinks=False).st_mtime_ns == 0
    except OSError:
        return False
