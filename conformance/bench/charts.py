"""What the pictures of a run show, as places on a canvas: the template draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.bench.results import Entry, Report
from conformance.bench.store import Stored
from conformance.bench.units import scaled, seconds

WIDTH, HEIGHT, MARGIN = 720, 380, 56
HISTORY_WIDTH, HISTORY_HEIGHT = 220, 46


@dataclass(frozen=True)
class Mark:
    """A kernel on the roofline, or a run in a history."""

    number: int
    x: float
    y: float
    words: str


@dataclass(frozen=True)
class Tick:
    """A grid line at a power of ten."""

    place: float
    label: str


@dataclass(frozen=True)
class Roofline:
    """Operations a second over operations a byte, both logarithmic; the roof is the lower of the two measured ones."""

    marks: Sequence[Mark]
    roof: Sequence[tuple[float, float]]
    across: Sequence[Tick]
    up: Sequence[Tick]
    width: int = WIDTH
    height: int = HEIGHT
    margin: int = MARGIN


def roofline(report: Report) -> Roofline | None:
    """Every kernel that has a time; None where none has."""
    points = []
    for number, entry in enumerate(report.entries, 1):
        if entry.times is not None and entry.counts is not None and entry.counts.operations:
            points.append((number, entry, entry.counts.operations / entry.counts.moved, entry.operations_per_second))
    if not points:
        return None
    roofs = report.roofs
    knee = roofs.matmul / roofs.copy
    low_x, high_x = _decades([knee, *(intensity for _, _, intensity, _ in points)])
    low_y, high_y = _decades([roofs.matmul, roofs.copy * 10**low_x, *(rate for *_, rate in points)])

    def x(intensity: float) -> float:
        return MARGIN + (math.log10(intensity) - low_x) / (high_x - low_x) * (WIDTH - MARGIN - 16)

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (math.log10(rate) - low_y) / (high_y - low_y) * (HEIGHT - MARGIN - 16)

    return Roofline(
        [Mark(n, x(intensity), y(rate), _words(entry, intensity, rate)) for n, entry, intensity, rate in points],
        [(x(at), y(min(roofs.matmul, at * roofs.copy))) for at in (10**low_x, knee, 10**high_x)],
        [Tick(x(10.0**power), f"{10.0**power:g}") for power in range(low_x, high_x + 1)],
        [Tick(y(10.0**power), scaled(10.0**power, "op/s")) for power in range(low_y, high_y + 1)],
    )


def _words(entry: Entry, intensity: float, rate: float) -> str:
    assert entry.times is not None
    return f"{entry.declaration.id}: {seconds(entry.times.median)}, {scaled(rate, 'op/s')} at {intensity:.3g} op/B"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around values."""
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return low, max(high, low + 1)


@dataclass(frozen=True)
class History:
    """Median times of one benchmark, oldest first; the height begins at zero."""

    marks: Sequence[Mark]
    width: int = HISTORY_WIDTH
    height: int = HISTORY_HEIGHT

    @property
    def line(self) -> str:
        """The points of a line through all."""
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


def histories(report: Report, past: Mapping[str, Sequence[Stored]]) -> Mapping[str, History]:
    """By id, the benchmarks that were measured before as they are declared now, and this run last."""
    found = {}
    for entry in report.entries:
        then = past.get(entry.declaration.hash, ())
        if entry.times is None or not then:
            continue
        runs = [(stored.when, stored.target, stored.times.median) for stored in then]
        runs.append((report.started, report.subject.target, entry.times.median))
        slowest = max(median for *_, median in runs)
        step = (HISTORY_WIDTH - 12) / (len(runs) - 1)
        found[entry.declaration.id] = History(
            [
                Mark(
                    number,
                    6 + number * step,
                    HISTORY_HEIGHT - 6 - median / slowest * (HISTORY_HEIGHT - 12),
                    f"{when}, {target}: {seconds(median)}",
                )
                for number, (when, target, median) in enumerate(runs)
            ]
        )
    return found
