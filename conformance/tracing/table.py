"""A trace as a person reads it: one line a scenario, a table of layers and taps, growth, and the finding in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console

from conformance.tracing.compare import Cell
from conformance.tracing.finding import Finding
from conformance.tracing.taps import COLUMNS, LAYER_TAPS
from conformance.tracing.trace import Traced

WIDTH = 5
LEGEND = (
    "Distance over floor, the worst of all calls: up to 1 is noise, above it is not (!), > is the first divergence. "
    "0: equal bits. ~: behind a choice that honestly parted, or with choices not shown: not judged by distance. "
    ".: differs, but is not judged by distance. =: choices differ within a tie. x: a choice, shape or type is wrong. "
    "*: not what follows from its own inputs. Blank: not shown, or not recorded."
)


def print_trace(console: Console, traced: Traced, verbose: bool) -> None:
    """Everything a trace found."""
    said = traced.description
    console.print("DeepSeek-V4.1-Flash conformance: trace", style="bold")
    console.print(f"  target     {traced.target}: {said.name} {said.version} ({said.language}, {said.device})")
    console.print(f"  golden     {traced.set_name}, lock {traced.lock[:12]}")
    console.print(f"  pass       {', '.join(sorted({finding.run.how for finding in traced.findings}))}")
    console.print()
    for finding in traced.findings:
        console.print(_line(finding), style="bold red" if finding.diverges else "green", soft_wrap=True)
    console.print()
    first = traced.first
    shown = traced.findings if verbose else [first] if first else []
    for finding in shown:
        console.print(f"{finding.run.trace.name}", style="bold")
        _print_table(console, [finding])
        _print_growth(console, finding)
    if not shown:
        console.print("all scenarios", style="bold")
        _print_table(console, traced.findings)
    for line in textwrap.wrap(LEGEND, 80):
        console.print(line, style="dim")
    console.print()
    if first is not None:
        _print_forced(console, first)
        for sentence in first.sentences():
            console.print(textwrap.fill(sentence, 80), style="bold", soft_wrap=True)
    else:
        console.print(
            f"no divergence in {len(traced.findings)} scenario{'s' * (len(traced.findings) > 1)}", style="bold green"
        )
    console.print(f"{traced.seconds:.1f} s")


def _line(finding: Finding) -> str:
    return f"{finding.run.trace.name:<24} {'DIVERGES' if finding.diverges else 'ok':<9} {finding.sentences()[0]}"


def _print_table(console: Console, findings: Sequence[Finding]) -> None:
    layers = findings[0].layer_count
    first = findings[0].divergence if len(findings) == 1 else None
    wrong = {(v.layer, v.tap) for finding in findings for v in finding.introduced if not v.verdict.passed}
    by_place: dict[tuple[int, str], list[Cell]] = {}
    for finding in findings:
        for cell in finding.cells:
            if cell.layer is not None:
                by_place.setdefault((cell.layer, LAYER_TAPS[cell.tap].column), []).append(cell)
    console.print("layer" + "".join(f"{column:>{WIDTH}}" for column in COLUMNS), soft_wrap=True)
    for layer in range(layers):
        line = f"{layer:>5}"
        for column in COLUMNS:
            text = symbol(by_place.get((layer, column), ()))
            if any(at == layer and LAYER_TAPS[tap].column == column for at, tap in wrong if tap in LAYER_TAPS):
                text = f"{text}*"
            if first is not None and first.layer == layer and LAYER_TAPS[first.tap].column == column:
                text = f">{text}"
            line += f"{text:>{WIDTH}}"
        console.print(line.rstrip(), soft_wrap=True)


def symbol(cells: Iterable[Cell]) -> str:
    """The cells of one place in four characters or fewer."""
    found = list(cells)
    states = {cell.state for cell in found}
    if not found:
        return ""
    if states & {"choice", "malformed"}:
        return "x"
    judged = [cell.ratio for cell in found if cell.state in ("same", "within", "beyond")]
    worst = max(judged, default=0.0)
    if "beyond" in states:
        return f"{number(worst)}!"
    if worst > 0:
        return number(worst)
    if "tie" in states:
        return "="
    return "~" if "parted" in states else "." if "shown" in states else "0"


def number(ratio: float) -> str:
    """A ratio in three characters."""
    if not np.isfinite(ratio) or ratio >= 999.5:
        return "inf" if not np.isfinite(ratio) else "1e3"
    if ratio >= 9.95:
        return f"{ratio:.0f}"
    return f"{ratio:.1f}" if ratio >= 0.95 else f"{max(ratio, 0.01):.2f}".lstrip("0")


def _print_growth(console: Console, finding: Finding) -> None:
    """How the distance of the residual grows over the layers of one call, and over the calls."""
    call = 0 if finding.divergence is None else finding.divergence.call
    if finding.wrong is not None:
        call = min(call, finding.wrong.call) if finding.divergence else finding.wrong.call
    over_layers = [cell.distance for cell in finding.cells if cell.tap == "h_out" and cell.call == call]
    last = finding.layer_count - 1
    over_calls = [cell.distance for cell in finding.cells if cell.tap == "h_out" and cell.layer == last]
    for words, distances in (
        (f"h_out by layer, call {call}", over_layers),
        (f"h_out of layer {last} by call", over_calls),
    ):
        if distances:
            shown = " ".join("0" if distance == 0 else f"{distance:.2g}" for distance in distances)
            console.print(textwrap.fill(f"{words}: {shown}", 80, subsequent_indent="  "))
    console.print()


def _print_forced(console: Console, finding: Finding) -> None:
    """Verdicts on recorded inputs: of the layers around the cause, and what failed anywhere."""
    if not finding.forced:
        return
    around = {found.layer for found in (finding.divergence, finding.wrong, finding.failed) if found is not None}
    near = {layer for at in around if at is not None for layer in (at - 1, at)}
    shown = [forced for forced in finding.forced if forced.layer in near or forced.passed is False]
    if shown:
        console.print("on our inputs (teacher-forced)", style="bold")
    for forced in shown:
        verdict = {True: "right", False: "WRONG", None: "not there"}[forced.passed]
        detail = forced.case if forced.passed is not None else forced.message
        console.print(f"  layer {forced.layer:<3} {forced.component:<17} {verdict:<10} {detail}", soft_wrap=True)
    console.print()
