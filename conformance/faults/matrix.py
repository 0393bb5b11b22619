"""The kill matrix: every fault against the cases, and every case against the faults.

A fault is killed when some case rejects it.  It should be killed by a case whose flags name its mistake: then a port
that makes the mistake is told so.  A case that rejects nothing, not even the classics, is powerless.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cases.case import LEVELS, Case
from conformance.faults import pool
from conformance.faults.catalogue import FAULTS
from conformance.faults.classics import power
from conformance.faults.fault import Fault
from conformance.faults.prepared import PreparedCase, same
from conformance.interface import COMPONENTS
from conformance.runner import FAILURES

ORDINARY = LEVELS[: LEVELS.index("core") + 1]
"""Cases above these levels are tried only with faults whose flag they name: an ordinary run does not include them."""


CASES_AT_A_TIME = 25


@dataclass(frozen=True)
class Kill:
    """What became of a fault."""

    fault: str
    flag: str
    by: str = ""
    """The case that rejected it; empty for a survivor."""
    named: bool = False
    """Whether the flags of that case name the mistake."""
    reached: int = 0
    """Cases whose results the fault changed, as far as they were tried."""
    seconds: float = 0.0
    problem: str = ""
    """The suite itself raised while judging."""


@dataclass(frozen=True)
class Weakness:
    """A case and the classics it was put to."""

    case: str
    tried: tuple[str, ...]
    missed: tuple[str, ...]
    kills: str = ""
    """A fault that it rejects, looked for where it notices no classic."""

    @property
    def powerless(self) -> bool:
        """Nothing at all was noticed."""
        return set(self.missed) == set(self.tried) and not self.kills


@dataclass(frozen=True)
class Part:
    """The work of one process at a time: some faults of a component, and the power of some cases."""

    faults: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


@dataclass
class Matrix:
    """Everything that was found."""

    kills: list[Kill] = field(default_factory=list)
    power: list[Weakness] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def killers(self) -> set[str]:
        """Cases that rejected a fault or a classic."""
        return {kill.by for kill in self.kills} | {w.case for w in self.power if not w.powerless}

    @property
    def powerless(self) -> list[str]:
        """Cases that were tried with the classics and rejected nothing."""
        return [w.case for w in self.power if w.case not in self.killers]

    @property
    def survivors(self) -> list[Kill]:
        """Faults that no case rejected."""
        return [kill for kill in self.kills if not kill.by]

    @property
    def unnamed(self) -> list[Kill]:
        """Faults that only cases rejected which do not name the mistake."""
        return [kill for kill in self.kills if kill.by and not kill.named]

    @property
    def exit_code(self) -> int:
        """0 if every fault is killed and no case is powerless."""
        problems = any(kill.problem for kill in self.kills)
        return 1 if self.survivors or self.powerless or problems else 0


class Workbench:
    """The cases of one process, prepared when they are first needed."""

    def __init__(self, fixtures: Path | None) -> None:
        from conformance.adapters.in_process import InProcess
        from conformance.adapters.reference import Reference
        from conformance.cases import catalogue
        from conformance.fixtures import Fixtures

        self.cases: Mapping[str, Case] = {case.id: case for case in catalogue.catalogue(Fixtures.open(fixtures))}
        self.session = InProcess(Reference())
        self._prepared: dict[str, PreparedCase] = {}

    def prepared(self, case_id: str) -> PreparedCase:
        """The case, ready to be put to faults."""
        if case_id not in self._prepared:
            self._prepared[case_id] = PreparedCase(self.cases[case_id], self.session)
        return self._prepared[case_id]

    def order(self, fault: Fault) -> list[Case]:
        """Cases that name the mistake, then those of its component, then the others; own component and cheap first.

        Left out are cases of other components that rest on measured noise and do not name the mistake: what only they
        notice is not told from noise.
        """
        home = COMPONENTS.index(fault.component)

        def rank(case: Case) -> tuple[bool, bool, int, float]:
            ready = self._prepared.get(case.id)
            distance = (COMPONENTS.index(case.component) - home) % len(COMPONENTS)
            return (
                fault.flag not in case.flags,
                case.component != fault.component,
                distance,
                ready.seconds if ready else LEVELS.index(case.level) + 0.1,
            )

        tried = (
            case
            for case in self.cases.values()
            if fault.flag in case.flags
            or (case.level in ORDINARY and (case.mode != "propagated" or case.component == fault.component))
        )
        return sorted(tried, key=rank)

    def kill(self, fault: Fault) -> Kill:
        """Put cases to a fault until one that names it rejects it, or none is left."""
        start = time.perf_counter()
        first: str = ""
        reached = 0
        problem = ""
        for case in self.order(fault):
            names = fault.flag in case.flags
            if first and not names:
                break
            prepared = self.prepared(case.id)
            with fault.applied():
                answers = prepared.ask(self.session)
            if same(answers, prepared.answers):
                continue
            reached += 1
            result = prepared.judge(answers)
            if result.status == "BROKEN":
                problem = f"{case.id}: {result.message}"
            if result.status in FAILURES and not first:
                first = case.id
                if names:
                    break
        named = bool(first) and fault.flag in self.cases[first].flags
        return Kill(fault.id, fault.flag, first, named, reached, time.perf_counter() - start, problem)

    def weakness(self, case_id: str) -> Weakness:
        """Put the classics to a case."""
        prepared = self.prepared(case_id)
        found = power(prepared)
        kills = "" if set(found.tried) - set(found.missed) else self._some_fault(prepared)
        return Weakness(case_id, found.tried, found.missed, kills)

    def _some_fault(self, prepared: PreparedCase) -> str:
        """A fault that the case rejects, its own flags' first; empty if there is none in its component."""
        case = prepared.case
        own = [fault for fault in FAULTS if fault.flag in case.flags or fault.component == case.component]
        for fault in sorted(own, key=lambda fault: fault.flag not in case.flags):
            with fault.applied():
                answers = prepared.ask(self.session)
            if not same(answers, prepared.answers) and prepared.judge(answers).status in FAILURES:
                return fault.id
        return ""


_bench: Workbench | None = None


def _begin(fixtures: Path | None) -> None:
    global _bench
    pool.one_thread()
    _bench = Workbench(fixtures)


def _work(part: Part) -> tuple[list[Kill], list[Weakness]]:
    assert _bench is not None
    by_id = {fault.id: fault for fault in FAULTS}
    return [_bench.kill(by_id[fault_id]) for fault_id in part.faults], [_bench.weakness(case) for case in part.cases]


def run(
    faults: Sequence[Fault], cases: Sequence[Case], fixtures: Path | None = None, jobs: int = 2
) -> Iterator[Matrix]:
    """Run faults, and the classics for `cases`, component by component; yields the matrix as it grows."""
    start = time.perf_counter()
    matrix = Matrix()
    for kills, weaknesses in pool.finished(_work, _parts(faults, cases), jobs, _begin, (fixtures,)):
        matrix.kills += kills
        matrix.power += weaknesses
        matrix.seconds = time.perf_counter() - start
        yield matrix


def _parts(faults: Sequence[Fault], cases: Sequence[Case]) -> list[Part]:
    """Faults component by component, then the classics for some cases of a component at a time."""
    by_fault = [Part(faults=tuple(f.id for f in faults if f.component == component)) for component in COMPONENTS]
    by_case = [
        Part(cases=tuple(case.id for case in cases if case.component == component)[first : first + CASES_AT_A_TIME])
        for component in COMPONENTS
        for first in range(0, len(cases), CASES_AT_A_TIME)
    ]
    return [part for part in (*by_fault, *by_case) if part.faults or part.cases]


def one_per_flag(faults: Sequence[Fault]) -> list[Fault]:
    """The first fault of every flag: the quick subset."""
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.flag, fault)
    return list(first.values())
