"""What a benchmark found: times with their spread, what they are of, and how they compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from conformance.bench.declarations import Declaration, Goal
from conformance.bench.devices import Device
from conformance.bench.problem import Counts
from conformance.bench.roofs import Roofs

Status = Literal["measured", "refused", "unsupported", "skipped"]
"""Refused: its results are wrong.  Skipped: it does not fit this machine."""


@dataclass(frozen=True)
class Times:
    """Samples, in seconds a call."""

    samples: Sequence[float]

    @cached_property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @cached_property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples is below the first, a quarter above the second."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    @property
    def fastest(self) -> float:
        """The smallest sample."""
        return min(self.samples)

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median."""
        first, third = self.quartiles
        return (third - first) / self.median


@dataclass(frozen=True)
class Measured:
    """Whose times they are."""

    target: str
    name: str
    version: str


@dataclass(frozen=True)
class Other:
    """What the same kernel took elsewhere: in this run, or in a stored one."""

    label: str
    times: Times | None
    message: str = ""
    """Why there is no time."""
    how: str = ""
    """What the time is of, where that is known."""


@dataclass(frozen=True)
class Entry:
    """One kernel at one shape."""

    declaration: Declaration
    status: Status
    message: str = ""
    counts: Counts | None = None
    times: Times | None = None
    how: str = ""
    sets: int = 0
    calls: int = 0
    cold: bool = False
    others: Sequence[Other] = ()
    slower: str = ""
    """What is wrong with its time, by --fail-if-slower."""
    remark: str = ""

    def bytes_per_second(self, which: str = "moved") -> float:
        """One of the byte counts over the median time."""
        assert self.counts is not None
        assert self.times is not None
        return float(getattr(self.counts, which)) / self.times.median

    @property
    def operations_per_second(self) -> float:
        """Operations over the median time."""
        assert self.counts is not None
        assert self.times is not None
        return self.counts.operations / self.times.median


@dataclass(frozen=True)
class Report:
    """A whole run."""

    subject: Measured
    device: Device
    roofs: Roofs
    entries: Sequence[Entry]
    started: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def of_goal(self, entry: Entry) -> tuple[Goal, float | None, bool] | None:
        """The goal on this device, the share of its roof in percent, and whether it is reached."""
        goal = entry.declaration.goal_on(self.device.name)
        if goal is None or entry.times is None:
            return None
        reached = goal.below is not None and entry.times.median * 1e6 < goal.below
        share = None
        if goal.percent is not None:
            if goal.of == "copy":
                share = 100 * entry.bytes_per_second(goal.bytes) / self.roofs.copy
            else:
                share = 100 * entry.operations_per_second / self.roofs.matmul
            reached = reached or share >= goal.percent
        return goal, share, reached

    @property
    def exit_code(self) -> int:
        """1 where a kernel is wrong or slower than allowed, or nothing was measured."""
        wrong = any(entry.status == "refused" or entry.slower for entry in self.entries)
        return 1 if wrong or not any(entry.status == "measured" for entry in self.entries) else 0
