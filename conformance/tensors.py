"""Tensors as bits plus a logical dtype, and the safetensors files that hold them.

numpy has no bf16 and no 8- or 4-bit float, so a `Tensor` keeps such values as their codes and decodes on request.
Files are untrusted input: nothing in a header is believed before it was checked against the size of the file.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from conformance.errors import FixtureError
from conformance.formats import FORMATS

Array = npt.NDArray[Any]

#: Logical dtype -> the numpy type of `Tensor.data`: values where numpy has the type, codes where it has not.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "F4_E2M1": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
INTEGERS = frozenset({"I64", "I32", "U8"})
#: Kept as codes and decoded through `conformance.formats`.
CODED = frozenset({"BF16", "F8_E4M3", "F8_E8M0", "F4_E2M1"})
#: What a golden file may hold, and the bits of an element. One FP4 code a byte has no spelling of its own there: it is
#: written as U8.
FILE_DTYPES: Mapping[str, int] = {
    dtype: numpy_type.itemsize * 8 for dtype, numpy_type in NUMPY_TYPES.items() if dtype != "F4_E2M1"
}

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 32
MAX_DIM = 1 << 48


@dataclass(frozen=True, eq=False)
class Tensor:
    """Bits and their logical dtype.

    `dtype` is the safetensors spelling (`F32`, `BF16`, `F8_E4M3`, …) or `F4_E2M1` for unpacked FP4, one code a byte.
    `data` has the type `NUMPY_TYPES[dtype]` and is made read-only.

    Raises:
        ValueError: unknown dtype, an array of another type, an FP4 code above 15.
    """

    dtype: str
    data: Array

    def __post_init__(self) -> None:
        expected = _numpy_type(self.dtype)
        if not isinstance(self.data, np.ndarray) or self.data.dtype != expected:
            found = getattr(self.data, "dtype", type(self.data).__name__)
            raise ValueError(f"a {self.dtype} tensor is kept as a {expected} array, not {found}")
        if self.dtype == "F4_E2M1" and self.data.size and self.data.max() > 15:
            raise ValueError(f"FP4 codes are 0 to 15, found {self.data.max()}")
        frozen = self.data.view()
        frozen.flags.writeable = False
        object.__setattr__(self, "data", frozen)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return self.data.shape

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"

    def values(self) -> Array:
        """The values, same shape: float64 for every float dtype, int64 for integers, bool for BOOL. Always exact."""
        if self.dtype in CODED:
            return np.asarray(FORMATS[self.dtype].decode(self.data), dtype=np.float64)
        if self.dtype == "BOOL":
            return self.data.copy()
        return self.data.astype(np.int64 if self.dtype in INTEGERS else np.float64)

    def bits(self) -> bytes:
        """The raw bytes, row-major, little-endian."""
        return self.data.astype(self.data.dtype.newbyteorder("<"), copy=False).tobytes()

    def equal_bits(self, other: "Tensor") -> bool:
        """True when dtype, shape and every bit agree; −0 differs from +0, and a NaN equals itself."""
        return self.dtype == other.dtype and self.shape == other.shape and self.bits() == other.bits()

    def reshape(self, *shape: int) -> "Tensor":
        """The same elements in row-major order under another shape; one size may be −1."""
        return Tensor(self.dtype, self.data.reshape(shape))

    def view_as(self, dtype: str) -> "Tensor":
        """The same bits under another dtype of the same width, such as FP4 codes that a file holds as U8.

        Raises:
            ValueError: the widths differ, or the bits are not valid for `dtype`.
        """
        return Tensor.from_bytes(self.bits(), dtype, self.shape)

    def __getitem__(self, index: Any) -> "Tensor":
        """Part of the tensor, by numpy's rules; a single element has shape `()`."""
        return Tensor(self.dtype, np.asarray(self.data[index]))

    @staticmethod
    def from_values(values: npt.ArrayLike, dtype: str) -> "Tensor":
        """Values of any shape rounded to `dtype` (nearest even; too large becomes what the format says).

        Raises:
            ValueError: unknown dtype, or a value that an integer or BOOL dtype cannot hold exactly.
        """
        target = _numpy_type(dtype)
        if dtype in INTEGERS or dtype == "BOOL":
            return Tensor(dtype, _exact_integers(np.asarray(values), dtype))
        wide = np.asarray(values, dtype=np.float64)
        if dtype in CODED:
            return Tensor(dtype, np.asarray(FORMATS[dtype].encode(wide)).astype(target))
        with np.errstate(over="ignore", under="ignore"):
            return Tensor(dtype, wide.astype(target))

    @staticmethod
    def from_bytes(raw: bytes, dtype: str, shape: Sequence[int]) -> "Tensor":
        """A tensor from row-major little-endian bytes, copied.

        Raises:
            ValueError: unknown dtype, a length that is not that of `shape`, a BOOL byte above 1, an FP4 code above 15.
        """
        target = _numpy_type(dtype)
        if len(raw) != prod(shape) * target.itemsize:
            raise ValueError(f"{dtype} {list(shape)} takes {prod(shape) * target.itemsize} bytes, not {len(raw)}")
        if dtype == "BOOL":
            flags = np.frombuffer(raw, np.uint8)
            if flags.size and flags.max() > 1:
                raise ValueError(f"BOOL bytes are 0 or 1, found {flags.max()}")
        data = np.frombuffer(raw, target.newbyteorder("<")).astype(target)
        return Tensor(dtype, data.reshape(shape))


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors one after the other along `axis`; the other axes must agree.

    Raises:
        ValueError: no tensors, different dtypes, or shapes that do not fit.
    """
    dtypes = sorted({tensor.dtype for tensor in tensors})
    if len(dtypes) != 1:
        raise ValueError(f"concatenate needs tensors of one dtype, not {dtypes}")
    return Tensor(dtypes[0], np.concatenate([tensor.data for tensor in tensors], axis=axis))


def _numpy_type(dtype: str) -> np.dtype[Any]:
    if dtype not in NUMPY_TYPES:
        raise ValueError(f"unknown dtype {dtype!r}: one of {', '.join(NUMPY_TYPES)}")
    return NUMPY_TYPES[dtype]


def _exact_integers(values: Array, dtype: str) -> Array:
    if values.dtype.kind == "f":
        if not (np.isfinite(values) & (values == np.rint(values))).all():
            raise ValueError(f"{dtype} holds whole numbers only")
    elif values.dtype.kind not in "iub":
        raise ValueError(f"{dtype} cannot hold values of type {values.dtype}")
    low, high = (0, 1) if dtype == "BOOL" else (np.iinfo(NUMPY_TYPES[dtype]).min, np.iinfo(NUMPY_TYPES[dtype]).max)
    # Python integers compare exactly; numpy would first round int64's limits to a float.
    if values.size and not (low <= int(values.min()) and int(values.max()) <= high):
        raise ValueError(f"{dtype} holds {low} to {high}, values span {values.min()} to {values.max()}")
    return values.astype(NUMPY_TYPES[dtype])


# Files


class MissingTensorError(FixtureError, KeyError):
    """A tensor that a file does not hold; a `KeyError` too, so that the file is a proper mapping."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would put the message in quotes.


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: `begin` and `end` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked safetensors header: entries by name in the order of the data, and the free-text metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def one_line(text: str) -> str:
    """Text from a file made fit for a one-line message: control characters escaped, at most 200 characters."""
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 200 else shown[:200] + "…"


def parse_json(raw: bytes, label: str) -> Any:
    """Parse UTF-8 JSON and refuse what parsers disagree about: duplicate keys, other encodings.

    Raises:
        FixtureError: not JSON; the line begins with `label`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"duplicate key {one_line(key)}")
            found[key] = value
        return found

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, numbers too long to convert.
        raise FixtureError(f"{one_line(label)}: not valid JSON: {one_line(str(error))}") from error


def read_header(path: Path, label: str | None = None, dtypes: Mapping[str, int] = FILE_DTYPES) -> Header:
    """Read and check the header of a safetensors file; no tensor data is read.

    The tensors must cover the rest of the file exactly, without gap or overlap, as the format demands. `dtypes` are the
    accepted element types and their bits.

    Raises:
        FixtureError: one line that begins with `label` (the path when None) and names the tensor at fault.
    """
    label = one_line(label or str(path))
    try:
        with path.open("rb") as file:
            return parse_header(file, label, dtypes)
    except OSError as error:
        raise FixtureError(f"{label}: cannot be read: {error.strerror}") from error


def parse_header(
    file: IO[bytes], label: str, dtypes: Mapping[str, int] = FILE_DTYPES, largest: int = MAX_HEADER_BYTES
) -> Header:
    """`read_header` for a file that is open at its beginning, with a header of at most `largest` bytes.

    Raises:
        FixtureError: as `read_header`.
        OSError: the file cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise FixtureError(f"{label}: truncated: {size} bytes, the header alone says {length}")
    if length > largest:
        raise FixtureError(f"{label}: header of {length} bytes, the limit is {largest}")
    raw = file.read(length)

    parsed = parse_json(raw, f"{label}: header")
    if not isinstance(parsed, dict):
        raise FixtureError(f"{label}: the header is not a JSON object")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FixtureError(f"{label}: __metadata__ is not an object of strings")

    start = 8 + length
    entries = {
        name: _entry(f"{label}: tensor {one_line(name)}", fields, start, dtypes) for name, fields in parsed.items()
    }
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    covered = start
    for name, entry in entries.items():
        where = f"{label}: tensor {one_line(name)}"
        if entry.begin != covered:
            relation = "overlaps" if entry.begin < covered else "leaves a gap after"
            raise FixtureError(f"{where}: {relation} the tensor before it: begins at {entry.begin}, not {covered}")
        if entry.end > size:
            raise FixtureError(f"{where}: truncated: ends at byte {entry.end} of {size}")
        covered = entry.end
    if covered != size:
        raise FixtureError(f"{label}: {size - covered} bytes after the last tensor")
    return Header(entries, metadata)


def _entry(where: str, fields: Any, start: int, dtypes: Mapping[str, int]) -> Entry:
    """Check one header entry on its own; `start` is where the data begins in the file."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise FixtureError(f"{where}: an entry has dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise FixtureError(f"{where}: dtype {one_line(repr(dtype))} is not one of {', '.join(sorted(dtypes))}")
    if not _naturals(shape) or len(shape) > MAX_RANK or max(shape, default=0) > MAX_DIM:
        raise FixtureError(f"{where}: shape {one_line(repr(shape))} is not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FixtureError(f"{where}: data_offsets {one_line(repr(offsets))} are not a begin and an end")
    begin, end = offsets
    needed = -(-prod(shape) * dtypes[dtype] // 8)
    if end - begin != needed:
        raise FixtureError(f"{where}: {end - begin} bytes, {dtype} {shape} takes {needed}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _naturals(value: Any) -> bool:
    # `type is int`, because JSON's true is an int to isinstance.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class SafetensorsFile(Mapping[str, Tensor]):
    """A safetensors file as a mapping from name to `Tensor`: the header is checked now, data is read when asked for.

    Tensors are read, not memory-mapped: a file that shrinks while in use is then an error message, not a SIGBUS.
    A name that is absent raises `MissingTensorError`.

    Args:
        path: the file.
        label: how messages call the file; the path when None.
        cached: keep every tensor that was read.

    Attributes:
        read_names: the tensors that were asked for so far.

    Raises:
        FixtureError: the header is damaged.
    """

    def __init__(self, path: Path, label: str | None = None, cached: bool = False) -> None:
        self.path = path
        self.label = one_line(label or str(path))
        self.header = read_header(path, label)
        self.read_names: set[str] = set()
        self._cache: dict[str, Tensor] | None = {} if cached else None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free-text metadata of the header."""
        return self.header.metadata

    def __len__(self) -> int:
        return len(self.header.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.header.entries

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            MissingTensorError: no tensor of that name.
            FixtureError: the file cannot be read any more, or the bits are invalid (a BOOL byte above 1).
        """
        self.read_names.add(name)
        if self._cache is not None and name in self._cache:
            return self._cache[name]
        entry = self.header.entries.get(name)
        where = f"{self.label}: tensor {one_line(name)}"
        if entry is None:
            raise MissingTensorError(f"{where}: missing")
        try:
            with self.path.open("rb") as file:
                file.seek(entry.begin)
                tensor = Tensor.from_bytes(file.read(entry.end - entry.begin), entry.dtype, entry.shape)
        except OSError as error:
            raise FixtureError(f"{where}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise FixtureError(f"{where}: {error}") from error
        if self._cache is not None:
            self._cache[name] = tensor
        return tensor


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file whose bytes depend on the contents only; the file appears whole or not at all.

    The library's own writer is not used because it puts the metadata in random order. FP4 codes are written as U8;
    `Tensor.view_as` turns them back.
    """
    # Widest elements first, then by name: every tensor lies aligned, which readers that map the file rely on.
    names = sorted(tensors, key=lambda name: (-tensors[name].data.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.data.nbytes
        dtype = "U8" if tensor.dtype == "F4_E2M1" else tensor.dtype
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)
    write_atomically(path, (len(encoded).to_bytes(8, "little"), encoded, *(tensors[name].bits() for name in names)))


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file beside its destination and rename it into place, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(chunks)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
