"""A case made ready to be put to many implementations: its steps and rules are computed once and kept.

Asking and judging are separate here, so that an answer that no fault has touched is not judged again, and so that
recorded answers can be judged after something was done to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.adapters.session import Answer, Session
from conformance.cases.case import Advance, Call, Case, Open, ReadState, Request, Step
from conformance.errors import ConformanceError
from conformance.interface import METHODS, Description
from conformance.judge.expectations import Expectation, Mode, Verdict
from conformance.runner import CaseResult, run_case
from conformance.tensors import Tensor

Results = Mapping[str, Tensor]
Given = Results | Answer
"""What came back for one request."""


class Replay:
    """A session that gives recorded answers in the order in which they were recorded."""

    def __init__(self, description: Description, answers: Sequence[Given]) -> None:
        self._description = description
        self._answers = iter(answers)

    def describe(self) -> Description:
        """The description of the implementation that was recorded."""
        return self._description

    def supports(self, method: str) -> bool:
        """Everything that was recorded."""
        return method in METHODS

    def ask(self, request: Request) -> Results:
        """The next answer, whatever the request; an answer that was an exception is raised."""
        given = next(self._answers)
        if isinstance(given, Answer):
            raise given
        return given

    def reset(self) -> None:
        """Answers are played once."""

    def finish(self) -> None:
        """What the end of a case showed was recorded as its last answer."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class _Watch:
    """Whether a verdict of the current run failed, and whether recorded values have been held against their rules."""

    failed: bool = False
    recorded_hold: bool = False


class _Kept:
    """An expectation that reports failures to the watch, and whose recorded values are judged in the first run only."""

    def __init__(self, inner: Expectation, watch: _Watch) -> None:
        self._inner, self._watch = inner, watch
        self.taps = inner.taps
        self.mode: Mode = inner.mode

    @property
    def golden(self) -> Results:
        return {} if self._watch.recorded_hold else self._inner.golden

    def judge(self, results: Results) -> Verdict:
        verdict = self._inner.judge(results)
        self._watch.failed |= not verdict.passed
        return verdict


class _Rules:
    """Rules computed at the first call and kept."""

    def __init__(self, compute: Callable[[], Sequence[Expectation]], watch: _Watch) -> None:
        self._compute, self._watch = compute, watch
        self._kept: Sequence[Expectation] | None = None

    def __call__(self) -> Sequence[Expectation]:
        if self._kept is None:
            self._kept = [_Kept(expectation, self._watch) for expectation in self._compute()]
        return self._kept


class PreparedCase:
    """A case with its steps, and what the plain reference answers to them."""

    def __init__(self, case: Case, reference: Session) -> None:
        """Run the case once; `baseline` is the verdict on the plain reference.

        Raises:
            ConformanceError: the reference does not pass: nothing can be learnt from the case.
        """
        start = time.perf_counter()
        self.case = case
        self._description = reference.describe()
        self._watch = _Watch()
        self._steps = [
            replace(step, rules=_Rules(step.rules, self._watch), optional=_Rules(step.optional, self._watch))
            for step in case.steps()
        ]
        self.answers = self.ask(reference)
        self.baseline = self.judge(self.answers, to_the_end=True)
        if self.baseline.status != "PASS":
            failure = self.baseline.first_failure
            reason = self.baseline.message or (failure.verdict.message if failure else "")
            raise ConformanceError(f"the reference does not pass {case.id}: {self.baseline.status} {reason}")
        self._watch.recorded_hold = True
        self.seconds = time.perf_counter() - start
        """What the case cost the plain reference."""

    def ask(self, session: Session) -> tuple[Given, ...]:
        """Put all requests from a fresh start; ends with the first that has no results."""
        session.reset()
        answers: list[Given] = []
        for step in self._steps:
            try:
                answers.append(session.ask(step.request))
            except Answer as answer:
                return (*answers, answer)
        return tuple(answers)

    def judge(self, answers: Sequence[Given], to_the_end: bool = False) -> CaseResult:
        """The verdict on recorded answers; ends with the first step that fails unless asked to go on."""
        self._watch.failed = False
        case = replace(self.case, steps=lambda: self._until_failure(to_the_end))
        return run_case(case, Replay(self._description, answers))

    def _until_failure(self, to_the_end: bool) -> Iterator[Step]:
        for step in self._steps:
            yield step
            if self._watch.failed and not to_the_end:
                return

    def requested(self) -> list[tuple[str, tuple[str, ...]]]:
        """For each request, the object or method it goes to and the results that are required of it."""
        opened: dict[str, str] = {}
        found: list[tuple[str, tuple[str, ...]]] = []
        for step in self._steps:
            request = step.request
            if isinstance(request, Open):
                opened[request.name] = request.method
                found.append((request.name, ()))
            elif isinstance(request, Call):
                found.append((request.method, METHODS[request.method].results))
            elif isinstance(request, Advance):
                found.append((f"step of {request.name}", METHODS[opened[request.name]].results))
            elif isinstance(request, ReadState):
                found.append((f"state of {request.name}", ()))
        return found


def same(a: Sequence[Given], b: Sequence[Given]) -> bool:
    """Whether two conversations gave bit-equal results."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: Given, b: Given) -> bool:
    if isinstance(a, Answer) or isinstance(b, Answer):
        return False
    return a.keys() == b.keys() and all(a[name].equal_bits(b[name]) for name in a)
