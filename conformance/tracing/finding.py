"""From distances and verdicts to what is said of a scenario: where it first leaves the recording, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.tracing.compare import Cell
from conformance.tracing.own_inputs import Introduced
from conformance.tracing.run import Run
from conformance.tracing.taps import LAYER_TAPS, ordinal
from conformance.tracing.teacher_forced import Forced


@dataclass(frozen=True)
class Finding:
    """What a trace found in one scenario."""

    run: Run
    cells: Sequence[Cell]
    introduced: Sequence[Introduced]
    """Verdicts on the target's own inputs."""
    forced: Sequence[Forced] = ()
    """Verdicts on recorded inputs, of the layers that were looked at."""

    @property
    def layer_count(self) -> int:
        """Layers of the model."""
        return self.run.trace.model.config.n_layers

    @property
    def divergence(self) -> Cell | None:
        """The first tap that noise cannot have moved so far."""
        found = [cell for cell in self.cells if cell.diverges]
        return min(found, key=lambda c: (c.call, *ordinal(c.layer, c.tap, self.layer_count)), default=None)

    @property
    def wrong(self) -> Introduced | None:
        """The first tap that does not follow from the target's own inputs."""
        found = [verdict for verdict in self.introduced if not verdict.verdict.passed]
        return min(found, key=lambda v: (v.call, *ordinal(v.layer, v.tap, self.layer_count)), default=None)

    @property
    def failed(self) -> Forced | None:
        """The first component that is wrong on recorded inputs; a whole block only where none of its parts is."""
        failing = [verdict for verdict in self.forced if verdict.passed is False]
        parts = [verdict for verdict in failing if verdict.component != "block"]
        first = min(failing, key=lambda verdict: verdict.layer, default=None)
        inside = [verdict for verdict in parts if first is not None and verdict.layer == first.layer]
        return inside[0] if inside else first

    @property
    def diverges(self) -> bool:
        """Whether anything is wrong beyond noise."""
        return bool(self.divergence or self.wrong or self.failed or self.run.ended)

    @property
    def unclear(self) -> bool:
        """Whether something differs by more than the smallest floor that no verdict speaks of."""
        return any(cell.state in ("parted", "shown") and cell.distance > 0 for cell in self.cells)

    def sentences(self) -> list[str]:
        """The finding in words, the most important first."""
        if self.run.ended:
            return [f"The pass ended early: {self.run.ended}", *self._located()]
        if not self.diverges:
            return [self._agreement()]
        return self._located()

    def _agreement(self) -> str:
        parted = next((cell for cell in self.cells if cell.state == "tie"), None)
        if parted is not None:
            return (
                f"No divergence beyond noise; choices part at {place(parted)}: {parted.message}, "
                f"and everything behind it follows from its inputs."
            )
        hidden = next((cell for cell in self.cells if cell.state == "parted"), None)
        if hidden is not None:
            asked = ": every component is right on our inputs" if self.forced else ""
            return f"No divergence in what can be judged; behind choices that are not shown distances are not{asked}."
        if not any(cell.state in ("same", "within", "beyond") for cell in self.cells) and not self.introduced:
            return "Nothing that was shown can be judged."
        return "No divergence beyond noise."

    def _located(self) -> list[str]:
        lines = []
        cell, wrong, failed = self.divergence, self.wrong, self.failed
        if cell is not None:
            lines.append(f"First divergence: {place(cell)}: {how_far(cell)}.")
        if wrong is not None:
            ratio = "" if not np.isfinite(wrong.verdict.ratio) else f", error/bound {wrong.verdict.ratio:.3g}"
            where = "" if wrong.position is None else f", position {wrong.position}"
            said = f": {wrong.verdict.message}" if wrong.verdict.message else ""
            lines.append(
                f"First wrong on its own inputs: {unit(wrong.layer, wrong.component)}: {wrong.tap} in call "
                f"{wrong.call}{where}{ratio}{said}."
            )
        if failed is not None:
            said = f" in {failed.tap}" if failed.tap else ""
            lines.append(
                f"Wrong on our inputs: {unit(failed.layer, failed.component)}{said} ({failed.case}"
                f"{': ' + failed.message if failed.message else ''})."
            )
        lines.append(self._cause(cell, wrong, failed))
        return [line for line in lines if line]

    def _cause(self, cell: Cell | None, wrong: Introduced | None, failed: Forced | None) -> str:
        """Where the difference comes from, as one sentence."""
        source: tuple[int | None, str] | None = None
        if wrong is not None:
            source = wrong.layer, wrong.component
        elif failed is not None:
            source = failed.layer, failed.component
        if source is None:
            passed = [forced.layer for forced in self.forced if forced.passed]
            if passed:
                return (
                    f"Every component of layers {passed[0]} to {passed[-1]} that was judged is right on our "
                    "inputs: look at what is handed on between them, and what is kept between calls."
                )
            return (
                "No component's inputs were shown: its taps, or a target that can be asked, would tell which is wrong."
            )
        if cell is None or cell.layer is None:
            return f"The difference comes from {unit(*source)}."
        component = LAYER_TAPS[cell.tap].component
        if source == (cell.layer, component):
            return f"It arises there: {unit(*source)} is the first that is wrong."
        here = unit(cell.layer, component)
        if any((f.layer, f.component) == (cell.layer, component) and f.passed for f in self.forced):
            return f"{here[0].upper()}{here[1:]} is right on our input: the difference comes from {unit(*source)}."
        own = [v.verdict.passed for v in self.introduced if (v.layer, v.component) == (cell.layer, component)]
        if own and all(own):
            return f"{here[0].upper()}{here[1:]} is right on its own input: the difference comes from {unit(*source)}."
        return f"The difference comes from {unit(*source)}."


def unit(layer: int | None, component: str) -> str:
    """A component of a layer, as sentences call it."""
    return f"the {component}" if layer is None else f"layer {layer}'s {component}"


def place(cell: Cell) -> str:
    """Where a cell stands."""
    layer = "" if cell.layer is None else f"layer {cell.layer}, "
    position = "" if cell.position is None else f", position {cell.position}"
    return f"{layer}{cell.tap}, call {cell.call}{position}"


def how_far(cell: Cell) -> str:
    """What is wrong with a cell."""
    if cell.state == "choice":
        return f"{cell.distance:.0%} of the positions chose differently: {cell.message}"
    if cell.state == "malformed" or not np.isfinite(cell.distance):
        return cell.message
    return f"relative distance {cell.distance:.3g}, {cell.ratio:.3g} times the floor of {cell.floor:.3g}"
