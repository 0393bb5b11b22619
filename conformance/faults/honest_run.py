"""Honest variants against the cases: every one must pass everything, and shows how loose each bound is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from conformance.cases.case import Case
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


Found = tuple[list[FalseAlarm], list[Reach]]
_benches: dict[Path | None, Workbench] = {}


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def _work(part: Part) -> Found:
    bench = _benches.setdefault(part.fixtures, Workbench(part.fixtures))
    prepared = [bench.prepared(case_id) for case_id in part.cases]
    alarms: list[FalseAlarm] = []
    reached: list[Reach] = []
    for variant in HONEST_VARIANTS:
        if variant.name not in part.variants:
            continue
        with variant.session() as session:
            for ready in prepared:
                if not applies(variant, ready.case):
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


def run(
    variants: Sequence[HonestVariant], cases: Sequence[tuple[Path | None, Case]], jobs: int
) -> Iterator[tuple[int, int, Found]]:
    """Put variants to cases, some cases at a time; yields how many parts are done, of how many, and what was found."""
    names = tuple(variant.name for variant in variants)
    parts = []
    for fixtures in dict.fromkeys(fixtures for fixtures, _ in cases):
        for component in COMPONENTS:
            ids = [case.id for place, case in cases if place == fixtures and case.component == component]
            parts += [Part(fixtures, names, tuple(ids[i : i + 24])) for i in range(0, len(ids), 24)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, max(1, len(parts))), context, _begin) as pool:
        pending = [pool.submit(_work, part) for part in parts]
        for number, done in enumerate(as_completed(pending), 1):
            yield number, len(parts), done.result()
