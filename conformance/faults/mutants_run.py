"""Mutants of the reference against the cases: which of them no case rejects."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import LEVELS, Case
from conformance.faults import patches, pool
from conformance.faults.matrix import ORDINARY, Workbench
from conformance.faults.mutation import Mutant, mutants
from conformance.faults.patches import PACKAGE, Replace, patched
from conformance.faults.prepared import same
from conformance.interface import COMPONENTS, Config as ModelConfig
from conformance.runner import FAILURES
from reference.config import Config

T = TypeVar("T")

HELPERS: Mapping[str, str] = {
    "config": "attention",
    "images": "vision",
    "parameters": "model",
    "precision": "linear",
    "runtime": "attention",
    "saving": "block",
}
"""Modules of the reference that are no component, and the component that they are counted to, whose cases are tried
first.  `parallel` is missing: it runs as several processes, and no case of the workbench does."""

SLOWER = 10
"""A mutant that takes so many times as long as the reference, and the limit besides, is one that does not end."""

PART = 8
"""Mutants that one process is given at a time."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant."""

    mutant: Mutant
    component: str
    by: str = ""
    """The case that rejected it; empty for a survivor."""
    late: bool = False
    """That case had no answer in time."""
    changed: tuple[str, ...] = ()
    """Cases that accepted other results than the reference's."""
    tried: int = 0
    """Cases that call the function and were put to the mutant."""
    left: int = 0
    """Cases that were not looked at, since one had rejected the mutant or for lack of time."""
    seconds: float = 0.0
    problem: str = ""
    """The suite itself raised while judging."""


class _Rereading(Reference):
    """The reference without its memory for configurations, in which a mutant of `config` would never be called."""

    def _read(self, config: ModelConfig) -> Config:
        return Config.from_mapping(config)


class MutantWorkbench(Workbench):
    """Cases that know which functions of the reference they call: no other one's mutants can matter to them."""

    def __init__(self, fixtures: Path | None) -> None:
        super().__init__(fixtures)
        self.session = InProcess(_Rereading())
        self._called: dict[str, frozenset[str]] = {}

    def called(self, case_id: str) -> frozenset[str]:
        """The functions that a case calls, such as "rotary.yarn_range"."""
        if case_id not in self._called:
            self._called[case_id] = self._watched(case_id)
        return self._called[case_id]

    def _watched(self, case_id: str) -> frozenset[str]:
        prepared = self.prepared(case_id)
        called: set[str] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                called.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")

        # Without changes: what was cached for an earlier case is forgotten, and computed where it can be seen.
        before = sys.getprofile()
        with patched([]):
            sys.setprofile(note)
            try:
                prepared.ask(self.session)
            finally:
                sys.setprofile(before)
        prefix = f"{PACKAGE}."
        return frozenset(name.removeprefix(prefix) for name in called if name.startswith(prefix))


class OutOfTime(KeyboardInterrupt):
    """Raised by the alarm; of the kind that a session takes for no answer of the port's."""


def modules(component: str) -> list[str]:
    """The modules of the reference that belong to a component."""
    return [component, *(module for module, home in HELPERS.items() if home == component)]


def all_mutants(component: str) -> list[Mutant]:
    """The mutants of a component, module by module."""
    return [
        mutant
        for module in modules(component)
        for mutant in mutants(module, inspect.getsource(importlib.import_module(f"{PACKAGE}.{module}")))
    ]


def component_of(mutant: Mutant) -> str:
    """The component that a mutant's module belongs to."""
    module = mutant.target.partition(".")[0]
    return HELPERS.get(module, module)


def order(bench: Workbench, mutant: Mutant) -> list[Case]:
    """Cases of the mutant's component, then those of the components after it, which may use it; smoke cases first.

    A helper is used by components before its own as well: theirs come last.  Left out are cases of other components
    that rest on measured noise: what only they notice is not told from noise.
    """
    home = COMPONENTS.index(component_of(mutant))
    first = 0 if mutant.target.partition(".")[0] in HELPERS else home
    tried = [
        case
        for case in bench.cases.values()
        if case.level in ORDINARY
        and COMPONENTS.index(case.component) >= first
        and (case.mode != "propagated" or case.component == COMPONENTS[home])
    ]

    def rank(case: Case) -> tuple[int, int]:
        return (COMPONENTS.index(case.component) - home) % len(COMPONENTS), LEVELS.index(case.level)

    return sorted(tried, key=rank)


def compiled(mutant: Mutant) -> Any:
    """The changed function, in the namespace of its module."""
    module = importlib.import_module(f"{PACKAGE}.{mutant.target.partition('.')[0]}")
    return patches.compiled(module, mutant.source, f"<{mutant.id}>")


def within(seconds: float, action: Callable[[], T]) -> T:
    """What an action returns, or OutOfTime; in the main thread only."""

    def ring(*_: object) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return action()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def put(bench: MutantWorkbench, mutant: Mutant, limit: float) -> Fate:
    """Put cases that call the function until one rejects it, none is left, or they have taken `limit` seconds.

    The time for preparing cases does not count: it is spent once, for the first mutants of a process.
    """
    change = Replace(mutant.target, compiled(mutant))
    cases = order(bench, mutant)
    by, late, problem = "", False, ""
    changed: list[str] = []
    tried, left, seconds = 0, 0, 0.0
    for number, case in enumerate(cases, 1):
        if mutant.target not in bench.called(case.id):
            continue
        prepared = bench.prepared(case.id)
        tried += 1
        start = time.perf_counter()
        try:
            with patched([change]):
                answers = within(limit + SLOWER * prepared.seconds, partial(prepared.ask, bench.session))
        except OutOfTime:
            by, late = case.id, True
        else:
            if not same(answers, prepared.answers):
                result = prepared.judge(answers)
                if result.status in FAILURES:
                    by = case.id
                elif result.status == "BROKEN":
                    problem = f"{case.id}: {result.message}"
                else:
                    changed.append(case.id)
        seconds += time.perf_counter() - start
        if by or problem or seconds >= limit:
            left = len(cases) - number
            break
    return Fate(mutant, component_of(mutant), by, late, tuple(changed), tried, left, seconds, problem)


_bench: MutantWorkbench | None = None


def _begin(fixtures: Path | None) -> None:
    global _bench
    pool.one_thread()
    _bench = MutantWorkbench(fixtures)


def _work(part: Sequence[Mutant], limit: float) -> list[Fate]:
    assert _bench is not None
    return [put(_bench, mutant, limit) for mutant in part]


def run(chosen: Sequence[Mutant], fixtures: Path | None, jobs: int, limit: float) -> Iterator[list[Fate]]:
    """Put cases to mutants, some mutants at a time; yields what became of them."""
    parts = [chosen[first : first + PART] for first in range(0, len(chosen), PART)]
    return pool.finished(partial(_work, limit=limit), parts, jobs, _begin, (fixtures,))
