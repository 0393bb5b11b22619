"""The command `conformance faults`: which faults and cases it is about, and what it prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.errors import ConformanceError
from conformance.faults.catalogue import FAULTS
from conformance.faults.fault import Fault
from conformance.faults.matrix import ORDINARY, Kill, Matrix, one_per_flag, run
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS
from conformance.report.output import OutputFile
from conformance.report.terminal import make_console
from conformance.selection import parse_expression, require_components

FORMS: Mapping[str, tuple[str, ...]] = {
    "--fault": ("", "--honest"),
    "--quick": ("",),
    "--verbose": ("", "--mutants"),
    "--honest": ("--honest",),
    "--headroom": ("--honest",),
    "--seeds": ("--honest",),
    "--share": ("--mutants",),
    "--seed": ("--mutants",),
    "--limit": ("--mutants",),
}
"""Options that mean something in some forms of the command only; the form without a name injects faults."""


def refuse_foreign(form: str, given: Mapping[str, bool]) -> None:
    """Make sure that what was given means something.

    Raises:
        ConformanceError: an option belongs to another form of the command.
    """
    for option, present in given.items():
        if present and form not in FORMS[option]:
            others = " or ".join(filter(None, FORMS[option]))
            raise ConformanceError(f"{option} does not go with {form}" if form else f"{option} goes with {others}")


@dataclass(frozen=True)
class FaultOptions:
    """What `conformance faults` was asked to do."""

    components: tuple[str, ...] = ()
    fault: str | None = None
    expression: str | None = None
    quick: bool = False
    fixtures: Path | None = None
    json: Path | None = None
    jobs: int = 2
    verbose: bool = False


def chosen_faults(options: FaultOptions) -> list[Fault]:
    """The faults asked for.

    Raises:
        ConformanceError: an argument selects nothing.
    """
    faults: list[Fault] = list(FAULTS)
    require_components(options.components, COMPONENTS)
    if options.components:
        faults = [fault for fault in faults if fault.component in options.components]
    if options.fault is not None:
        faults = [fault for fault in faults if options.fault in (fault.id, fault.name)]
    if options.expression is not None:
        matches = parse_expression(options.expression, {fault.id for fault in faults})
        faults = [fault for fault in faults if matches(fault.id)]
    if not faults:
        raise ConformanceError("no fault is selected by these arguments")
    return one_per_flag(faults) if options.quick else faults


def faults(options: FaultOptions) -> int:
    """Run the matrix, print it, and return the exit code: 0 if all are killed and no case is powerless."""
    selected = chosen_faults(options)
    cases = [case for case in catalogue.catalogue(Fixtures.open(options.fixtures)) if case.level in ORDINARY]
    narrowed = options.fault is not None or options.expression is not None
    if options.quick:
        cases = [case for case in cases if case.level == "smoke"]
    if options.components:
        cases = [case for case in cases if case.component in options.components]
    tested: Sequence[Case] = [] if narrowed else cases
    matrix = Matrix()
    with OutputFile.if_asked("--json", options.json) as out:
        for matrix in run(selected, tested, options.fixtures, options.jobs):
            print(f"{len(matrix.kills)} of {len(selected)} faults, {matrix.seconds:.0f} s", file=sys.stderr)
        print_matrix(make_console(), matrix, options.verbose or len(selected) <= 40)
        if out is not None:
            out.write(json.dumps(record(matrix), indent=1) + "\n")
    return matrix.exit_code


def record(matrix: Matrix) -> dict[str, Any]:
    """The matrix as JSON values."""
    return {
        "faults": [asdict(kill) for kill in matrix.kills],
        "cases": [asdict(weakness) for weakness in matrix.power],
        "powerless": matrix.powerless,
        "seconds": matrix.seconds,
    }


def print_matrix(console: Console, matrix: Matrix, every_fault: bool) -> None:
    """A row a component (or a fault), then everything that went wrong, then totals."""
    if every_fault:
        _print_kills(console, "fault", matrix.kills)
    table = Table(box=None, pad_edge=False)
    for name in ("component", "faults", "killed", "named", "survive", "cases", "weak", "powerless"):
        table.add_column(name, justify="left" if name == "component" else "right")
    for component in COMPONENTS:
        kills = [kill for kill in matrix.kills if kill.fault.startswith(component + "/")]
        power = [weakness for weakness in matrix.power if weakness.case.startswith(component + "/")]
        if not kills and not power:
            continue
        powerless = [case for case in matrix.powerless if case.startswith(component + "/")]
        counts = (
            len(kills),
            sum(bool(kill.by) for kill in kills),
            sum(kill.named for kill in kills),
            sum(not kill.by for kill in kills),
            len(power),
            sum(bool(weakness.missed) for weakness in power),
            len(powerless),
        )
        table.add_row(component, *(str(count) for count in counts))
    console.print(table)
    _print_kills(console, "killed, not named", matrix.unnamed)
    _print_lines(
        console, "faults that survive", [f"{k.fault}  ({k.flag}; reached {k.reached} cases)" for k in matrix.survivors]
    )
    _print_lines(console, "the suite raised", [f"{k.fault}: {k.problem}" for k in matrix.kills if k.problem])
    weak = [w for w in matrix.power if w.missed and w.case not in matrix.powerless]
    _print_lines(console, "cases that miss a classic", [f"{w.case}: {', '.join(w.missed)}" for w in weak])
    _print_lines(console, "powerless cases", matrix.powerless)
    console.print(
        f"\n{len(matrix.kills)} faults: {len(matrix.kills) - len(matrix.survivors)} killed, "
        f"{sum(kill.named for kill in matrix.kills)} by a case that names the mistake; "
        f"{len(matrix.survivors)} survive; {len(matrix.power)} cases, {len(matrix.powerless)} powerless; "
        f"{matrix.seconds:.0f} s"
    )


def _print_kills(console: Console, title: str, kills: Sequence[Kill]) -> None:
    if not kills:
        return
    console.print(f"\n{title}:")
    for kill in kills:
        named = "" if kill.named else ", which does not name it"
        by = f"killed by {kill.by}{named}" if kill.by else "survives"
        console.print(f"  {kill.fault} ({kill.flag}): {by}, {kill.seconds:.1f} s", soft_wrap=True)


def _print_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}:")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)
