"""Honest variants against the cases: every one must pass everything, and shows how loose each bound is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.cases.case import Case
from conformance.faults import pool
from conformance.faults.honest import HONEST_VARIANTS, HonestVariant
from conformance.faults.matrix import Workbench
from conformance.faults.prepared import same
from conformance.interface import COMPONENTS


@dataclass(frozen=True)
class FalseAlarm:
    """An honest variant that a case rejects."""

    variant: str
    case: str
    what: str


@dataclass(frozen=True)
class Reach:
    """How near one variant came to the bound of one tap."""

    variant: str
    case: str
    tap: str
    mode: str
    ratio: float


@dataclass(frozen=True)
class Part:
    """The work of one process at a time."""

    fixtures: Path | None
    variants: tuple[str, ...]
    cases: tuple[str, ...]
    seed: int | None = None
    """Of a synthetic set, each case of which meets one variant in `SHARE`."""


@dataclass(frozen=True)
class Cases:
    """The cases of one golden set: the shipped one, or a synthetic one with its seed."""

    fixtures: Path | None
    cases: tuple[Case, ...]
    seed: int | None = None


PART = 12
"""Cases that one process is given at a time."""

SHARE = 10
"""In a synthetic set a case meets one variant in this many, others at the next seed: every variant is put to cases at
every seed, and every case meets every variant once in so many seeds.  All pairs at all seeds would take hours."""


Found = tuple[list[FalseAlarm], list[Reach]]
_benches: dict[Path | None, Workbench] = {}


def _work(part: Part) -> Found:
    bench = _benches.setdefault(part.fixtures, Workbench(part.fixtures))
    prepared = [bench.prepared(case_id) for case_id in part.cases]
    alarms: list[FalseAlarm] = []
    reached: list[Reach] = []
    for variant in HONEST_VARIANTS:
        if variant.name not in part.variants:
            continue
        turn = part.variants.index(variant.name)
        with variant.session() as session:
            for number, ready in enumerate(prepared):
                if not applies(variant, ready.case):
                    continue
                if part.seed is not None and (turn + number + part.seed) % SHARE:
                    continue
                answers = ready.ask(session)
                if same(answers, ready.answers):
                    continue
                result = ready.judge(answers, to_the_end=True)
                if result.status != "PASS":
                    alarms.append(FalseAlarm(variant.name, ready.case.id, _what(result.message, result.first_failure)))
                reached += [
                    Reach(variant.name, ready.case.id, tap.tap, tap.mode, tap.ratio)
                    for tap in result.taps
                    if tap.mode != "exact"
                ]
    return alarms, reached


def _what(message: str, failure: object) -> str:
    if failure is None:
        return message
    verdict = getattr(failure, "verdict", None)
    where = getattr(failure, "where", "")
    return (
        f"{message} {where}: {getattr(verdict, 'tap', '')} error/bound {getattr(verdict, 'ratio', 0.0):.4g}, "
        f"got {getattr(verdict, 'actual', None)}, expected {getattr(verdict, 'expected', None)}: "
        f"{getattr(verdict, 'message', '')}"
    ).strip()


def applies(variant: HonestVariant, case: Case) -> bool:
    """Whether a variant can make a difference to a case, and is honest there.

    Modules of the reference are in the order in which they use one another: a change of one says nothing to the cases
    of those before it.
    """
    if case.reading == "literal" and not variant.both_readings:
        return False
    modules = [change.target.partition(".")[0] for change in variant.changes]
    if not modules or not all(module in COMPONENTS for module in modules):
        return True
    return COMPONENTS.index(case.component) >= min(COMPONENTS.index(module) for module in modules)


def run(variants: Sequence[HonestVariant], sets: Sequence[Cases], jobs: int) -> Iterator[tuple[int, int, Found]]:
    """Put variants to cases, some cases at a time; yields how many parts are done, of how many, and what was found."""
    names = tuple(variant.name for variant in variants)
    parts = []
    for golden in sets:
        for component in COMPONENTS:
            ids = [case.id for case in golden.cases if case.component == component]
            parts += [
                Part(golden.fixtures, names, tuple(ids[i : i + PART]), golden.seed) for i in range(0, len(ids), PART)
            ]
    for number, found in enumerate(pool.finished(_work, parts, jobs), 1):
        yield number, len(parts), found
