"""Freely running layers with a deviation that makes another model: an honest port passes, a mistaken one does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case, Request
from conformance.cases.catalogue import cases_of
from conformance.cases.traces import GoldenModel
from conformance.deviations import DEVIATIONS, own_noise
from conformance.faults.deviations import CHANGES, DeviatingReference
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Change, Edit, patched
from conformance.fixtures import Fixtures
from conformance.judge.noise import Distance
from conformance.runner import run_case, run_once
from conformance.tensors import Tensor

STACK = "stack/source-before-reuse-layers-0-1/prefill-2-tokens"
PRECISE = HonestVariant("float64", "precision", options={"compute": torch.float64})
HANDED_ON = 'h, pre = of_layer["h_out"], of_layer["pre_out"]'
MIX_NOT_HANDED_ON: Change = Edit("stack.Stack.step", HANDED_ON, 'h = of_layer["h_out"]')


class NoNoise:
    """A recording whose noise nobody has seen."""

    def allowance(self, case_id: str, tap: str) -> Distance:
        return Distance(1e-9, 1e-9, 1e-9)

    def describe(self) -> str:
        return "nothing seen"


class Nan(DeviatingReference):
    def ask(self, request: Request) -> Mapping[str, Tensor]:
        results = super().ask(request)
        return {
            name: Tensor.from_values(value.values() * float("nan"), value.dtype) if value.dtype == "BF16" else value
            for name, value in results.items()
        }


@pytest.fixture(scope="module")
def case() -> Case:
    golden = GoldenModel(Fixtures.open(verify=False).model("tiny"))
    return next(case for case in cases_of(golden, NoNoise()) if case.id == STACK)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was measured, by deviations."""
    seen: list[tuple[str, ...]] = []
    really = own_noise.measured

    def measured(case: Case, declared: tuple[str, ...]) -> Any:
        seen.append(tuple(declared))
        return really(case, declared)

    monkeypatch.setattr(own_noise, "measured", measured)
    return seen


def test_an_honest_port_beyond_the_stored_floor_is_judged_by_its_own_noise(
    case: Case, measurements: list[tuple[str, ...]]
) -> None:
    port = DeviatingReference(["no-engram"], variant=PRECISE)
    assert run_once(case, port).status == "FAIL"
    result = run_case(case, port)
    assert result.status == "PASS"
    assert "measured in this run with the declared deviations" in result.taps[0].note
    assert measurements == [("no-engram",)]


def test_a_mistake_is_no_noise(case: Case, measurements: list[tuple[str, ...]]) -> None:
    mistaken = HonestVariant("mix", "none", changes=(MIX_NOT_HANDED_ON,))
    assert run_case(case, DeviatingReference(["no-engram"], variant=mistaken)).status == "FAIL"
    assert measurements


@pytest.mark.parametrize(
    "port",
    [
        DeviatingReference(["norm-rounded-before-weight"], variant=PRECISE),
        InProcess(Reference(torch.float64)),
        Nan(["no-engram"]),
    ],
    ids=["another-deviation", "no-deviation", "no-number"],
)
def test_otherwise_the_stored_floor_decides(case: Case, measurements: list[tuple[str, ...]], port: Any) -> None:
    assert run_case(case, port).status == "FAIL"
    assert not measurements


@pytest.mark.parametrize("name", DEVIATIONS)
def test_every_honest_variant_can_deviate(name: str) -> None:
    for variant in own_noise.VARIANTS:
        with patched((*CHANGES[name], *variant.changes)):
            pass
