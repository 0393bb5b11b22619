"""Stored numbers: files in the form that pytest-benchmark writes and compares.

Each entry carries, as `extra_info`, the device and the hash of its own declaration.  Only an entry of the same device
and the same hash is ever compared with: a changed benchmark is another benchmark.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from conformance import __version__
from conformance.bench.declarations import Declaration
from conformance.bench.problem import Counts
from conformance.bench.results import Entry, Report, Times
from conformance.errors import ConformanceError
from conformance.tensors import one_line, parse_json

LARGEST_FILE = 256 << 20
LONGEST = 1e9
"""Seconds that no stored time can have."""
PYTEST_BENCHMARK_VERSION = "5.0.0"
"""The version whose form of file is written."""


class StoreError(ConformanceError):
    """A file of stored numbers is not one, or holds none that may be compared; the line names it."""


@dataclass(frozen=True)
class Stored:
    """One stored kernel at one shape."""

    id: str
    device: str
    declaration: str
    target: str
    when: str
    times: Times


def about(declaration: Declaration, device: str, target: str, counts: Counts) -> dict[str, Any]:
    """What an entry says of itself: `extra_info`."""
    return {
        "id": declaration.id,
        "declaration": declaration.hash,
        "device": device,
        "target": target,
        "operations": counts.operations,
        "bytes": {"moved": counts.moved, "weights": counts.weights, "packed": counts.packed},
    }


def name_of(declaration: Declaration, device_slug: str) -> str:
    """The name of an entry: pytest-benchmark compares what has the same one."""
    return f"{declaration.id}-{declaration.hash}-{device_slug}"


def as_json(report: Report) -> str:
    """A run as pytest-benchmark would have stored it."""
    benchmarks = [
        _benchmark(report, entry, entry.times, entry.counts)
        for entry in report.entries
        if entry.times is not None and entry.counts is not None
    ]
    return json.dumps(
        {
            "machine_info": machine_info(report.device.name, report.environment),
            "commit_info": {"id": "unknown", "dirty": False, "project": "conformance", "time": None},
            "benchmarks": benchmarks,
            "datetime": report.started,
            "version": PYTEST_BENCHMARK_VERSION,
            "suite": __version__,
        },
        indent=1,
    )


def machine_info(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The device in place of the host: names of machines have no meaning elsewhere."""
    return {
        "node": "",
        "processor": device,
        "machine": platform.machine(),
        "python_version": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "system": platform.system(),
        "release": "",
        "cpu": {"brand_raw": device},
        **{f"environment_{name}": value for name, value in environment.items()},
    }


def _benchmark(report: Report, entry: Entry, times: Times, counts: Counts) -> dict[str, Any]:
    name = name_of(entry.declaration, report.device.slug)
    return {
        "group": entry.declaration.kernel,
        "name": name,
        "fullname": name,
        "params": dict(entry.declaration.sizes),
        "param": entry.declaration.name,
        "extra_info": {
            **about(entry.declaration, report.device.name, report.subject.target, counts),
            "implementation": f"{report.subject.name} {report.subject.version}",
            "how": entry.how,
            "sets": entry.sets,
            "cold": entry.cold,
            "roofs": {"copy": report.roofs.copy, "matmul": report.roofs.matmul},
        },
        "options": {"timer": entry.how, "warmup": True, "disable_gc": False},
        "stats": _stats(times, entry.calls),
    }


def _stats(times: Times, calls: int) -> dict[str, Any]:
    data = list(times.samples)
    first, third = times.quartiles
    mean = statistics.mean(data)
    deviation = statistics.stdev(data) if len(data) > 1 else 0.0
    inside = [value for value in data if abs(value - mean) <= deviation]
    reach = 1.5 * (third - first)
    return {
        "min": min(data),
        "max": max(data),
        "mean": mean,
        "stddev": deviation,
        "rounds": len(data),
        "median": times.median,
        "iqr": third - first,
        "q1": first,
        "q3": third,
        "iqr_outliers": sum(not first - reach <= value <= third + reach for value in data),
        "stddev_outliers": len(data) - len(inside),
        "outliers": f"{len(data) - len(inside)};{sum(not first - reach <= v <= third + reach for v in data)}",
        "ld15iqr": min(value for value in data if value >= first - reach),
        "hd15iqr": max(value for value in data if value <= third + reach),
        "ops": 1 / mean,
        "total": sum(data),
        "data": data,
        "iterations": calls,
    }


def read(path: Path) -> list[Stored]:
    """The suite's entries of a file that `bench --json` or pytest-benchmark wrote.

    Raises:
        StoreError: it cannot be read, is not of that form, or has none.
    """
    label = one_line(str(path))
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise StoreError(f"{label}: more than {LARGEST_FILE >> 20} MiB")
        parsed = parse_json(path.read_bytes(), label)
    except OSError as error:
        raise StoreError(f"{label}: cannot be read: {error.strerror}") from error
    benchmarks = parsed.get("benchmarks") if isinstance(parsed, dict) else None
    if not isinstance(benchmarks, list):
        raise StoreError(f"{label}: not a file of bench --json or pytest-benchmark: no list of benchmarks in it")
    when = _when(label, parsed.get("datetime"))
    found = [_stored(f"{label}: benchmark {n}", entry, when) for n, entry in enumerate(benchmarks)]
    stored = [entry for entry in found if entry is not None]
    if not stored:
        raise StoreError(f"{label}: no benchmark of this suite in it")
    return stored


def _when(label: str, value: Any) -> str:
    try:
        return datetime.fromisoformat(value).isoformat(timespec="seconds")
    except (TypeError, ValueError) as error:
        raise StoreError(f"{label}: datetime is missing, or no date") from error


def _stored(where: str, entry: Any, when: str) -> Stored | None:
    """An entry, None if it is of something else."""
    info = entry.get("extra_info") if isinstance(entry, dict) else None
    if not isinstance(info, dict) or "declaration" not in info:
        return None
    names = ("id", "device", "declaration", "target")
    if not all(isinstance(info.get(name), str) and info[name] and info[name].isprintable() for name in names):
        raise StoreError(f"{where}: extra_info lacks one of {', '.join(names)}")
    stats = entry.get("stats")
    # Where the samples were not stored, five numbers with the same quartiles.
    summed_up = [stats.get(name) for name in ("min", "q1", "median", "q3", "max")] if isinstance(stats, dict) else []
    data = stats.get("data") if isinstance(stats, dict) else None
    samples = data if isinstance(data, list) and data else summed_up
    if not samples or not all(_is_time(value) for value in samples):
        raise StoreError(f"{where}: stats hold no times above 0: neither samples nor median and quartiles")
    name, device, declaration, target = (str(info[key]) for key in names)
    return Stored(
        name, device, declaration, target, when, Times([float(value) for value in samples if value is not None])
    )


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LONGEST


def of_device(path: Path, stored: Sequence[Stored], device: str) -> Mapping[str, Stored]:
    """Entries of one device by declaration.

    Raises:
        StoreError: all are of other devices, or a declaration is there for several targets.
    """
    own = [entry for entry in stored if entry.device == device]
    label = one_line(str(path))
    if not own:
        others = ", ".join(sorted({entry.device for entry in stored}))
        raise StoreError(f"{label}: measured on {others}, this is {device}: numbers of other devices do not compare")
    by_declaration: dict[str, Stored] = {}
    for entry in own:
        if by_declaration.setdefault(entry.declaration, entry) is not entry:
            raise StoreError(f"{label}: {entry.id} is in it twice: which one to compare with?")
    return by_declaration


def history(directory: Path, device: str) -> Mapping[str, list[Stored]]:
    """Every stored entry below a folder of this device by declaration, oldest first; other JSON files are left out.

    Raises:
        StoreError: no such folder, or a file of the right form is damaged.
    """
    if not directory.is_dir():
        raise StoreError(f"{one_line(str(directory))}: not a directory")
    found: dict[str, list[Stored]] = {}
    for path in sorted(directory.rglob("*.json")):
        if not _looks_stored(path):
            continue
        for entry in read(path):
            if entry.device == device:
                found.setdefault(entry.declaration, []).append(entry)
    return {name: sorted(entries, key=lambda entry: entry.when) for name, entries in found.items()}


def _looks_stored(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= LARGEST_FILE else ""
    except OSError:
        return False
    return '"benchmarks"' in text and '"declaration"' in text
