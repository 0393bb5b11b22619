"""One failed case, made ready to be compared with many mistakes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.adapters.in_process import InProcess
from conformance.adapters.session import Answer, Session
from conformance.cases.case import Case, Open, ReadState, Request, Step
from conformance.deviations.stand_in import StandIn
from conformance.faults.patches import ChangesNothing, patched
from conformance.interface import Description
from conformance.judge import accumulators, deviations, fp4_codes
from conformance.signatures.candidates import Candidate, changes_of, functions_called
from conformance.signatures.evidence import Counts, Evidence, evidence
from conformance.tensors import Tensor

TOLERATED = 0.02
"""Share of the wrong elements that a mistake may leave unexplained, or be contradicted by.

A port that makes the mistake and adds in another order may land on the other side of a rounding now and then.
"""

NEAR, NEAR_PROPAGATED = 2.0**-4, 2.0**-2
"""Largest mean distance of explained elements to the faulty values, over their distance to the expected ones.

Of single elements the planted mistakes of the suite's own tests stay below 0.01; whole tensors behind several layers
carry noise of their own.
"""

LARGEST_CASE = 1 << 22
"""Elements of results beyond which a case is not looked at: its tensors are held in float64, several at a time."""


@dataclass(frozen=True)
class Match:
    """A candidate whose values are the port's in this case."""

    candidate: Candidate
    explained: int
    """Wrong elements (queries of a choice, whole tensors of propagated results) that it gives the values of."""
    wrong: int
    next_to: int
    """Those of the explained elements that are numbers next to the expected ones."""
    nearness: float
    """0 for equal bits: mean distance to the faulty values over the distance to the expected ones."""


class OutOfTime(Exception):
    """The time for a case is over."""


class FailedCase:
    """The questions of a case, what the port answers to them, and which elements are wrong.

    `end` is when the time for the case is over, as `time.perf_counter` counts: looked at before every question.

    Raises:
        Answer: the port does not answer again as far as its failure.
        ValueError: nothing in the case is wrong that could be compared.
        OutOfTime: there was none left to find out.
    """

    def __init__(self, case: Case, port: Session, reference: InProcess, end: float) -> None:
        description = port.describe()
        self.case = case
        self._end = end
        self._reference = reference
        self._requests: list[Request] = []
        self._evidence: list[list[Evidence]] = []
        plain: list[Mapping[str, Tensor]] = []
        steps: list[Step] = []
        answers: list[Mapping[str, Tensor]] = []
        port.reset()
        for step in case.steps():
            self._check_time()
            try:
                answers.append(port.ask(step.request))
            except Answer:
                if isinstance(step.request, ReadState) and answers:
                    answers.append({})
                elif answers:
                    break
                else:
                    raise
            steps.append(step)
        if sum(tensor.data.size for answer in answers for tensor in answer.values()) > LARGEST_CASE:
            raise ValueError("too large")
        self._requests = [step.request for step in steps]
        base = changes_of(description.deviations)
        # Tables that were computed before would hide the functions that compute them.
        with patched(base), functions_called() as called:
            plain = self._ask_all()
        self.called = frozenset(called)
        self._find_wrong(description, steps, answers, plain)

    def _find_wrong(
        self,
        description: Description,
        steps: Sequence[Step],
        answers: Sequence[Mapping[str, Tensor]],
        plain: Sequence[Mapping[str, Tensor]],
    ) -> None:
        stand_in = StandIn(tuple(description.deviations))
        with (
            accumulators.judging(description.accumulator),
            deviations.judging(description.deviations),
            fp4_codes.judging(description.conventions),
        ):
            for step, answer, reference in zip(steps, answers, plain, strict=True):
                self._check_time()
                reply = stand_in.reply(step.request)
                found: list[Evidence] = []
                # A state that cannot be read is not judged, nor are optional results that did not come.
                if not isinstance(step.request, Open) and not (isinstance(step.request, ReadState) and not answer):
                    shown = [rule for rule in step.optional() if all(tap in answer for tap in rule.taps)]
                    rules = map(reply.in_place_of_recordings, (*step.rules(), *shown))
                    found = [seen for rule in rules if (seen := evidence(rule, answer, reference)) is not None]
                self._evidence.append(found)
        self.wrong = sum(seen.wrong for found in self._evidence for seen in found)
        if not self.wrong:
            for found in self._evidence:
                for seen in found:
                    seen.look_closer()
            self.wrong = sum(seen.wrong for found in self._evidence for seen in found)
        if not self.wrong:
            raise ValueError("no wrong value")
        unchanged = Counts()
        for found, reference in zip(self._evidence, plain, strict=True):
            for seen in found:
                unchanged += seen.compare(reference)
        if unchanged.unexplained <= TOLERATED * self.wrong:
            raise ValueError("the reference without any mistake has these values")

    def _check_time(self) -> None:
        if time.perf_counter() > self._end:
            raise OutOfTime

    def _ask_all(self) -> list[Mapping[str, Tensor]]:
        self._reference.reset()
        answers = []
        for request in self._requests:
            self._check_time()
            answers.append(self._reference.ask(request))
        return answers

    def match(self, candidate: Candidate) -> Match | None:
        """Whether the port's answers are those of a reference that makes this mistake.

        Ends with the first answer that rules the mistake out.

        Raises:
            OutOfTime: before the last answer.
        """
        total = Counts()
        self._reference.reset()
        limit = TOLERATED * self.wrong
        try:
            with patched(candidate.changes):
                for request, step in zip(self._requests, self._evidence, strict=True):
                    self._check_time()
                    answer = self._reference.ask(request)
                    for seen in step:
                        total += seen.compare(answer)
                    if total.unexplained > limit or total.contradicted > limit:
                        return None
        except (Answer, ChangesNothing):
            return None
        near = NEAR_PROPAGATED if self.case.mode == "propagated" else NEAR
        if not total.explained or total.nearness > near * total.explained:
            return None
        nearness = total.nearness / total.explained
        return Match(candidate, round(total.explained), round(self.wrong), round(total.next_to), nearness)
