"""The report of a run as a person reads it: a line a kernel as it is measured, then roofs and remarks."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from conformance.bench.declarations import Declaration
from conformance.bench.devices import Device
from conformance.bench.results import Entry, Measured, Other, Report
from conformance.bench.units import scaled, seconds
from conformance.errors import printable

NOISY = 0.1
"""A spread above this share of the median is pointed out."""
DRIFTED = 0.1
"""So is a roof that changed by more than this share from the beginning to the end."""


def ratio(entry: Entry, other: Other) -> float | None:
    """How many times as fast the kernel is as the other."""
    return None if entry.times is None or other.times is None else other.times.median / entry.times.median


class Terminal:
    """Shows a run on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(printable(text), style=style), soft_wrap=True)

    def begin(self, subject: Measured, device: Device) -> None:
        """What is measured, and on what."""
        self._line("DeepSeek-V4.1-Flash kernels")
        self._line(f"  target   {subject.target}: {subject.name} {subject.version}")
        self._line(f"  device   {device.name}")

    def entry(self, entry: Entry) -> None:
        """A kernel: its time, or why it has none, and under it what it is compared with."""
        self._console.print()
        self._line(entry.declaration.id)
        if entry.times is None or entry.counts is None:
            style = "bold red" if entry.status == "refused" else "yellow"
            word = "REFUSED: its results are wrong" if entry.status == "refused" else entry.status
            self._line(f"  {word}: {entry.message}", style)
            return
        noisy = ", unsteady" if entry.times.spread > NOISY else ""
        self._line(
            f"  {seconds(entry.times.median):<10} ±{50 * entry.times.spread:.1f} %{noisy}, {len(entry.times.samples)} "
            f"samples of {entry.calls} {'call' if entry.calls == 1 else 'calls'}, {entry.how}; "
            f"{entry.sets} sets of inputs, {'none' if entry.cold else 'some'} in the last cache"
        )
        self._line(f"  {scaled(entry.bytes_per_second(), 'B/s')}, {scaled(entry.operations_per_second, 'op/s')}")
        for other in entry.others:
            times = ratio(entry, other)
            if times is None or other.times is None:
                self._line(f"  against {other.label}: {other.message}", "yellow")
            else:
                how = f", {other.how}" if other.how not in ("", entry.how) else ""
                took = f"{seconds(other.times.median)}{how}"
                self._line(f"  against {other.label}: {times:.3g} times as fast ({took})")
        if entry.slower:
            self._line(f"  SLOWER: {entry.slower}", "bold red")
        if entry.remark:
            self._line(f"  {entry.remark}", "yellow")

    def end(self, report: Report) -> None:
        """The roofs, every kernel held against them, and the verdict."""
        roofs = report.roofs
        self._console.print()
        self._line(f"roofs: copy {scaled(roofs.copy, 'B/s')}, {roofs.operands} product {scaled(roofs.matmul, 'op/s')}")
        if roofs.drift() > DRIFTED:
            self._line(
                f"  they changed by {100 * roofs.drift():.0f} % during the run: the machine is not steady", "yellow"
            )
        measured = [entry for entry in report.entries if entry.times is not None]
        if measured:
            width = max(len(entry.declaration.id) for entry in measured)
            self._line(f"{'kernel':<{width}}  {'time':>8}   copy  {roofs.operands}")
        for entry in measured:
            assert entry.times is not None
            of_copy = 100 * entry.bytes_per_second() / roofs.copy
            of_matmul = 100 * entry.operations_per_second / roofs.matmul
            shares = f"{of_copy:3.0f} %  {of_matmul:3.0f} %{self._goal(report, entry)}"
            self._line(f"{entry.declaration.id:<{width}}  {seconds(entry.times.median):>8}  {shares}")
        self._line(verdict(report))

    def _goal(self, report: Report, entry: Entry) -> str:
        found = report.of_goal(entry)
        if found is None:
            return ""
        goal, share, reached = found
        shown = "" if share is None else f", is {share:.0f} %"
        return f"  goal {goal}{shown}: {'reached' if reached else 'not reached'}"


def verdict(report: Report) -> str:
    """How the run ended, in a line."""
    counts = {
        word: sum(entry.status == word for entry in report.entries)
        for word in ("measured", "refused", "unsupported", "skipped")
    }
    slower = sum(bool(entry.slower) for entry in report.entries)
    words = [f"{count} {word}" for word, count in counts.items() if count]
    if slower:
        words.append(f"{slower} slower than allowed")
    return ", ".join(words) or "nothing to measure"


def print_counts(console: Console, declarations: Sequence[Declaration]) -> None:
    """Bytes and operations of each kernel and shape, without running anything."""
    for declaration in declarations:
        counts = declaration.problem().counts
        parts = [f"{scaled(counts.operations, 'op')}", f"{scaled(counts.moved, 'B')} moved"]
        parts += [
            f"{scaled(n, 'B')} {what}" for n, what in ((counts.weights, "of weights"), (counts.packed, "packed")) if n
        ]
        parts.append(f"{counts.operations / counts.moved:.3g} op/B")
        goal = "" if declaration.goal is None else f"; goal on {declaration.goal_device}: {declaration.goal}"
        console.print(Text(printable(f"{declaration.id}: {', '.join(parts)}{goal}")), soft_wrap=True)
