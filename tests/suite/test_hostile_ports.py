"""Ports that misbehave in ways a number cannot show: each is a failed case, and the next case is not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

import fixtures as shipped
from conformance.adapters.in_process import ConvertedLazily, InProcess, KeptWeights
from conformance.adapters.reference import Reference
from conformance.cases.case import Call, Case, Step
from conformance.cases.catalogue import cases_of
from conformance.cases.released_set import Released
from conformance.cases.traces import GoldenModel
from conformance.errors import FixtureError
from conformance.fixtures import Fixtures
from conformance.interface import Unsupported
from conformance.judge.expectations import Exact
from conformance.judge.noise import UnitFloors, read
from conformance.recipe_weights import RecipeWeights
from conformance.runner import CaseResult, run_case
from conformance.tensors import Tensor


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    golden = GoldenModel(Fixtures.open(verify=False).model("tiny"))
    return {case.id: case for case in cases_of(golden, UnitFloors())}


def _lazily(case_id: str, port: type[Reference], matrices: int = 1, kept: int | None = None) -> CaseResult:
    """A case with weights that are made at their look-up, given to a port; `kept` bytes of them are kept."""
    released = Released(Fixtures.open(verify=False).recipe("released"))

    def steps() -> Iterator[Step]:
        x = Tensor.from_values(np.ones((1, released.config.dim)), "BF16")
        for matrix in ("attn_norm.weight", "ffn_norm.weight")[:matrices]:
            weights = released.parameters.within("layers.0.").mapping()
            arguments = {"config": {"name": matrix}, "weights": weights, "x": x, "image_mask": None}
            yield Step(Call("moe", arguments), lambda: [Exact("ffn_out", x, ("token", "feature"))])

    session = InProcess(port())
    if kept is not None:
        session._kept = KeptWeights(kept)
    return run_case(Case(case_id, "core", "exact", "", "", steps), session)


class _Looking(Reference):
    """It looks a weight up and writes to it, the first time, in inference mode or not."""

    inference: ClassVar[bool] = False
    writes: ClassVar[bool] = True

    def moe(self, config: Any, weights: Any, x: Any, image_mask: Any) -> Any:
        with torch.inference_mode(self.inference):
            weight = weights[config["name"]]
            if self.writes and config["name"] == "attn_norm.weight":
                weight[0] = 2.0
        return x


class _LookingInInference(_Looking):
    inference: ClassVar[bool] = True


class _LookingOnly(_LookingInInference):
    writes: ClassVar[bool] = False


class _LookingInNumpy(_Looking):
    tensor_type: ClassVar[Literal["torch", "numpy"]] = "numpy"


@pytest.mark.parametrize("kept", [None, 1], ids=["all kept", "one kept"])
@pytest.mark.parametrize("port", [_Looking, _LookingInInference])
def test_a_weight_made_at_its_look_up_is_watched_too(port: type[Reference], kept: int | None) -> None:
    """Also when it is kept no longer at the end of the case."""
    result = _lazily("moe/written/lazily", port, 2, kept)
    assert (result.status, result.message) == ("FAIL", "the weight attn_norm.weight was modified in place")


def test_looking_a_weight_up_is_no_change() -> None:
    assert _lazily("moe/read/lazily", _LookingOnly, 2, 1).status == "PASS"


def test_a_weight_made_at_its_look_up_cannot_be_written_to_in_numpy() -> None:
    result = _lazily("moe/written/lazily", _LookingInNumpy)
    assert result.status == "CRASH"
    assert "read-only" in result.message


def test_no_more_weights_are_kept_than_there_is_room_for() -> None:
    made: list[str] = []
    kept = KeptWeights(limit=100)
    owner = ConvertedLazily(
        RecipeWeights(Released(Fixtures.open(verify=False).recipe("released")).config, 1), str, kept
    )
    for name in ("a", "b", "a", "c", "a", "b"):

        def make(name: str = name) -> Any:
            made.append(name)
            return np.zeros(40, np.uint8)

        kept.value(owner, name, make)
    # "a" is used again and again, so "b" goes when "c" comes.
    assert made == ["a", "b", "c", "b"]


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


def test_a_failure_is_not_hidden_by_a_later_step_without_support(cases: dict[str, Case]) -> None:
    answered: list[Any] = []

    def window_indices(self: Reference, **arguments: Any) -> Any:
        if answered:
            raise Unsupported("only once")
        answered.append(arguments)
        return Reference.window_indices(self, **arguments) + 1

    case = cases["window/prefill-list/equal-to-window"]
    twice = replace(case, steps=lambda: (step for _ in range(2) for step in case.steps()))
    broken, _ = _run(twice, window_indices=window_indices)
    assert broken.status == "FAIL"


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
