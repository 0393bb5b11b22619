"""The declared sizes of `--against`: which model, which requests, on which devices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Requests:
    """A batch of equally long requests: a prefill, then one-token steps."""

    name: str
    prefill: int
    why: str
    steps: int = 0
    batch: int = 1


@dataclass(frozen=True)
class Size:
    """What is compared on some devices."""

    name: str
    devices: tuple[str, ...]
    runs: tuple[Requests, ...]


@dataclass(frozen=True)
class Sizes:
    """`sizes.toml`."""

    seed: int
    config: Mapping[str, Any]
    """Changes to the configuration of the shipped tiny model."""
    sizes: tuple[Size, ...]

    def of_device(self, device: str) -> Size:
        """The size for a device as a target describes it; the last where none is meant for it."""
        *first, last = self.sizes
        return next((size for size in first if device.lower().startswith(tuple(map(str.lower, size.devices)))), last)


def declared_sizes() -> Sizes:
    """Read the declaration."""
    text = resources.files("conformance.against").joinpath("sizes.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    sizes = tuple(
        Size(size["name"], tuple(size["devices"]), tuple(Requests(**run) for run in size["run"]))
        for size in content["size"]
    )
    return Sizes(content["seed"], content["config"], sizes)
