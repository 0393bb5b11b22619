"""`conformance faults --honest` and `--headroom`: false alarms, and how loose the bounds are."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.errors import ConformanceError
from conformance.faults.honest import HONEST_VARIANTS
from conformance.faults.honest_run import Cases, FalseAlarm, Reach, run
from conformance.faults.matrix import ORDINARY
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS
from conformance.report.output import OutputFile
from conformance.report.terminal import make_console
from conformance.selection import parse_expression

ROW = "{:<18}{:<17}{:<11}{:>5}{:>9}{:>9}{:>9}  {}"

WITH_FLOORS = ("block", "stack", "model")
"""Components judged by measured floors: synthetic sets have none, and measuring them takes longer than the check."""


@dataclass(frozen=True)
class HonestOptions:
    """What `conformance faults --honest` was asked to do."""

    components: tuple[str, ...] = ()
    variant: str | None = None
    expression: str | None = None
    headroom: bool = False
    seeds: int = 0
    fixtures: Path | None = None
    json: Path | None = None
    jobs: int = 2


def honest(options: HonestOptions) -> int:
    """Run the variants; exit code 0 if none is rejected.

    Raises:
        ConformanceError: an argument selects nothing.
    """
    variants = [v for v in HONEST_VARIANTS if options.variant in (None, v.name)]
    if options.expression is not None:
        matches = parse_expression(options.expression, {variant.name for variant in variants})
        variants = [variant for variant in variants if matches(variant.name)]
    if not variants:
        raise ConformanceError("no honest variant is selected by these arguments")
    start = time.perf_counter()
    alarms: list[FalseAlarm] = []
    reached: list[Reach] = []
    console = make_console()
    with ExitStack() as stack:
        out = stack.enter_context(OutputFile.if_asked("--json", options.json))
        sets = [Cases(options.fixtures, _cases(options.fixtures, options.components))]
        if options.seeds:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sets += _synthetic(directory, options)
        for done, parts, (more_alarms, more_reached) in run(variants, sets, options.jobs):
            alarms += more_alarms
            reached += more_reached
            # At once: a long run may be stopped before its end.
            for alarm in more_alarms:
                console.print(f"{alarm.variant}: {alarm.case}: {alarm.what}", soft_wrap=True)
            print(f"{done} of {parts} parts, {len(alarms)} false alarms", file=sys.stderr)
        if options.headroom:
            print_headroom(console, reached)
        console.print(
            f"{len(variants)} honest variants, {sum(len(golden.cases) for golden in sets)} cases: "
            f"{len(alarms)} false alarms; "
            f"{time.perf_counter() - start:.0f} s"
        )
        if out is not None:
            found = {"alarms": [asdict(alarm) for alarm in alarms], "reached": [asdict(reach) for reach in reached]}
            out.write(json.dumps(found, indent=1) + "\n")
    return 1 if alarms else 0


def _cases(fixtures: Path | None, components: Sequence[str]) -> tuple[Case, ...]:
    return tuple(
        case
        for case in catalogue.catalogue(Fixtures.open(fixtures))
        if case.level in ORDINARY and (not components or case.component in components)
    )


def _synthetic(directory: Path, options: HonestOptions) -> list[Cases]:
    """Cases of small synthetic sets: the shipped configuration with other weights and prompts."""
    from conformance.faults.synthetic import Run, make_golden_sets

    shipped = Fixtures.open(options.fixtures)
    name = next(name for name in shipped.sets if shipped.kind(name) == "model")
    mapping = shipped.model(name).config
    sets = []
    for seed in range(1, options.seeds + 1):
        runs = [
            Run("prompt", 19),
            Run("steps", 13, steps=5),
            Run("batch", 6, steps=3, batch=2),
            Run("image", 12, image=(3, 6)),
        ]
        place = make_golden_sets(directory / str(seed), "synthetic", mapping, runs, seed=1000 * seed)
        cases = tuple(
            case
            for case in _cases(place, options.components)
            if case.component not in WITH_FLOORS and case.source.startswith("synthetic")
        )
        sets.append(Cases(place, cases, seed))
    return sets


def print_headroom(console: Console, reached: Sequence[Reach]) -> None:
    """Error over bound of every tap over all variants that changed it: the median and the worst of its cases."""
    heading = ("component", "tap", "mode", "cases", "variants", "median", "worst", "worst case and variant")
    console.print(ROW.format(*heading), soft_wrap=True)
    for component in COMPONENTS:
        own = [reach for reach in reached if reach.case.startswith(component + "/")]
        for tap, mode in dict.fromkeys((reach.tap, reach.mode) for reach in own):
            rows = [reach for reach in own if (reach.tap, reach.mode) == (tap, mode)]
            worst = max(rows, key=lambda reach: reach.ratio)
            words = (
                component,
                tap,
                mode,
                str(len({reach.case for reach in rows})),
                str(len({reach.variant for reach in rows})),
                f"{statistics.median(reach.ratio for reach in rows):.3g}",
                f"{worst.ratio:.3g}",
                f"{worst.case.removeprefix(component + '/')} ({worst.variant})",
            )
            console.print(ROW.format(*words), soft_wrap=True)
