"""Which kernels are benchmarked at which shapes, and what the project wants of them: read from `shapes.toml`."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from conformance.bench.kernels import KERNELS
from conformance.bench.problem import Problem, SizesError
from conformance.errors import ConformanceError
from conformance.tensors import one_line

SETS = ("small", "decode", "prefill")
RELEASED = ("decode", "prefill")
ROOFS = ("copy", "matmul")
BYTES = ("moved", "weights", "packed")
LARGEST_SIZE = 1 << 22
SHAPES_FILE = "shapes.toml"


@dataclass(frozen=True)
class Goal:
    """What the project wants of a kernel on one device: a share of a roof, or a time; one of the two is enough."""

    percent: float | None = None
    of: str = "copy"
    bytes: str = "moved"
    below: float | None = None
    """Microseconds."""

    def __str__(self) -> str:
        counted = "" if self.bytes == "moved" else f" on {self.bytes}"
        parts = [] if self.percent is None else [f"≥{self.percent:g} % {self.of}{counted}"]
        return " or ".join([*parts, *([] if self.below is None else [f"<{self.below:g} µs"])])


@dataclass(frozen=True)
class Declaration:
    """A kernel at a shape."""

    kernel: str
    name: str
    set: str
    sizes: Mapping[str, int]
    goal: Goal | None = None
    goal_device: str = ""
    """The beginning of the name of the device that the goal is for."""
    goal_source: str = ""

    @property
    def id(self) -> str:
        """How it is named on the command line and in reports."""
        return f"{self.kernel}/{self.name}"

    @cached_property
    def hash(self) -> str:
        """Of everything that decides what is measured: the sizes, and the code that makes inputs and counts."""
        module = sys.modules[KERNELS[self.kernel].__module__]
        declared = {
            "kernel": self.kernel,
            "sizes": dict(self.sizes),
            "inputs": [inspect.getsource(module), inspect.getsource(sys.modules[Problem.__module__])],
        }
        return hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()[:12]

    def problem(self) -> Problem:
        """Inputs and bounds.

        Raises:
            ConformanceError: sizes that the kernel cannot have or does not know, or one is missing.
        """
        sizes = _Asked(self.sizes)
        try:
            made = KERNELS[self.kernel](sizes)
        except (SizesError, ConformanceError) as error:
            raise ConformanceError(f"{self.id}: {error}") from error
        except KeyError as error:
            raise ConformanceError(f"{self.id}: the size {error} is missing") from error
        except MemoryError as error:
            raise ConformanceError(f"{self.id}: the memory is too small for these sizes") from error
        _only(f"{self.id}: sizes", self.sizes, sizes.asked)
        return made

    def goal_on(self, device: str) -> Goal | None:
        """The goal, if there is one for this device."""
        return self.goal if self.goal_device and device.startswith(self.goal_device) else None


class _Asked(dict[str, int]):
    """Sizes that remember which of them a kernel has asked for."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.asked.add(name)
        return super().__getitem__(name)


def read(path: Path | None = None) -> list[Declaration]:
    """The shipped declarations, or those of a file of the same form.

    Raises:
        ConformanceError: not of that form; names the file and the entry.
    """
    label = SHAPES_FILE if path is None else one_line(str(path))
    try:
        source = resources.files("conformance.bench").joinpath(SHAPES_FILE) if path is None else path
        parsed = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConformanceError(f"{label}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConformanceError(f"{label}: {one_line(str(error))}") from error
    _only(label, parsed, {"goals", "shape"})
    goals, entries = parsed.get("goals", {}), parsed.get("shape", [])
    if not isinstance(entries, list) or not entries or not isinstance(goals, dict):
        raise ConformanceError(f"{label}: no [[shape]] in it")
    if not all(isinstance(value, str) for value in goals.values()):
        raise ConformanceError(f"{label}: [goals] has texts, device and source")
    _only(f"{label}: [goals]", goals, {"device", "source"})
    made = [_declaration(f"{label}: shape {number + 1}", entry, goals) for number, entry in enumerate(entries)]
    seen: set[str] = set()
    for declaration in made:
        if declaration.id in seen:
            raise ConformanceError(f"{label}: {declaration.id} is declared twice")
        seen.add(declaration.id)
    return made


def select(declarations: Sequence[Declaration], sets: Sequence[str], wanted: Sequence[str]) -> list[Declaration]:
    """Those of the sets whose kernel or id is named or matches a pattern; all when nothing is wanted.

    Raises:
        ConformanceError: something wanted is none of them.
    """
    of_sets = [declaration for declaration in declarations if declaration.set in sets]
    if not wanted:
        return of_sets
    for pattern in wanted:
        if not any(_matches(declaration, pattern) for declaration in of_sets):
            known = sorted({declaration.kernel for declaration in of_sets})
            raise ConformanceError(
                f"no kernel {one_line(pattern)} at {' and '.join(sets)} shapes: {', '.join(known)}, or a whole id"
            )
    return [declaration for declaration in of_sets if any(_matches(declaration, pattern) for pattern in wanted)]


def _matches(declaration: Declaration, pattern: str) -> bool:
    return fnmatchcase(declaration.kernel, pattern) or fnmatchcase(declaration.id, pattern)


def _declaration(where: str, entry: Any, goals: Mapping[str, Any]) -> Declaration:
    if not isinstance(entry, dict):
        raise ConformanceError(f"{where}: not a table")
    _only(where, entry, {"kernel", "name", "set", "sizes", "goal"})
    for name in ("kernel", "name", "set"):
        if not isinstance(entry.get(name), str) or not entry[name] or not entry[name].isprintable():
            raise ConformanceError(f"{where}: {name} is missing, or not a text")
    if entry["kernel"] not in KERNELS:
        raise ConformanceError(f"{where}: kernel {one_line(entry['kernel'])} is not one of {', '.join(KERNELS)}")
    if entry["set"] not in SETS:
        raise ConformanceError(f"{where}: set {one_line(entry['set'])} is not one of {', '.join(SETS)}")
    sizes = entry.get("sizes")
    if not isinstance(sizes, dict) or not all(
        type(size) is int and 0 < size <= LARGEST_SIZE for size in sizes.values()
    ):
        raise ConformanceError(f"{where}: sizes are whole numbers from 1 to {LARGEST_SIZE}, by name")
    goal = _goal(f"{where}: goal", entry["goal"]) if "goal" in entry else None
    device, source = (goals.get(name, "") for name in ("device", "source"))
    if goal is not None and not (isinstance(device, str) and device and isinstance(source, str) and source):
        raise ConformanceError(f"{where}: goals need [goals] with device and source")
    return Declaration(entry["kernel"], entry["name"], entry["set"], sizes, goal, device, source)


def _goal(where: str, entry: Any) -> Goal:
    if not isinstance(entry, dict) or not {"percent", "below"} & set(entry):
        raise ConformanceError(f"{where}: a table with percent or below")
    _only(where, entry, {"percent", "of", "bytes", "below"})
    for name, known in (("of", ROOFS), ("bytes", BYTES)):
        if entry.get(name, known[0]) not in known:
            raise ConformanceError(f"{where}: {name} is one of {', '.join(known)}")
    for name in ("percent", "below"):
        value = entry.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ConformanceError(f"{where}: {name} is a number above 0")
    return Goal(**entry)


def _only(where: str, entry: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise ConformanceError(f"{where}: {one_line(unknown[0])} is not one of {', '.join(sorted(known))}")
