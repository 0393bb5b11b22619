"""Taking times: warm-up, the number of calls in a sample, and samples of several subjects by turns.

A sample is the time of several calls in a row over their number, each call with the next set of inputs.  On a GPU the
time is between two device events; calls too short for that are recorded as a graph and replayed, so that the time
does not contain their launch from Python.  On a CPU it is `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.bench import gate
from conformance.bench.gate import Refused
from conformance.bench.inputs import FEWEST, Inputs
from conformance.bench.problem import Problem
from conformance.bench.subjects import Subject
from conformance.bench.timers import Timer
from conformance.errors import in_one_line
from conformance.interface import Unsupported

SAMPLES, FEWEST_SAMPLES = 30, 5
SECONDS = 4.0
"""Samples of one subject are ended after this time, once there are the fewest."""
SAMPLE_SECONDS = {"cpu": 0.01, "cuda": 0.001}
"""A sample is to take so long; a single call may take longer."""
MOST_CALLS = 512
GRAPHED_BELOW = 200e-6
"""A call that takes less on a GPU is replayed from a graph."""
NOT_CALLED: Any = object()
"""In place of a result: None is something that a port may return."""


class Run:
    """One subject at one problem: its next call, what its last calls returned, and their samples.

    Attributes:
        samples: seconds a call.
        failed: why a timed call has no time.
        how: what the time is of.
    """

    def __init__(self, subject: Subject, problem: Problem, inputs: Inputs) -> None:
        self.subject, self.problem, self.inputs = subject, problem, inputs
        subject.afresh()
        self._calls = [problem.bind(subject.implementation, given) for given in inputs.sets]
        self._returned: list[Any] = [NOT_CALLED] * len(self._calls)
        self._next = 0
        self._calls_a_sample = 1
        self._replay: Callable[[], None] | None = None
        self.samples: list[float] = []
        self.failed: Refused | None = None
        self.how = "events" if subject.device.kind == "cuda" else "perf_counter"

    def call(self) -> None:
        """The next call."""
        number = self._next
        self._returned[number] = self._calls[number]()
        self._next = number + 1 if number + 1 < len(self._calls) else 0

    def check(self) -> None:
        """Call once with every set, and judge what comes back.

        Raises:
            Refused: it is wrong, or the call raised.
            Unsupported: the subject does not have it.
        """
        start = time.perf_counter()
        with self.subject.surroundings():
            for done in range(len(self._calls)):
                if done >= FEWEST and time.perf_counter() - start > SECONDS:
                    # Slow calls are timed on fewer sets, rather than not at all.
                    self._calls, self._returned = self._calls[:done], self._returned[:done]
                    break
                self._guarded(self.call)
        self._next = 0
        for number, returned in enumerate(self._returned):
            if gate.aliased(returned, self.inputs.handed_over(number)):
                raise Refused("a result lies in the memory of an input")
        self._judge_results()

    def judge(self) -> None:
        """Judge what the last calls returned, and what became of their inputs.

        Raises:
            Refused: something is wrong with it, a timed call raised, or an input was modified.
        """
        if self.failed is not None:
            raise self.failed
        name = self.inputs.changed()
        if name:
            raise Refused(f"the input {name} was modified in place")
        self._judge_results()

    def _judge_results(self) -> None:
        for number, returned in enumerate(self._returned):
            if returned is not NOT_CALLED:
                gate.judge(self.problem, self.subject.description, number, returned)

    def warm_up(self, timer: Timer) -> None:
        """Find how many calls make a sample.

        Raises:
            Refused: a call raised.
        """
        wanted = SAMPLE_SECONDS[self.subject.device.kind]
        took = self._timed(timer, len(self._calls))
        took = min(took, self._timed(timer, len(self._calls)))
        self._calls_a_sample = max(1, min(MOST_CALLS, int(wanted / max(took, 1e-9))))

    @property
    def sets(self) -> int:
        """How many sets of inputs calls take by turns."""
        return len(self._calls)

    @property
    def calls(self) -> int:
        """Calls of a sample."""
        return self._calls_a_sample

    @property
    def short(self) -> bool:
        """Whether a call is shorter than what launches it may take."""
        return SAMPLE_SECONDS[self.subject.device.kind] / self._calls_a_sample < GRAPHED_BELOW

    def record(self) -> None:
        """Record a sample's calls as a graph, where the subject can be."""
        graph = torch.cuda.CUDAGraph()
        self._next, self._returned = 0, [NOT_CALLED] * len(self._calls)
        try:
            with torch.cuda.graph(graph):
                for _ in range(self._calls_a_sample):
                    self.call()
        except Exception:
            # A port that asks the device for a number, say: its calls are timed from Python.
            torch.cuda.synchronize()
            self._returned = [NOT_CALLED] * len(self._calls)
            return
        self._replay, self.how = graph.replay, "graph"

    def poison(self) -> None:
        """Overwrite what was returned, and forget it unless a graph writes it again."""
        for returned in self._returned:
            if returned is not NOT_CALLED:
                gate.poison(returned)
        if self._replay is None:
            self._returned = [NOT_CALLED] * len(self._calls)

    def sample(self, timer: Timer) -> None:
        """Overwrite what was returned, and take one sample."""
        self.poison()
        if self._replay is not None:
            self.samples.append(timer(self._replay) / self._calls_a_sample)
            return
        self.samples.append(self._timed(timer, self._calls_a_sample))

    def _timed(self, timer: Timer, calls: int) -> float:
        def work() -> None:
            for _ in range(calls):
                self.call()

        with self.subject.surroundings():
            try:
                return float(self._guarded(lambda: timer(work))) / calls
            except Unsupported as reason:
                raise Refused(f"unsupported only once it was timed: {in_one_line(reason)}") from reason

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (Unsupported, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise Refused(f"the call raised {in_one_line(error)}") from error


def take_samples(runs: Sequence[Run], timer: Timer, samples: int = SAMPLES) -> None:
    """Samples of all by turns, so that what changes on the machine changes for all; each was checked before.

    One whose call raises is left out from then on, which `Run.judge` tells: the others are measured all the same.
    """
    left = list(runs)

    def each(step: Callable[[Run], None]) -> None:
        for run in list(left):
            try:
                step(run)
            except Refused as reason:
                run.failed = reason
                left.remove(run)

    def prepare(run: Run) -> None:
        run.warm_up(timer)
        if run.subject.device.kind == "cuda" and run.short:
            run.record()

    each(prepare)
    start = time.perf_counter()
    for taken in range(samples):
        if taken >= FEWEST_SAMPLES and time.perf_counter() - start > SECONDS * len(left):
            break
        each(lambda run: run.sample(timer))
