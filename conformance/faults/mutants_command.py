"""`conformance faults --mutants`: small changes of the reference that no case notices."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.errors import ConformanceError
from conformance.faults.mutants_run import Fate, all_mutants, run
from conformance.faults.mutation import Mutant
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS
from conformance.report.output import OutputFile
from conformance.report.terminal import make_console
from conformance.selection import parse_expression, require_components

LIMIT = 5.0
SEEDS = 1_000_000
"""A seed that is not given is drawn below this: it must be easy to type."""


@dataclass(frozen=True)
class MutantOptions:
    """What `conformance faults --mutants` was asked to do."""

    components: tuple[str, ...] = ()
    expression: str | None = None
    share: float | None = None
    seed: int | None = None
    limit: float | None = None
    fixtures: Path | None = None
    json: Path | None = None
    jobs: int = 2
    verbose: bool = False


def chosen_mutants(options: MutantOptions) -> list[Mutant]:
    """The mutants asked for, all of them.

    Raises:
        ConformanceError: an argument selects nothing.
    """
    require_components(options.components, COMPONENTS)
    components = [component for component in COMPONENTS if component in options.components or not options.components]
    mutants = [mutant for component in components for mutant in all_mutants(component)]
    if options.expression is not None:
        matches = parse_expression(options.expression, {mutant.id for mutant in mutants})
        mutants = [mutant for mutant in mutants if matches(mutant.id)]
    if not mutants:
        raise ConformanceError("no mutant is selected by these arguments")
    return mutants


def sample(mutants: Sequence[Mutant], share: float, seed: int) -> list[Mutant]:
    """A share of the mutants, at least one, in their order; the same for the same seed."""
    count = math.ceil(share * len(mutants))
    picked = random.Random(seed).sample(range(len(mutants)), count)
    return [mutants[index] for index in sorted(picked)]


def mutants(options: MutantOptions) -> int:
    """Run the mutants and print what survives; the exit code is 0 whatever does, since a mutant may be no mistake.

    Raises:
        ConformanceError: an argument selects nothing, or cannot be meant.
    """
    limit = LIMIT if options.limit is None else options.limit
    if not 0 < limit < math.inf:
        raise ConformanceError(f"--limit {limit:g}: expected seconds, more than 0")
    if options.share is not None and not 0 < options.share <= 1:
        raise ConformanceError(f"--share {options.share:g}: expected more than 0 and at most 1")
    if options.seed is not None and options.share is None:
        raise ConformanceError("--seed goes with --share: without it, all mutants are run")
    chosen = every = chosen_mutants(options)
    Fixtures.open(options.fixtures)  # refused here, not by the processes
    drawn = ""
    if options.share is not None:
        seed = random.randrange(SEEDS) if options.seed is None else options.seed
        chosen = sample(every, options.share, seed)
        drawn = f" (--share {options.share:g} --seed {seed})"
    of = f"{len(chosen)} of {len(every)} mutants{drawn}"
    print(of, file=sys.stderr)
    with OutputFile.if_asked("--json", options.json) as out:
        fates: list[Fate] = []
        start = time.perf_counter()
        try:
            for more in run(chosen, options.fixtures, options.jobs, limit):
                fates += more
                survivors = sum(not fate.by for fate in fates)
                spent = time.perf_counter() - start
                print(f"{len(fates)} of {len(chosen)} mutants, {survivors} survive, {spent:.0f} s", file=sys.stderr)
        finally:
            # Also of a run that is interrupted.
            places = {mutant: place for place, mutant in enumerate(chosen)}
            fates.sort(key=lambda fate: places[fate.mutant])
            console = make_console()
            print_fates(console, fates, options.verbose)
            console.print(f"\n{of}: {_totals(fates, len(chosen))}; {time.perf_counter() - start:.0f} s", soft_wrap=True)
            if out is not None:
                out.write(json.dumps([record(fate) for fate in fates], indent=1) + "\n")
    return 0


def record(fate: Fate) -> dict[str, Any]:
    """One mutant and its fate as JSON values."""
    values = asdict(fate)
    return {"id": fate.mutant.id, **values.pop("mutant"), **values}


def accepted(fates: Sequence[Fate]) -> list[Fate]:
    """Survivors that changed results: what an accepted mistake would look like."""
    return [fate for fate in fates if not fate.by and not fate.problem and fate.changed]


def unchanged(fates: Sequence[Fate]) -> list[Fate]:
    """Survivors that changed no result of a case that was tried."""
    return [fate for fate in fates if not fate.by and not fate.problem and not fate.changed]


def _totals(fates: Sequence[Fate], chosen: int) -> str:
    not_run = chosen - len(fates)
    late = sum(fate.late for fate in fates)
    return (
        f"{sum(bool(fate.by) for fate in fates)} killed{f' ({late} by time)' if late else ''}, "
        f"{len(accepted(fates))} accepted with other results, {len(unchanged(fates))} without"
        f"{f', {not_run} not run' if not_run else ''}"
    )


def print_fates(console: Console, fates: Sequence[Fate], verbose: bool) -> None:
    """Survivors that changed results, then those that changed none, then a row a component."""
    if verbose:
        _print_group(console, "killed", [fate for fate in fates if fate.by])
    _print_group(console, "the suite raised", [fate for fate in fates if fate.problem])
    _print_group(console, "accepted, though results differ from the reference's", accepted(fates))
    _print_group(console, "no result differs: not called, or another way to write the same", unchanged(fates))
    table = Table(box=None, pad_edge=False)
    for name in ("component", "mutants", "killed", "by time", "accepted", "no change"):
        table.add_column(name, justify="left" if name == "component" else "right")
    for component in COMPONENTS:
        own = [fate for fate in fates if fate.component == component]
        counts = (
            len(own),
            sum(bool(fate.by) for fate in own),
            sum(fate.late for fate in own),
            len(accepted(own)),
            len(unchanged(own)),
        )
        if own:
            table.add_row(component, *(str(count) for count in counts))
    console.print()
    console.print(table)


def _print_group(console: Console, title: str, fates: Sequence[Fate]) -> None:
    if not fates:
        return
    console.print(f"\n{title}:")
    for fate in fates:
        console.print(f"  {fate.mutant.id}: {fate.mutant.change}", soft_wrap=True)
        console.print(f"      {fate.mutant.text}", soft_wrap=True)
        console.print(f"      {_what_became(fate)}", soft_wrap=True)


def _what_became(fate: Fate) -> str:
    if fate.problem:
        return fate.problem
    if fate.by:
        return f"{'no answer in time: ' if fate.late else ''}{fate.by}"
    if not fate.tried:
        return "no case calls it"
    cases = f"{fate.tried} case{'s' if fate.tried > 1 else ''} that call{'' if fate.tried > 1 else 's'} it"
    if fate.left:
        cases += f"; out of time, {fate.left} not looked at"
    return f"first {fate.changed[0]}; {len(fate.changed)} of {cases}" if fate.changed else cases
