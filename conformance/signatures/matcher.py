"""Trying all mistakes on all failed cases, for a bounded time.

Cheap cases come first: hand-made inputs that reveal one mistake say more than a whole model, and cost less.  What has
explained one case is tried first on the next, so that sixty failures of one mistake cost little more than one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.adapters.session import Answer, Session
from conformance.cases.case import LEVELS, Case
from conformance.signatures.candidates import Candidate, candidates, could_matter, in_order
from conformance.signatures.failed_case import FailedCase, Match


@dataclass(frozen=True)
class FoundMatch:
    """A mistake that explains a case, beside the others that do."""

    match: Match
    rank: int
    """1 for the best; several may be equal."""


def explain(
    failed: Sequence[tuple[Case, float]],
    session: Session,
    seconds: float,
    progress: Callable[[str], None] = lambda case_id: None,
    among: Sequence[Candidate] | None = None,
) -> Mapping[str, tuple[FoundMatch, ...]]:
    """The mistakes that explain failed cases, each given with the seconds it took: by case id, the best first.

    Only cases that have one are in the result.  `among`: instead of everything there is.
    """
    end = time.perf_counter() + seconds
    known = candidates(session.describe().deviations) if among is None else among
    reference = InProcess(Reference())
    suspects: Counter[str] = Counter()
    matches: dict[str, list[Match]] = {}
    for case, _ in sorted(failed, key=_cost):
        if time.perf_counter() > end:
            break
        progress(case.id)
        try:
            ready = FailedCase(case, session, reference)
        except (Answer, ValueError):
            continue
        found = _matches(ready, known, suspects, end)
        if found:
            matches[case.id] = found
            suspects.update(match.candidate.name for match in found)
    return {case_id: _ranked(found, suspects) for case_id, found in matches.items()}


def _cost(failed: tuple[Case, float]) -> tuple[bool, int, float]:
    case, seconds = failed
    return case.source not in ("hand-made", "lattice"), LEVELS.index(case.level), seconds


def _matches(ready: FailedCase, known: Sequence[Candidate], suspects: Mapping[str, int], end: float) -> list[Match]:
    """What explains a case: the suspects, and if none of them does, anything else, as far as the time allows."""
    relevant = [candidate for candidate in in_order(ready.case, known) if could_matter(candidate, ready.called)]
    first = [candidate for candidate in relevant if candidate.name in suspects]
    found = [match for match in map(ready.match, first) if match is not None]
    if found:
        return found
    for candidate in relevant:
        if time.perf_counter() > end:
            break
        if candidate.name not in suspects:
            match = ready.match(candidate)
            if match is not None:
                found.append(match)
    return found


def _ranked(found: Sequence[Match], suspects: Mapping[str, int]) -> tuple[FoundMatch, ...]:
    """By the number of cases explained, then by how many of this one's elements, then by nearness.

    Where those are equal to the bit the mistakes cannot be told apart.
    """

    def merit(match: Match) -> tuple[float, ...]:
        return (-suspects[match.candidate.name], -match.explained, round(match.nearness, 3))

    merits = sorted({merit(match) for match in found})
    # Of equals, what somebody may have done on purpose comes first.
    ordered = sorted(found, key=lambda match: (merit(match), match.candidate.kind == "fault"))
    return tuple(FoundMatch(match, merits.index(merit(match)) + 1) for match in ordered)
