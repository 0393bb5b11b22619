"""What a benchmark runs on: the name that its numbers are kept under, its caches, and its free memory."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from conformance.errors import ConformanceError

Kind = Literal["cpu", "cuda"]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE = 64 << 20
"""Taken for the last cache where the system does not say."""
UNITS = {"K": 10, "M": 20, "G": 30, "": 0}


@dataclass(frozen=True)
class Device:
    """`cache` is the size of the last cache in bytes."""

    kind: Kind
    name: str
    cache: int

    @property
    def slug(self) -> str:
        """The name as part of a file name or a test's id."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")

    def free_bytes(self) -> int | None:
        """Memory that is free; None where the system does not say."""
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        with suppress(OSError):
            found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
            return int(found[1]) << 10 if found else None
        return None


def find(wanted: Kind | None) -> Device:
    """The device of that kind; without a wish a GPU where there is one.

    Raises:
        ConformanceError: there is no such device.
    """
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConformanceError("--device cuda: torch finds no GPU")
    if wanted == "cuda" or (wanted is None and there):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device("cuda", properties.name, int(getattr(properties, "L2_cache_size", 0)) or UNKNOWN_CACHE)
    threads = torch.get_num_threads()
    return Device("cpu", f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}", _last_cache())


def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return " ".join(found[1].split())
    return platform.processor() or platform.machine()


def _last_cache() -> int:
    sizes = []
    for path in CACHES.glob("index*/size"):
        with suppress(OSError):
            found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
            if found:
                sizes.append(int(found[1]) << UNITS[found[2]])
    return max(sizes, default=UNKNOWN_CACHE)
