"""Two formulations written apart from each other agree to float64's precision.

`reference/` (torch, from the specification) and `conformance/judge/components` (numpy, with error bounds) share no
helper.  With the roundoff of the bounds set to float64's, every interval shrinks to almost a point, and the reference
run in float64 must still lie inside: a formula that one of them has wrong cannot hide behind a bound.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.catalogue import cases_of
from conformance.cases.traces import GoldenModel
from conformance.fixtures import Fixtures
from conformance.judge import accumulators
from conformance.judge.noise import UnitFloors
from conformance.runner import run_case

UNIT = 2.0**-50
"""float64's unit roundoff with eight times the room: the judge's own arithmetic rounds too."""

CONSTANTS = {
    "conformance.judge.bounded": {"UNIT_ROUNDOFF": UNIT, "ELEMENTARY_ROUNDOFF": 4 * UNIT},
    "conformance.judge.components.sparse_attention": {"UNIT_ROUNDOFF": UNIT, "ELEMENTARY_ROUNDOFF": 4 * UNIT},
    "conformance.judge.components.hyper_connections": {"UNIT_ROUNDOFF": UNIT, "ELEMENTARY_ROUNDOFF": 4 * UNIT},
    "conformance.judge.components.rotary": {"ELEMENTARY_ROUNDOFF": 4 * UNIT},
    "conformance.judge.components.gate": {"ELEMENTARY_ROUNDOFF": 4 * UNIT},
}

GROUPS = (
    "norm/rms",
    "linear/",
    "rotary/pairs",
    "hyper_connections/",
    "window/rows",
    "compressor/",
    "indexer/",
    "sparse_attention/sink",
    "attention/que",
    "attention/output",
    "gate/",
    "experts/",
    "moe/",
    "engram/write",
)


@pytest.fixture(scope="module")
def golden() -> GoldenModel:
    return GoldenModel(Fixtures.open(verify=False).model("tiny"))


@pytest.mark.parametrize("group", GROUPS)
def test_reference_in_float64_lies_in_float64_bounds(
    group: str, golden: GoldenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, values in CONSTANTS.items():
        for name, value in values.items():
            monkeypatch.setattr(importlib.import_module(module), name, value)
    exact_sum = accumulators.Accumulator(UNIT, 0, False, "float64")
    monkeypatch.setattr(accumulators, "ACCUMULATORS", {"fp32": exact_sum})
    # Recorded values were computed in fp32 and lie outside such bounds.
    monkeypatch.setattr(
        "conformance.runner._checked_golden", lambda expectation, step: expectation.judge(expectation.golden)
    )
    session = InProcess(Reference(compute=torch.float64))
    cases = [case for case in cases_of(golden, UnitFloors()) if case.id.startswith(group)]
    assert cases
    for case in cases:
        result = run_case(case, session)
        assert result.status == "PASS", (case.id, result.message, result.first_failure)
        assert result.judged > 0
