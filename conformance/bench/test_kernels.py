"""The declared benchmarks as tests of pytest-benchmark, for its store and its comparisons.

    pytest --pyargs conformance.bench.test_kernels --conformance-bench my_port:Port --benchmark-autosave

The name of a test holds the device and the hash of the benchmark's declaration, so that pytest-benchmark compares
nothing else with it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from conformance.bench import devices, measure, run, store
from conformance.bench.declarations import Declaration
from conformance.bench.devices import Device
from conformance.bench.gate import Refused
from conformance.bench.inputs import Inputs, TooLarge
from conformance.bench.subjects import Subject
from conformance.bench.targets import open_subject
from conformance.bench.timers import device_time
from conformance.errors import ConformanceError
from conformance.interface import Unsupported

if importlib.util.find_spec("pytest_benchmark") is None:
    raise pytest.UsageError(f"{__name__} needs pytest-benchmark: pip install 'dsv41-conformance[bench]'")


@dataclass(frozen=True)
class Benchmark:
    """What one test measures."""

    declaration: Declaration
    target: str | None
    device: Device

    @property
    def id(self) -> str:
        """The test's parameter."""
        return store.name_of(self.declaration, self.device.slug)


@cache
def _subject(target: str, device: Device) -> Subject:
    return open_subject(target, device, agreed=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a declaration.

    Raises:
        pytest.UsageError: no such shapes.
    """
    option = metafunc.config.option
    try:
        device = devices.find(None)
        declared = run.declared(run.BenchOptions(shapes=option.conformance_bench_shapes), device.kind)
    except ConformanceError as error:
        raise pytest.UsageError(f"conformance: {error}") from error
    made = [Benchmark(declaration, option.conformance_bench_target, device) for declaration in declared]
    metafunc.parametrize("declared", made, ids=[benchmark.id for benchmark in made])


@pytest.mark.benchmark(timer=device_time)
def test_kernel(benchmark: Any, declared: Benchmark) -> None:
    """Judged before, timed, and judged again by what the timed calls returned."""
    target = declared.target or run.DEFAULT_TARGETS[declared.device.kind]
    try:
        subject = _subject(target, declared.device)
    except ConformanceError as error:
        pytest.fail(f"conformance: {error}", pytrace=False)
    problem = declared.declaration.problem()
    try:
        kernel = measure.Run(subject, problem, Inputs(problem, subject))
        kernel.check()
    except Unsupported as reason:
        pytest.skip(f"unsupported: {reason}")
    except TooLarge as reason:
        pytest.skip(str(reason))
    except Refused as reason:
        pytest.fail(f"its results are wrong: {reason}", pytrace=False)
    kernel.poison()
    benchmark.group = declared.declaration.kernel
    benchmark.extra_info.update(
        store.about(declared.declaration, declared.device.name, target, problem.counts),
        sets=kernel.sets,
        cold=kernel.inputs.cold(kernel.sets),
    )
    with subject.surroundings():
        benchmark(kernel.call)
    try:
        kernel.judge()
    except Refused as reason:
        pytest.fail(f"its results are wrong: {reason}", pytrace=False)
