"""What the charts of a report show, as numbers: the templates draw them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.fixtures import TAPS
from conformance.interface import COMPONENTS
from conformance.judge.histogram import EDGES, OPEN, Histogram, combined
from conformance.report.records import CaseRecord, TapRecord

WITHIN = EDGES.index("1")
"""The last bin of elements that are in bounds."""
SHADES = (0.25, 0.5, 0.75, 0.95)
"""A heat map is darker beyond each of these."""
TAP_OF_LAYER = re.compile(r"layer([0-9]{1,4})/(.+)")
HAND_MADE = "hand-made"


@dataclass(frozen=True)
class Bar:
    """One bin of a histogram; `height` is a share of the tallest."""

    place: int
    label: str
    """The upper end of the bin."""
    count: int
    height: float
    within: bool


def bars(counts: Histogram) -> list[Bar]:
    """Every bin, on a logarithmic scale: one wrong element among millions must be seen."""
    tallest = max((math.log10(counts.get(edge, 0) + 1) for edge in EDGES), default=0.0) or 1.0
    return [
        Bar(place, edge, counts.get(edge, 0), math.log10(counts.get(edge, 0) + 1) / tallest, place <= WITHIN)
        for place, edge in enumerate(EDGES)
    ]


def spread(records: Sequence[CaseRecord]) -> Histogram:
    """Elements of these cases by error over bound."""
    total: Histogram = {}
    for record in records:
        for tap in record.taps:
            total = combined(total, tap.histogram)
    return total


def beyond(counts: Histogram) -> int:
    """Elements that are out of bounds."""
    return sum(counts.get(edge, 0) for edge in EDGES[WITHIN + 1 :])


def without_bound(counts: Histogram) -> int:
    """Elements for which every value was allowed."""
    return counts.get(OPEN, 0)


@dataclass(frozen=True)
class Cell:
    """One result in one layer over all cases."""

    ratio: float
    passed: bool
    worst_case: str

    @property
    def shade(self) -> str:
        """The name of its colour in the style."""
        return f"h{sum(self.ratio > edge for edge in SHADES)}" if self.passed else "hx"


@dataclass(frozen=True)
class HeatRow:
    """One result of one component, layer by layer."""

    component: str
    tap: str
    cells: Mapping[int, Cell]

    @property
    def passed(self) -> bool:
        """Whether no layer is wrong."""
        return all(cell.passed for cell in self.cells.values())


@dataclass(frozen=True)
class HeatMap:
    """The results of one golden set by layer."""

    name: str
    layers: tuple[int, ...]
    rows: tuple[HeatRow, ...]

    @property
    def by_component(self) -> Mapping[str, list[HeatRow]]:
        """The rows of each component."""
        groups: dict[str, list[HeatRow]] = {}
        for row in self.rows:
            groups.setdefault(row.component, []).append(row)
        return groups


def heat_maps(records: Sequence[CaseRecord], sets: Sequence[str]) -> list[HeatMap]:
    """One for each golden set that has layers, then one for the layers of hand-made configurations."""
    cells: dict[str, dict[tuple[str, str], dict[int, Cell]]] = {}
    for record in records:
        for layer, name, cell in _cells(record):
            row = cells.setdefault(_set_of(record, sets), {}).setdefault((record.component, name), {})
            row[layer] = _worse(row.get(layer), cell)
    maps = []
    for name in (*sets, HAND_MADE):
        if rows := cells.get(name):
            layers = tuple(sorted({layer for row in rows.values() for layer in row}))
            ordered = sorted(rows, key=_place)
            maps.append(HeatMap(name, layers, tuple(HeatRow(*key, rows[key]) for key in ordered)))
    return maps


def _set_of(record: CaseRecord, sets: Sequence[str]) -> str:
    name = record.source.split("/")[0].split(" ")[0]
    return name if name in sets else HAND_MADE


def _cells(record: CaseRecord) -> Iterator[tuple[int, str, Cell]]:
    for tap in record.taps:
        for layer in tap.layers:
            yield layer.layer, tap.tap, Cell(layer.ratio, layer.passed, record.id)
        named = TAP_OF_LAYER.fullmatch(tap.tap)
        if named is not None:
            yield int(named[1]), named[2], Cell(tap.ratio, right(tap), record.id)


def right(tap: TapRecord) -> bool:
    """Whether nothing was wrong with a result."""
    return not tap.wrong and not tap.worst.message


def _worse(known: Cell | None, cell: Cell) -> Cell:
    if known is None:
        return cell
    worst = cell if (not cell.passed, cell.ratio) > (not known.passed, known.ratio) else known
    return replace(worst, passed=known.passed and cell.passed)


def _place(key: tuple[str, str]) -> tuple[int, int, str]:
    """Components in the order of reports, results in the order in which a layer makes them."""
    component, name = key
    taps = list(TAPS)
    return (
        COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS),
        taps.index(name) if name in taps else len(taps),
        name,
    )


LANES: Mapping[str, tuple[str, ...]] = {
    "each step on recorded inputs": tuple(name for name in COMPONENTS if name not in ("block", "stack", "model")),
    "each block on recorded inputs": ("block",),
    "layers on their own results": ("stack", "model"),
}
"""From what shows where a mistake is to what shows how far it carries, and the components that tell."""


@dataclass(frozen=True)
class Wrong:
    """The first wrong result of a layer, in the order of reports."""

    component: str
    tap: str
    cell: Cell


@dataclass(frozen=True)
class Divergence:
    """Layer by layer, where a port leaves the recorded trace."""

    layers: tuple[int, ...]
    lanes: Mapping[str, Mapping[int, Wrong | None]]
    """By lane and layer, None where all is right; layers that were not judged are absent."""

    @property
    def first(self) -> tuple[str, int, Wrong] | None:
        """Lane, layer and result of the first divergence, of the lane that says most about its place."""
        found = ((lane, layer, wrong) for lane, cells in self.lanes.items() for layer, wrong in sorted(cells.items()))
        return next(((lane, layer, wrong) for lane, layer, wrong in found if wrong is not None), None)


def divergence(heat_map: HeatMap) -> Divergence:
    """The heat map of a model's set, summed up by layer."""
    lanes: dict[str, dict[int, Wrong | None]] = {lane: {} for lane in LANES}
    for row in heat_map.rows:
        cells = next((lanes[lane] for lane, components in LANES.items() if row.component in components), {})
        for layer, cell in row.cells.items():
            if cells.get(layer) is None:
                cells[layer] = None if cell.passed else Wrong(row.component, row.tap, cell)
    return Divergence(heat_map.layers, {lane: cells for lane, cells in lanes.items() if cells})
