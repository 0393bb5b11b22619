"""What may explain a failure: the faults of the catalogue, and deviations, each as changes to the reference."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, Literal

from conformance.cases.case import Case
from conformance.deviations import DEVIATIONS
from conformance.faults.catalogue import FAULTS
from conformance.faults.deviations import CHANGES
from conformance.faults.patches import PACKAGE, Change, Edit
from conformance.interface import COMPONENTS

Kind = Literal["fault", "deviation", "declared deviation"]


@dataclass(frozen=True)
class Candidate:
    """One explanation: what the reference is made to do."""

    kind: Kind
    name: str
    """`component/name` of a fault, or the name of a deviation."""
    flag: str
    words: str
    """Completes "your values equal ours with: "."""
    component: str
    changes: tuple[Change, ...]
    differs: tuple[Change, ...]
    """Those of the changes, or of the ones left undone, by which it differs from what the port has to do."""


def candidates(declared: Collection[str] = ()) -> tuple[Candidate, ...]:
    """Everything there is to try on a port that declares these deviations.

    Its values are then compared with those of a reference that deviates likewise.
    """
    return _candidates(tuple(name for name in DEVIATIONS if name in declared))


@cache
def _candidates(declared: tuple[str, ...]) -> tuple[Candidate, ...]:
    base = changes_of(declared)
    found = [
        Candidate("fault", fault.id, fault.flag, fault.why, fault.component, (*base, fault.change), (fault.change,))
        for fault in FAULTS
    ]
    for name, deviation in DEVIATIONS.items():
        home = changes_home(CHANGES[name])
        if name in declared:
            rest = changes_of([other for other in declared if other != name])
            words = f"the declared deviation {name} left undone"
            found.append(Candidate("declared deviation", name, "", words, home, rest, CHANGES[name]))
        else:
            changes = (*base, *CHANGES[name])
            found.append(Candidate("deviation", name, "", deviation.words, home, changes, CHANGES[name]))
    return tuple(found)


def changes_of(declared: Collection[str]) -> tuple[Change, ...]:
    """The changes of these deviations."""
    return tuple(change for name in DEVIATIONS if name in declared for change in CHANGES[name])


def changes_home(changes: Sequence[Change]) -> str:
    """The component that a change is made in."""
    return changes[0].target.partition(".")[0]


def in_order(case: Case, among: Sequence[Candidate]) -> list[Candidate]:
    """Deviations and the mistakes that the case names first, then those of its component, then what it is built from.

    Modules are listed in the order in which they use one another, so the nearest before the component come first.
    """
    home = COMPONENTS.index(case.component)

    def rank(candidate: Candidate) -> tuple[bool, bool, int]:
        own = candidate.flag in case.flags or candidate.kind != "fault"
        known = candidate.component in COMPONENTS
        distance = (home - COMPONENTS.index(candidate.component)) % len(COMPONENTS) if known else len(COMPONENTS)
        return (not own, candidate.component != case.component, distance)

    return sorted(among, key=rank)


@contextmanager
def functions_called() -> Iterator[set[str]]:
    """Collects the functions of the reference that are called in the context, as `Edit.target` names them."""
    called: set[str] = set()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith(f"{PACKAGE}."):
                called.add(f"{module.removeprefix(f'{PACKAGE}.')}.{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield called
    finally:
        sys.setprofile(before)


def could_matter(candidate: Candidate, called: Collection[str]) -> bool:
    """Whether a change touches anything that the case made the reference call; a changed value always may."""
    return any(not isinstance(change, Edit) or change.target in called for change in candidate.differs)
