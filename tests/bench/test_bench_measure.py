"""How times are taken: sets of inputs by turns, results overwritten, graphs replayed where they can be recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bench_ports
import numpy as np
import pytest
import torch
from bench_problems import SMALL, problem_of

from conformance.adapters.in_process import to_torch
from conformance.bench import inputs, measure, timers
from conformance.bench.declarations import Declaration
from conformance.bench.devices import Device
from conformance.bench.gate import Refused
from conformance.bench.inputs import Inputs
from conformance.bench.measure import Run
from conformance.bench.problem import Problem
from conformance.bench.subjects import Subject
from conformance.interface import Implementation

TINY = Declaration("rms_norm", "tiny", "small", {"tokens": 8, "width": 64})
GPU = Device("cuda", "a GPU", 1 << 10)


def subject_of(implementation: Implementation, cache: int = 1 << 12) -> Subject:
    device = Device("cpu", "a device", cache)
    return Subject("port", implementation, implementation.describe(), device)


def run_of(implementation: Implementation, problem: Problem | None = None) -> Run:
    made = TINY.problem() if problem is None else problem
    subject = subject_of(implementation)
    return Run(subject, made, Inputs(made, subject))


@pytest.mark.parametrize("name", [declared.id for declared in SMALL])
def test_calls_differ_and_use_the_whole_pool(name: str) -> None:
    problem = problem_of(name)
    first, second = problem.which(0), problem.which(1)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, problem.which(0))
    assert set(np.concatenate([first, second]).tolist()) >= set(range(min(problem.pool, len(first))))


@pytest.mark.parametrize(("cache", "sets", "cold"), [(1, 2, True), (1 << 11, 4, True), (1 << 30, 16, False)])
def test_as_many_sets_as_no_cache_holds(cache: int, sets: int, cold: bool) -> None:
    problem = TINY.problem()
    found = Inputs(problem, subject_of(bench_ports.Right(), cache))
    assert (len(found.sets), found.cold(len(found.sets))) == (sets, cold)
    assert len({given["x"].data_ptr() for given in found.sets}) == sets


def test_a_changed_input_is_named() -> None:
    found = Inputs(TINY.problem(), subject_of(bench_ports.Right()))
    assert found.changed() == ""
    found.sets[1]["x"].view(torch.uint8)[-1, -1] ^= 1
    assert found.changed() == "x"


def test_changed_weights_are_named() -> None:
    problem = problem_of("gate/small")
    found = Inputs(problem, subject_of(bench_ports.Right(), 1))
    found.sets[1]["weights"]["bias"][0] += 1
    assert found.changed() == "weights[bias]"


def test_slow_calls_are_timed_on_fewer_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    run = run_of(bench_ports.Slow())
    before = run.sets
    run.check()
    assert before > run.sets == inputs.FEWEST
    measure.take_samples([run], timers.on_cpu)
    assert len(run.samples) == measure.FEWEST_SAMPLES
    assert min(run.samples) > 0.02
    run.judge()


def test_samples_are_taken_by_turns() -> None:
    order: list[str] = []

    class Noting(bench_ports.Right):
        def __init__(self, name: str) -> None:
            self.name = name

        def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
            order.append(self.name)
            return super().rms_norm(x, weight, eps)

    runs = [run_of(Noting("a")), run_of(Noting("b"))]
    for run in runs:
        run.check()
        run.warm_up(lambda work: (work(), 1.0)[1])
    order.clear()
    for _ in range(3):
        for run in runs:
            run.sample(timers.on_cpu)
    assert "".join(order) == "ababab"


def test_results_are_overwritten_before_each_sample() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(bench_ports.Right):
        def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
            kept.append(super().rms_norm(x, weight, eps))
            return kept[-1]

    run = run_of(Keeping())
    run.check()
    run.sample(timers.on_cpu)
    assert all(bool(result.isnan().all()) for result in kept[: run.sets])
    assert not kept[-1].isnan().any()


class Graph:
    """Stands in for torch's: what is recorded is called again."""

    works = True
    recorded: Callable[[], None] = staticmethod(lambda: None)

    def replay(self) -> None:
        if self.works:
            type(self).recorded()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Implementation], Run]:
    """A run as on a GPU, whose tensors lie in this machine's memory."""
    monkeypatch.setattr(Subject, "convert", lambda self, tensor: to_torch(tensor))
    monkeypatch.setattr(Device, "free_bytes", lambda self: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make(implementation: Implementation) -> Run:
        problem = TINY.problem()
        subject = Subject("port", implementation, implementation.describe(), GPU)
        run = Run(subject, problem, Inputs(problem, subject))

        def again() -> None:
            """What a replay does: the recorded memory is written again, by the same calls."""
            for number, returned in enumerate(run._returned):
                if returned is not measure.NOT_CALLED:
                    returned.copy_(run._calls[number]())

        monkeypatch.setattr(Graph, "recorded", staticmethod(again))
        run.check()
        return run

    return make


def quickly(work: Callable[[], None]) -> float:
    """A timer of a device on which everything is quick."""
    work()
    return 1e-5


def test_short_calls_are_replayed_from_a_graph(on_gpu: Callable[[Implementation], Run]) -> None:
    run = on_gpu(bench_ports.Right())
    measure.take_samples([run], quickly, 3)
    assert run.how == "graph"
    assert len(run.samples) == 3
    run.judge()


def test_a_replay_that_computes_nothing_is_refused(
    on_gpu: Callable[[Implementation], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "works", False)
    run = on_gpu(bench_ports.Right())
    measure.take_samples([run], quickly, 3)
    with pytest.raises(Refused):
        run.judge()


def test_who_cannot_be_recorded_is_timed_by_events(
    on_gpu: Callable[[Implementation], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(graph: Graph) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    run = on_gpu(bench_ports.Right())
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    measure.take_samples([run], quickly, 3)
    assert run.how == "events"
    run.judge()


def test_long_calls_are_not_recorded(on_gpu: Callable[[Implementation], Run]) -> None:
    run = on_gpu(bench_ports.Right())
    measure.take_samples([run], lambda work: (work(), 1.0)[1], 3)
    assert run.how == "events"


def test_device_time_adds_up_differences_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            Event.now += 2.0
            self.at = Event.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = timers._DeviceTime()
    assert [clock(), clock(), clock()] == pytest.approx([0.0, 2e-3, 4e-3])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = time.perf_counter()
    assert timers.device_time() >= before
