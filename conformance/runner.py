"""Putting cases to an implementation and summing up what came back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from conformance.adapters.session import Answer, ByRank, Session, UnsupportedRequest
from conformance.cases.case import Case, Open, ReadState, Step
from conformance.deviations.stand_in import Reply, StandIn
from conformance.errors import ConformanceError, in_one_line
from conformance.judge import accumulators, deviations, fp4_codes
from conformance.judge.expectations import Expectation, Mode, Verdict
from conformance.judge.histogram import Histogram, combined
from conformance.judge.noise import allowing
from conformance.tensors import Tensor

if TYPE_CHECKING:
    from conformance.expectations import Entry
    from conformance.report.records import CaseRecord

Status = Literal[
    "PASS", "FAIL", "CRASH", "TIMEOUT", "PROTOCOL", "UNSUPPORTED", "BROKEN", "XFAIL", "XPASS", "QUARANTINE"
]
"""BROKEN is our fault: the suite raised, or a recorded value does not satisfy the case's own rule.

The last three come of expectations: failed as expected, passed although a failure was expected, not launched."""
FAILURES: tuple[Status, ...] = ("FAIL", "CRASH", "TIMEOUT", "PROTOCOL")
"""The statuses that say that the target failed: a wrong result, an exception or a dead process, no answer in time, an
answer that is none."""
UNWANTED: tuple[Status, ...] = (*FAILURES, "XPASS", "BROKEN")
"""The statuses that fail a run."""


@dataclass(frozen=True)
class Finding:
    """One verdict with the words for where it was made."""

    where: str
    verdict: Verdict
    layer: int | None = None
    """The layer of the model that the step belongs to, if to one."""


@dataclass(frozen=True)
class LayerSummary:
    """One tap in one layer over all steps of a case."""

    layer: int
    passed: bool
    ratio: float


@dataclass(frozen=True)
class TapSummary:
    """One tap over all steps of a case."""

    tap: str
    mode: Mode
    judged: int
    wrong: int
    ratio: float
    bias: float | None
    worst: Finding
    note: str
    median_distance: float = 0.0
    """Mode `propagated`: median over all positions of the case."""
    scale: float = 0.0
    """Mode `propagated`: largest |log2| of a norm over the recorded one."""
    layers: tuple[LayerSummary, ...] = ()
    """By layer, where steps belong to layers; ascending."""
    histogram: Histogram = field(default_factory=dict)
    """Elements by error over bound, where each has a bound of its own."""


@dataclass(frozen=True)
class CaseResult:
    """What became of a case."""

    case: Case
    status: Status
    seconds: float
    taps: tuple[TapSummary, ...] = ()
    first_failure: Finding | None = None
    message: str = ""
    reached: str = ""
    """Where the conversation ended, if it ended early."""
    deviations: tuple[str, ...] = ()
    """Declared deviations that the case was judged with."""
    expectation: Entry | None = None
    """What was expected of the case, where anything was."""

    @property
    def ratio(self) -> float:
        """Worst error over bound in the case."""
        return max((tap.ratio for tap in self.taps), default=0.0)

    @property
    def judged(self) -> int:
        """Number of elements (or queries, for choices) that were judged."""
        return sum(tap.judged for tap in self.taps)


class _Tally:
    """Collects verdicts by tap in the order in which taps first appeared."""

    def __init__(self) -> None:
        self.taps: dict[str, TapSummary] = {}
        self.first_failure: Finding | None = None
        self._layers: dict[str, dict[int, LayerSummary]] = {}
        self._distances: dict[str, list[float]] = {}
        self._allowances: dict[str, float] = {}

    def add(self, finding: Finding) -> None:
        verdict = finding.verdict
        if verdict.distances:
            self._distances.setdefault(verdict.tap, []).extend(verdict.distances)
            self._allowances[verdict.tap] = verdict.median_allowance
        if not verdict.passed and self.first_failure is None:
            self.first_failure = finding
        if finding.layer is not None:
            self._add_to_layer(finding.layer, verdict)
        known = self.taps.get(verdict.tap)
        if known is None:
            self.taps[verdict.tap] = TapSummary(
                verdict.tap,
                verdict.mode,
                verdict.count,
                verdict.wrong,
                verdict.ratio,
                verdict.bias,
                finding,
                verdict.note,
                scale=verdict.scale,
                histogram=verdict.histogram,
            )
            return
        worse = (not verdict.passed and known.worst.verdict.passed) or verdict.ratio > known.ratio
        biases = [bias for bias in (known.bias, verdict.bias) if bias is not None]
        self.taps[verdict.tap] = replace(
            known,
            judged=known.judged + verdict.count,
            wrong=known.wrong + verdict.wrong,
            ratio=max(known.ratio, verdict.ratio),
            scale=max(known.scale, verdict.scale),
            bias=max(biases, key=abs) if biases else None,
            worst=finding if worse else known.worst,
            histogram=combined(known.histogram, verdict.histogram),
        )

    def _add_to_layer(self, layer: int, verdict: Verdict) -> None:
        layers = self._layers.setdefault(verdict.tap, {})
        known = layers.get(layer, LayerSummary(layer, True, 0.0))
        layers[layer] = LayerSummary(layer, known.passed and verdict.passed, max(known.ratio, verdict.ratio))

    def summaries(self) -> tuple[TapSummary, ...]:
        """Every tap, with what it was in each layer."""
        return tuple(
            replace(summary, layers=tuple(layers[layer] for layer in sorted(layers)))
            if (layers := self._layers.get(tap))
            else summary
            for tap, summary in self.taps.items()
        )

    def close(self) -> None:
        """Judge what only the whole case shows: the median distance of `propagated` taps."""
        for tap, distances in self._distances.items():
            median, allowance = float(np.median(distances)), self._allowances[tap]
            self.taps[tap] = replace(self.taps[tap], median_distance=median)
            if median > allowance:
                message = (
                    f"half of {len(distances)} positions are farther than {median:.3g}, noise reaches {allowance:.3g}"
                )
                verdict = Verdict(tap, "propagated", False, ratio=median / allowance, message=message)
                self.add(Finding("over the whole case", verdict))


class _BrokenCase(Exception):
    """A recorded value does not satisfy the rule that is about to judge others by it."""


def run_case(case: Case, session: Session) -> CaseResult:
    """Run one case from a fresh start; once more where only noise floors of another model are in its way.

    Raises:
        ConformanceError: a fixture is damaged.  Everything else ends in the result.
    """
    result = run_once(case, session)
    if result.status != "FAIL" or not result.deviations or not _only_beyond_noise(result):
        return result
    from conformance.deviations import own_noise

    if not own_noise.is_own(case, result.deviations):
        return result
    try:
        instead = own_noise.measured(case, session.describe().deviations)
    except ConformanceError as error:
        return replace(result, status="BROKEN", message=str(error))
    with allowing(instead):
        return run_once(case, session)


def _only_beyond_noise(result: CaseResult) -> bool:
    """Whether all that is wrong are finite distances from a recording."""
    wrong = [tap for tap in result.taps if tap.wrong or not tap.worst.verdict.passed]
    return not result.message and all(tap.mode == "propagated" and np.isfinite(tap.ratio) for tap in wrong)


def run_once(case: Case, session: Session) -> CaseResult:
    """Run one case from a fresh start, by the rules as they are.

    Raises:
        ConformanceError: a fixture is damaged.  Everything else ends in the result.
    """
    start = time.perf_counter()
    session.reset()
    description = session.describe()
    stand_in = StandIn(tuple(description.deviations))
    tally = _Tally()
    status: Status = "PASS"
    message, reached = "", ""
    step: Step | None = None
    try:
        with (
            accumulators.judging(description.accumulator),
            deviations.judging(description.deviations),
            fp4_codes.judging(description.conventions),
        ):
            for step in case.steps():
                _run_step(step, session, stand_in, tally)
        session.finish()
        tally.close()
    except UnsupportedRequest as answer:
        status, message = "UNSUPPORTED", str(answer)
    except Answer as answer:
        status = next((failure for failure in FAILURES if failure == answer.status), "FAIL")
        message, reached = str(answer), _reached(step)
    except ConformanceError:
        raise
    except _BrokenCase as problem:
        status, message, reached = "BROKEN", str(problem), _reached(step)
    except Exception as error:
        status = "BROKEN"
        message, reached = f"the suite raised {in_one_line(error)}", _reached(step)
    if status in ("PASS", "UNSUPPORTED") and tally.first_failure is not None:
        # What was wrong before a step that the port does not have was wrong all the same.
        status = "FAIL"
    if status == "PASS" and not tally.taps:
        status, message = "BROKEN", "the case judged nothing"
    return CaseResult(
        case,
        status,
        time.perf_counter() - start,
        tally.summaries(),
        tally.first_failure,
        message,
        reached,
        stand_in.touched,
    )


def _reached(step: Step | None) -> str:
    return "" if step is None else step.place.describe((), ())


def _run_step(step: Step, session: Session, stand_in: StandIn, tally: _Tally) -> None:
    try:
        results = session.ask(step.request)
    except UnsupportedRequest:
        # An implementation that cannot show its state is still judged by its results.
        if isinstance(step.request, ReadState) and tally.taps:
            return
        raise
    reply = stand_in.reply(step.request)
    if isinstance(step.request, Open):
        return
    _judge_step(step, reply, results, tally)
    for rank, of_rank in results.others.items() if isinstance(results, ByRank) else ():
        _judge_step(step, reply, of_rank, tally, f"rank {rank}, ")


def _judge_step(step: Step, reply: Reply, results: Mapping[str, Tensor], tally: _Tally, rank: str = "") -> None:
    for expectation in map(reply.in_place_of_recordings, step.rules()):
        missing = [tap for tap in expectation.taps if tap not in results]
        if missing:
            returned = ", ".join(results) or "nothing"
            message = f"the result is missing; returned: {returned}"
            verdict = Verdict(missing[0], expectation.mode, False, ratio=np.inf, message=message)
        else:
            verdict = _judge(expectation, step, results)
        tally.add(Finding(rank + step.place.describe(verdict.axes, verdict.index), verdict, step.place.layer))
    for expectation in map(reply.in_place_of_recordings, step.optional()):
        if all(tap in results for tap in expectation.taps):
            verdict = _judge(expectation, step, results)
            tally.add(Finding(rank + step.place.describe(verdict.axes, verdict.index), verdict, step.place.layer))


def _judge(expectation: Expectation, step: Step, results: Mapping[str, Tensor]) -> Verdict:
    """The verdict on results, by a rule that the recorded values themselves satisfy."""
    golden = expectation.golden
    if golden:
        verdict = _checked_golden(expectation, step)
        # Whoever returns what was recorded, as many do, is not judged twice.
        if all(tap in golden and results[tap].equal_bits(golden[tap]) for tap in expectation.taps):
            return verdict
    return expectation.judge(results)


def _checked_golden(expectation: Expectation, step: Step) -> Verdict:
    verdict = expectation.judge(expectation.golden)
    if not verdict.passed:
        where = step.place.describe(verdict.axes, verdict.index)
        raise _BrokenCase(
            f"the recorded {verdict.tap} does not satisfy the rule at {where}: {verdict.message} "
            f"(recorded {verdict.actual}, computed {verdict.expected}, bound {verdict.bound})"
        )
    return verdict


def exit_code(results: Sequence[CaseResult | CaseRecord]) -> int:
    """0 when every case that is supported passed, or failed as expected; 1 otherwise, and when nothing was judged."""
    failed = any(result.status in UNWANTED for result in results)
    nothing = not any(result.status in ("PASS", "XFAIL") for result in results)
    return 1 if failed or nothing else 0
