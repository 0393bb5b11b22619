"""Ports that misbehave in ways a number cannot show: each is a failed case, and the next case is not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fixtures as shipped
from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.catalogue import cases_of
from conformance.cases.traces import GoldenModel
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.judge.noise import UnitFloors, read
from conformance.runner import CaseResult, run_case


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    golden = GoldenModel(Fixtures.open(verify=False).model("tiny"))
    return {case.id: case for case in cases_of(golden, UnitFloors())}


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def _raising(error: BaseException) -> Callable[..., Any]:
    def method(*args: Any, **arguments: Any) -> Any:
        raise error

    return method


def _run(case: Case, **methods: Callable[..., Any]) -> tuple[CaseResult, CaseResult]:
    """The case with a port that has other methods, and then again on the same session with the reference's own."""
    port = type("Port", (Reference,), methods)
    session = InProcess(port())
    broken = run_case(case, session)
    for name in methods:
        setattr(port, name, getattr(Reference, name))
    return broken, run_case(case, session)


@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError("stop"), GeneratorExit(), SystemExit(0), _Unprintable(), ValueError("\udcff")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_port_raises_is_a_crash(error: BaseException, cases: dict[str, Case]) -> None:
    broken, after = _run(cases["norm/rms/block-inputs"], rms_norm=_raising(error))
    assert broken.status == "CRASH"
    assert type(error).__name__ in broken.message
    assert "test_hostile_ports.py:" in broken.message
    broken.message.encode("utf-8")
    assert after.status == "PASS"


def test_a_weight_that_is_written_to_is_noticed_and_made_anew(cases: dict[str, Case]) -> None:
    def query_latent(self: Reference, weights: Any, **arguments: Any) -> Any:
        result = Reference.query_latent(self, weights=weights, **arguments)
        weights["q_norm.weight"].mul_(2)
        return result

    broken, after = _run(cases["attention/query-latent/trace"], query_latent=query_latent)
    assert broken.status == "FAIL"
    assert "q_norm.weight" in broken.message
    assert after.status == "PASS"


def test_mappings_cannot_be_emptied_for_later_cases(cases: dict[str, Case]) -> None:
    def query_latent(self: Reference, config: Any, weights: Any, **arguments: Any) -> Any:
        config.clear()
        weights.clear()

    broken, after = _run(cases["attention/query-latent/trace"], query_latent=query_latent)
    assert broken.status == "CRASH"
    assert after.status == "PASS"


def test_an_object_without_step_is_named(cases: dict[str, Case]) -> None:
    broken, _ = _run(cases["compressor/carry-ratio-2/prefill-2-tokens"], compressor=lambda self, **arguments: None)
    assert broken.status == "FAIL"
    assert "step()" in broken.message


def test_integers_do_not_wrap_around(cases: dict[str, Case]) -> None:
    def window_indices(self: Reference, **arguments: Any) -> Any:
        rows = Reference.window_indices(self, **arguments).numpy().astype(np.int64)
        return np.where(rows == 0, -(2**63), rows)

    broken, _ = _run(cases["window/prefill-list/equal-to-window"], window_indices=window_indices)
    assert broken.status == "FAIL"


def test_a_result_that_claims_to_be_huge_is_not_copied(cases: dict[str, Case]) -> None:
    def rms_norm(self: Reference, **arguments: Any) -> Any:
        return np.broadcast_to(np.float32(0), (10**6, 10**6))

    broken, _ = _run(cases["norm/rms/block-inputs"], rms_norm=rms_norm)
    assert broken.status == "FAIL"
    assert "elements" in broken.message


@pytest.mark.parametrize("numbers", [[1e300, 0, 0], [-1.0, 0, 0], [True, 0, 0], ["1", 0, 0], [float("nan"), 0, 0], [0]])
def test_noise_floors_are_distances(numbers: list[Any], tmp_path: Any) -> None:
    path = tmp_path / "noise_floor.json"
    path.write_text(json.dumps({"format": 1, "lock": "x", "distances": {"tiny": {"case": {"tap": numbers}}}}))
    with pytest.raises(FixtureError, match=r"noise_floor\.json"):
        read(path, "x")


def test_a_linked_set_is_not_read(tmp_path: Any) -> None:
    source = shipped.__path__[0]
    (tmp_path / "manifest.json").write_text('{"format": 1, "files": {}}')
    (tmp_path / "tiny").symlink_to(f"{source}/tiny")
    with pytest.raises(FixtureError, match="symbolic link"):
        Fixtures.open(tmp_path, verify=False)
