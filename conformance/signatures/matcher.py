"""Trying all mistakes on all failed cases, for a bounded time.

Cheap cases come first: hand-made inputs that reveal one mistake say more than a whole model, and cost less.  What has
explained one case is tried first on the next, so that sixty failures of one mistake cost little more than one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.adapters.session import Answer, Session
from conformance.cases.case import LEVELS, Case
from conformance.faults.deviations import SYNONYMS
from conformance.signatures.candidates import Candidate, candidates, could_matter, in_order
from conformance.signatures.failed_case import FailedCase, Match, OutOfTime

FEW = 8
"""Elements that may agree by chance, besides all that are next to the expected number: there small mistakes meet."""


@dataclass(frozen=True)
class FoundMatch:
    """A mistake that explains a case, beside the others that do."""

    match: Match
    rank: int
    """1 for the best; several may be equal."""


class Matcher:
    """Looks at failed cases, one after another, until its time is spent."""

    def __init__(self, session: Session, seconds: float, among: Sequence[Candidate] | None = None) -> None:
        """`session` is the port's; `among`: instead of everything there is to try."""
        self._session = session
        self._known = candidates(session.describe().deviations) if among is None else among
        self._reference = InProcess(Reference())
        self._left = seconds
        self.suspects: Counter[str] = Counter()
        """How many cases each mistake has explained."""
        self._refuted: set[tuple[str, str]] = set()
        """Components and mistakes that were tried on a failed case of theirs in vain."""

    @property
    def spent(self) -> bool:
        """Whether no time is left."""
        return self._left <= 0

    def look(self, case: Case, took: float, most: float = math.inf) -> list[Match]:
        """What explains a failed case that took so many seconds to judge; `most`: seconds for this one.

        A case is asked and judged again before anything is tried: one that takes longer than there is time is left out.
        """
        start = time.perf_counter()
        seconds = min(self._left, most)
        if took >= seconds:
            return []
        found: list[Match] = []
        with suppress(Answer, ValueError, OutOfTime):
            self._collect(found, FailedCase(case, self._session, self._reference, start + seconds))
        self._left -= time.perf_counter() - start
        self.suspects.update(match.candidate.name for match in found)
        return found

    def _collect(self, found: list[Match], ready: FailedCase) -> None:
        """Add what explains a case: the suspects, and if none of them does, anything else.

        Raises:
            OutOfTime: what was found until then is there.
        """
        relevant = [
            candidate for candidate in in_order(ready.case, self._known) if could_matter(candidate, ready.called)
        ]
        for suspected in (True, False):
            for candidate in relevant:
                if (candidate.name in self.suspects) is suspected:
                    match = ready.match(candidate)
                    if match is None:
                        self._refuted.add((ready.case.component, candidate.name))
                    else:
                        found.append(match)
            if found:
                return

    def ranked(self, case: Case, found: Sequence[Match]) -> tuple[FoundMatch, ...]:
        """The matches that hold, in order.

        Elements may agree by chance: what explains no more is left out if it does not explain another failed case of
        the component.  So is a mistake that is what a deviation does, where the deviation is as good.

        By the number of cases explained, then by how many of this one's elements, then by nearness.

        Where those are equal to the bit the mistakes cannot be told apart.
        """

        def merit(match: Match) -> tuple[float, ...]:
            return (-self.suspects[match.candidate.name], -match.explained, round(match.nearness, 3))

        found = [match for match in found if not self._by_chance(case, match)]
        best = {match.candidate.name: merit(match)[1:] for match in found if match.candidate.kind == "deviation"}
        told = {fault: best[name] for name in best for fault in SYNONYMS.get(name, ())}
        left = [match for match in found if told.get(match.candidate.name, (math.inf,)) > merit(match)[1:]]
        merits = sorted({merit(match) for match in left})
        # Of equals, what somebody may have done on purpose comes first.
        ordered = sorted(left, key=lambda match: (merit(match), match.candidate.kind == "fault"))
        return tuple(FoundMatch(match, merits.index(merit(match)) + 1) for match in ordered)

    def _by_chance(self, case: Case, match: Match) -> bool:
        few = match.explained - match.next_to < FEW and case.mode != "propagated"
        return few and (case.component, match.candidate.name) in self._refuted


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
    matcher = Matcher(session, seconds, among)
    matches: dict[str, list[Match]] = {}
    for case, took in sorted(failed, key=_cost):
        if matcher.spent:
            break
        progress(case.id)
        found = matcher.look(case, took)
        if found:
            matches[case.id] = found
    ranked = {case.id: matcher.ranked(case, matches[case.id]) for case, _ in failed if case.id in matches}
    return {case_id: found for case_id, found in ranked.items() if found}


def _cost(failed: tuple[Case, float]) -> tuple[bool, int, float]:
    case, seconds = failed
    return case.source not in ("hand-made", "lattice"), LEVELS.index(case.level), seconds
