"""Checking a checkpoint folder against the layout of its configuration: headers are read, weights never.

The folder is untrusted. The index may only name files of its own folder, and only regular files are opened, so that
nothing outside is read and nothing can block; every file at fault gets one line and the rest is checked all the same.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from conformance.checkpoint_layout import SCALE_DTYPE, Form, Layout, Parameter, layout, scale_name
from conformance.errors import FixtureError
from conformance.tensors import MAX_HEADER_BYTES, Entry, one_line, parse_json, read_header

INDEX = "model.safetensors.index.json"
#: Where the configuration may lie; `inference/` holds the published code's own spelling of the keys.
CONFIGS = ("config.json", "inference/config.json")
MAX_CONFIG_BYTES = 1_000_000

#: Element types that a shard may hold, and their bits: more than a layout asks for, so that a wrong type is reported as
#: wrong rather than as an unreadable file.
SHARD_DTYPES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}

Kind = Literal[
    "missing", "extra", "shape", "dtype", "scale shape", "scale dtype", "tied", "duplicate", "misplaced", "unlisted"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Problem:
    """One tensor, or one file, that does not conform."""

    kind: Kind
    name: str
    detail: str

    @property
    def group(self) -> tuple[Kind, str]:
        """Kind and name with every number replaced, so that a mistake made in all layers is reported once."""
        return self.kind, re.sub(r"(?<![^.\-_])\d+(?![^.\-_])", "*", self.name)


@dataclass
class Checkpoint:
    """What was found.

    Attributes:
        directory: the folder.
        configuration: which configuration the layout follows, in words.
        layout: what was expected.
        shards: the files whose headers were read.
        found: entries by name; a tensor in two shards counts where it was met first.
        unreadable: one line for each file that could not be read.
        absent: shards that the index names and a partial folder lacks.
        problems: everything that does not conform.
        elements: learned elements found by name of the parameter, quantisation scales not counted.
    """

    directory: Path
    configuration: str
    layout: Layout
    shards: list[str] = field(default_factory=list)
    found: dict[str, Entry] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    elements: dict[str, int] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 does not, 2 something could not be read."""
        return 2 if self.unreadable else int(bool(self.problems))


def check_checkpoint(directory: Path, partial: bool = False) -> Checkpoint:
    """Check a folder of safetensors shards.

    `partial` accepts that shards are absent: their tensors are then neither checked nor missing.

    Raises:
        FixtureError: no such folder, no shard in it, or an index or configuration that cannot be read.
    """
    if not directory.is_dir():
        raise FixtureError(f"{one_line(str(directory))}: not a directory")
    mapping, configuration = read_configuration(directory)
    checkpoint = Checkpoint(directory, configuration, layout(mapping, configuration))
    placed = read_index(directory)
    located = _read_shards(checkpoint, placed, partial)
    if placed is not None:
        checkpoint.problems.extend(_index_problems(placed, located, set(checkpoint.shards)))
    unseen = _unseen(checkpoint, placed, partial)
    checkpoint.problems.extend(_tensor_problems(checkpoint, unseen))
    return checkpoint


# Files


def read_configuration(directory: Path) -> tuple[Mapping[str, Any], str]:
    """The configuration, and which one it is in words."""
    passed_over = []
    for name in CONFIGS:
        if not (directory / name).exists():
            continue
        mapping = _read_object(directory, name, MAX_CONFIG_BYTES)
        if "dim" in mapping:
            return mapping, name
        passed_over.append(f"{name} has other key names")
    raw = resources.files("conformance").joinpath("configs/released.json").read_bytes()
    reason = ", ".join(passed_over) or "the folder has no config.json"
    return parse_json(raw, "released.json"), f"the released configuration ({reason})"


def read_index(directory: Path) -> Mapping[str, str] | None:
    """The shard of each tensor, None without an index."""
    if not (directory / INDEX).is_symlink() and not (directory / INDEX).exists():
        return None
    placed = _read_object(directory, INDEX, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
        raise FixtureError(f"{INDEX}: weight_map is not an object from tensor to shard")
    return placed


def _read_shards(checkpoint: Checkpoint, placed: Mapping[str, str] | None, partial: bool) -> dict[str, str]:
    """Read every header; returns the shard in which each tensor was found."""
    present = sorted(path.name for path in checkpoint.directory.glob("*.safetensors"))
    names = present if placed is None else sorted(set(placed.values()))
    if not names:
        raise FixtureError(f"{one_line(str(checkpoint.directory))}: no safetensors file in it")
    if placed is not None:
        for name in sorted(set(present) - set(names)):
            problem = Problem("unlisted", name, "a shard that the index does not name: some loaders read it too")
            checkpoint.problems.append(problem)
    located: dict[str, str] = {}
    for name in names:
        try:
            path = inside(checkpoint.directory, name)
            if partial and not path.exists():
                checkpoint.absent.append(name)
                continue
            header = read_header(path, name, SHARD_DTYPES)
        except FixtureError as error:
            checkpoint.unreadable.append(str(error))
            continue
        checkpoint.shards.append(name)
        for tensor, entry in header.entries.items():
            if tensor in located:
                detail = f"in {one_line(located[tensor])} and in {one_line(name)}"
                checkpoint.problems.append(Problem("duplicate", tensor, detail))
            else:
                located[tensor] = name
                checkpoint.found[tensor] = entry
    return located


def inside(directory: Path, name: str) -> Path:
    """A file of the folder by its plain name, after making sure that opening it is harmless.

    Raises:
        FixtureError: the name or a link leads out of the folder, or something else than a regular file is there.
    """
    if name != Path(name).name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise FixtureError(f"{one_line(name)}: not the plain name of a file in the folder")
    path = directory / name
    try:
        real = path.resolve()
        mode = real.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise FixtureError(f"{one_line(name)}: a link to nothing") from None
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself, on older Python.
        raise FixtureError(f"{one_line(name)}: cannot be read: {one_line(str(error))}") from error
    if not any(real.is_relative_to(root) for root in _roots(directory)):
        raise FixtureError(f"{one_line(name)}: a link out of the folder")
    if not stat.S_ISREG(mode):
        raise FixtureError(f"{one_line(name)}: not a regular file")
    return path


def _roots(directory: Path) -> list[Path]:
    """The folder, and the `blobs` beside `snapshots` that a hub cache links its files to."""
    real = directory.resolve()
    return [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]


def _read_object(directory: Path, name: str, limit: int) -> dict[str, Any]:
    folder, _, file = name.rpartition("/")
    if folder and (directory / folder).is_symlink():
        raise FixtureError(f"{folder}: a link instead of a folder")
    path = inside(directory / folder, file)
    try:
        with path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as error:
        raise FixtureError(f"{name}: cannot be read: {error.strerror}") from error
    if len(raw) > limit:
        raise FixtureError(f"{name}: larger than {limit} bytes")
    parsed = parse_json(raw, name)
    if not isinstance(parsed, dict):
        raise FixtureError(f"{name}: not a JSON object")
    return parsed


# Comparison


def _index_problems(placed: Mapping[str, str], located: Mapping[str, str], read: set[str]) -> Iterator[Problem]:
    for tensor, shard in placed.items():
        there = located.get(tensor)
        if there is not None and there != shard:
            detail = f"the index says {one_line(shard)}, it is in {one_line(there)}"
            yield Problem("misplaced", tensor, detail)
        elif there is None and shard in read:
            yield Problem("missing", tensor, f"the index says {one_line(shard)}, which lacks it")
    for tensor in located:
        if tensor not in placed:
            yield Problem("unlisted", tensor, f"in {one_line(located[tensor])}, but not in the index")


def _unseen(checkpoint: Checkpoint, placed: Mapping[str, str] | None, partial: bool) -> set[str]:
    """Tensors that are not found and need no second line: their shard is absent or unreadable, or the index has one."""
    if placed is not None:
        return placed.keys() - checkpoint.found.keys()
    if not partial:
        return set()
    expected = checkpoint.layout.parameters
    return (expected.keys() | {scale_name(name) for name in expected}) - checkpoint.found.keys()


def _tensor_problems(checkpoint: Checkpoint, unseen: set[str]) -> Iterator[Problem]:
    known: set[str] = set()
    for name, parameter in checkpoint.layout.parameters.items():
        known.add(name)
        entry = checkpoint.found.get(name)
        form = _form(parameter, entry)
        if entry is None:
            if name not in unseen:
                yield Problem("missing", name, f"expected {form.dtype} {list(form.stored(parameter.shape))}")
        else:
            checkpoint.elements[name] = _elements(entry, form)
            yield from _compare(name, entry, parameter, form)
        shape = form.scale(parameter.shape)
        if shape is not None:
            scale = scale_name(name)
            known.add(scale)
            yield from _compare_scale(scale, checkpoint.found.get(scale), shape, scale in unseen)
    for name, entry in checkpoint.found.items():
        if name in known:
            continue
        if name in checkpoint.layout.ties:
            shared = checkpoint.layout.ties[name]
            yield Problem("tied", name, f"shares {shared} and must not be stored again")
        else:
            yield Problem("extra", name, f"{entry.dtype} {list(entry.shape)}")


def _form(parameter: Parameter, entry: Entry | None) -> Form:
    """The form of the type that was found; the usual one when there is none of it."""
    matching = [form for form in parameter.forms if entry is not None and form.dtype == entry.dtype]
    return matching[0] if matching else parameter.forms[0]


def _elements(entry: Entry, form: Form) -> int:
    packed = form.per_item if form.dtype == entry.dtype else 1
    total = packed
    for size in entry.shape:
        total *= size
    return total


def _compare(name: str, entry: Entry, parameter: Parameter, form: Form) -> Iterator[Problem]:
    if entry.dtype != form.dtype:
        accepted = " or ".join(form.dtype for form in parameter.forms)
        yield Problem("dtype", name, f"{entry.dtype}, expected {accepted}")
        return
    expected = form.stored(parameter.shape)
    if entry.shape != expected:
        unpacked = form.per_item > 1 and entry.shape == parameter.shape
        hint = f" ({form.per_item} codes a byte: this holds one)" if unpacked else ""
        yield Problem("shape", name, f"{_shape(entry.shape)}, expected {list(expected)}{hint}")


def _compare_scale(name: str, entry: Entry | None, expected: tuple[int, ...], unseen: bool) -> Iterator[Problem]:
    if entry is None:
        if not unseen:
            yield Problem("missing", name, f"expected {SCALE_DTYPE} {list(expected)}")
    elif entry.dtype != SCALE_DTYPE:
        yield Problem("scale dtype", name, f"{entry.dtype}, expected {SCALE_DTYPE}")
    elif entry.shape != expected:
        yield Problem("scale shape", name, f"{_shape(entry.shape)}, expected {list(expected)}")


def _shape(shape: tuple[int, ...]) -> str:
    return one_line(str(list(shape)))
