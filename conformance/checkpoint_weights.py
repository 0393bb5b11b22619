"""Weights of some layers of a checkpoint folder: headers are read at once, a tensor when it is looked up, none is kept.

The folder is as untrusted as it is to `conformance checkpoint`: the same header parser, the same rules for its files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.checkpoint import SHARD_DTYPES, inside, read_index
from conformance.checkpoint_layout import SCALE_DTYPE, Parameter, scale_name
from conformance.errors import FixtureError
from conformance.lazy import Ints, LazyTensors
from conformance.tensors import Entry, Header, MissingTensorError, Tensor, one_line, read_header

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.(.+)", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Excerpt:
    """What a set that stores no weights says of them: which layers of a checkpoint they are, and how to tell.

    Attributes:
        layers: numbers in the checkpoint of the set's layers 0, 1, ..., ascending.
        headers_sha256: see `CheckpointTensors.headers_sha256`.
        tensors: SHA-256 of the bytes of every tensor that the recording used, by its name in the checkpoint.
    """

    layers: tuple[int, ...]
    headers_sha256: str
    tensors: Mapping[str, str]

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any], layer_count: int, origin: str) -> Excerpt:
        """Read `checkpoint.json`.

        Raises:
            FixtureError: not of the form, or of another number of layers; the line begins with `origin`.
        """
        layers, headers, tensors = (mapping.get(key) for key in ("layers", "headers_sha256", "tensors"))
        if (
            not isinstance(layers, list)
            or not all(type(layer) is int and layer >= 0 for layer in layers)
            or layers != sorted(set(layers))
        ):
            raise FixtureError(f"{origin}: layers is not an ascending list of layer numbers")
        if len(layers) != layer_count:
            raise FixtureError(f"{origin}: lists {len(layers)} layers, the configuration has {layer_count}")
        if not isinstance(headers, str) or not _SHA256.fullmatch(headers):
            raise FixtureError(f"{origin}: headers_sha256 is not a SHA-256")
        if not isinstance(tensors, dict) or not all(
            isinstance(value, str) and _SHA256.fullmatch(value) for value in tensors.values()
        ):
            raise FixtureError(f"{origin}: tensors is not an object from tensor to SHA-256")
        return Excerpt(tuple(layers), headers, tensors)

    def content(self) -> dict[str, Any]:
        """The same as `from_mapping` reads it."""
        return {
            "layers": list(self.layers),
            "headers_sha256": self.headers_sha256,
            "tensors": dict(sorted(self.tensors.items())),
        }


class CheckpointTensors(LazyTensors):
    """Tensors of layers of a checkpoint, numbered from 0 in the order of `layers`: `layers.0.attn.wq_a.weight`, ...

    Each look-up reads the tensor anew and keeps nothing but its hash, in `sha256` by its name in the checkpoint; with
    an `excerpt`, bytes of another hash than the recorded one are refused. Iteration lists the tensors of the excerpt,
    which leaves out the experts that no recorded token chose.

    Attributes:
        header: entries by the names used here, and no metadata.

    Raises:
        FixtureError: no such folder, an index or a header that is damaged, or not the checkpoint of the excerpt; one
            line that names the file or the tensor.
    """

    def __init__(self, directory: Path, layers: Sequence[int], excerpt: Excerpt | None = None) -> None:
        if not directory.is_dir():
            raise FixtureError(f"{one_line(str(directory))}: not a directory")
        self.directory = directory.resolve()
        self.layers = tuple(layers)
        self.sha256: dict[str, str] = {}
        self._excerpt = excerpt
        self._number = {layer: number for number, layer in enumerate(self.layers)}
        self._shards = _placed(self.directory, self._renamed)
        self.header = Header({name: found.entry for name, found in self._shards.items()}, {})
        self._listed: Collection[str] = self._shards.keys()
        if excerpt is not None:
            self._listed = [own for name in excerpt.tensors if (own := self._renamed(name)) is not None]
            for name in excerpt.tensors:
                if self._renamed(name) not in self._shards:
                    raise FixtureError(f"{one_line(str(directory))}: tensor {one_line(name)}: missing")
            if self.headers_sha256 != excerpt.headers_sha256:
                shown = ", ".join(map(str, layers))
                raise FixtureError(
                    f"{one_line(str(directory))}: names, types or shapes of layers {shown} are not those recorded"
                )

    @property
    def headers_sha256(self) -> str:
        """Hash of name, type and shape of every tensor of these layers, in the order of their names."""
        lines = sorted((found.name, found.stored_dtype, found.entry.shape) for found in self._shards.values())
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()

    def check(self, parameters: Mapping[str, Parameter]) -> None:
        """Hold names, types and shapes against the layers of a layout.

        Raises:
            FixtureError: a tensor is missing, or has another type or shape; names it as the checkpoint does.
        """
        place = one_line(str(self.directory))
        ours = {name: parameter for name, parameter in parameters.items() if _LAYER.fullmatch(name)}
        check_parameters(ours, self.header.entries, lambda name: f"{place}: tensor {self._original(name)}")

    def _original(self, name: str) -> str:
        """The name in the checkpoint."""
        _, number, rest = name.split(".", 2)
        return f"layers.{self.layers[int(number)]}.{rest}"

    def _renamed(self, name: str) -> str | None:
        """The name used here of a tensor of the checkpoint, None outside the layers."""
        match = _LAYER.fullmatch(name)
        number = None if match is None else self._number.get(int(match[1]))
        return None if match is None or number is None else f"layers.{number}.{match[2]}"

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            MissingTensorError: no tensor of that name.
            FixtureError: the file cannot be read any more, or the bytes are not those of the recording.
        """
        found = self._shards.get(name)
        if found is None:
            raise MissingTensorError(f"{one_line(str(self.directory))}: tensor {one_line(name)}: missing")
        where = f"{one_line(found.path.name)}: tensor {one_line(found.name)}"
        entry = found.entry
        try:
            with found.path.open("rb") as file:
                file.seek(entry.begin)
                raw = file.read(entry.end - entry.begin)
            tensor = Tensor.from_bytes(raw, entry.dtype, entry.shape)
        except OSError as error:
            raise FixtureError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise FixtureError(f"{where}: {error}") from error
        if found.name not in self.sha256:
            self.sha256[found.name] = hashlib.sha256(raw).hexdigest()
            recorded = None if self._excerpt is None else self._excerpt.tensors.get(found.name)
            if recorded not in (None, self.sha256[found.name]):
                raise FixtureError(f"{where}: other values than were recorded: not the checkpoint of this set")
        return tensor

    def rows(self, name: str, rows: Ints) -> Tensor:
        """Rows [...] of a matrix: [..., K]."""
        return self[name][rows]

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def within(self, prefix: str) -> LazyTensors:
        """The tensors whose names begin with `prefix`; all of them where none is listed.

        Whoever asks for an expert by itself needs it, whether or not a recorded token chose it.
        """
        if any(name.startswith(prefix) for name in self._listed):
            return super().within(prefix)
        everything = copy.copy(self)
        everything._listed = self._shards.keys()
        return LazyTensors.within(everything, prefix)


@dataclass(frozen=True)
class _Placed:
    """A tensor of a shard; `entry` has the element type under which it is used, `stored_dtype` that of the file."""

    path: Path
    name: str
    entry: Entry
    stored_dtype: str


def _placed(directory: Path, renamed: Callable[[str], str | None]) -> dict[str, _Placed]:
    """Every tensor that `renamed` has a name for, by that name; shards without one are not opened if an index says so.

    Raises:
        FixtureError: see `CheckpointTensors`.
    """
    index = read_index(directory)
    if index is None:
        shards = sorted(path.name for path in directory.glob("*.safetensors"))
    else:
        shards = sorted({shard for name, shard in index.items() if renamed(name) is not None})
    placed: dict[str, _Placed] = {}
    for shard in shards:
        path = inside(directory, shard)
        for name, entry in read_header(path, shard, SHARD_DTYPES).entries.items():
            own = renamed(name)
            # The index decides which copy of a tensor counts.
            if own is None or (index is not None and index.get(name) != shard):
                continue
            if own in placed:
                raise FixtureError(f"{one_line(shard)}: tensor {one_line(name)}: also in {placed[own].path.name}")
            # Packed FP4 is often saved signed: the same bytes.
            dtype = "U8" if entry.dtype == "I8" else entry.dtype
            placed[own] = _Placed(path, name, Entry(dtype, entry.shape, entry.begin, entry.end), entry.dtype)
    if not placed:
        raise FixtureError(f"{one_line(str(directory))}: no tensor of these layers in it")
    return placed


def check_parameters(
    parameters: Mapping[str, Parameter], entries: Mapping[str, Entry], where: Callable[[str], str]
) -> None:
    """Hold entries against the parameters that a configuration calls for; `where` says how a message begins.

    Raises:
        FixtureError: a parameter or its scales are missing, or have another type or shape.
    """
    for name, parameter in parameters.items():
        stored = entries.get(name)
        if stored is None:
            raise FixtureError(f"{where(name)}: missing")
        found = (stored.dtype, tuple(stored.shape))
        forms = [form for form in parameter.forms if found == (form.dtype, form.stored(parameter.shape))]
        if not forms:
            form = parameter.forms[0]
            expected = f"{form.dtype} {list(form.stored(parameter.shape))}"
            raise FixtureError(
                f"{where(name)}: {stored.dtype} {list(stored.shape)}, the configuration calls for {expected}"
            )
        scale = forms[0].scale(parameter.shape)
        if scale is not None:
            stored = entries.get(scale_name(name))
            if stored is None or (stored.dtype, tuple(stored.shape)) != (SCALE_DTYPE, scale):
                raise FixtureError(f"{where(name)}: its scales are missing or not {SCALE_DTYPE} {list(scale)}")
