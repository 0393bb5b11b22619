"""A declared accumulator widens the bounds of 8-bit products and is named in the verdict; an undeclared one fails."""

from __future__ import annotations

import re

import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.catalogue import cases_of
from conformance.cases.traces import GoldenModel
from conformance.fixtures import Fixtures
from conformance.interface import AccumulatorName, Description
from conformance.judge.accumulators import ACCUMULATORS
from conformance.judge.noise import UnitFloors
from conformance.runner import run_case
from reference import linear

PRECISION = {"fp8-tensor-core": 13, "fp16": 11}
CASES = re.compile(r"linear/fp[48]-weight/")


def _cut(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Keep `bits` bits of the significand, towards zero."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(torch.ldexp(mantissa, torch.tensor(bits))), exponent - bits)


def _narrow_product(bits: int):  # type: ignore[no-untyped-def]
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(*x.shape[:-1], weight.shape[0])
        for inputs in torch.split(torch.arange(x.shape[-1]), 32):
            total = _cut(total + torch.nn.functional.linear(x[..., inputs], weight[:, inputs]), bits)
        return total.bfloat16()

    return product


def _session(declared: AccumulatorName) -> InProcess:
    class Port(Reference):
        def describe(self) -> Description:
            return Description("narrow", "1", accumulator=declared)

    return InProcess(Port())


@pytest.mark.parametrize("narrow", ["fp8-tensor-core", "fp16"])
def test_narrow_accumulator_needs_its_declaration(narrow: AccumulatorName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "scaled_product", _narrow_product(PRECISION[narrow]))
    golden = GoldenModel(Fixtures.open(verify=False).model("tiny"))
    cases = [case for case in cases_of(golden, UnitFloors()) if CASES.match(case.id)]
    assert cases
    for case in cases:
        assert run_case(case, _session(narrow)).status == "PASS", case.id
    assert any(run_case(case, _session("fp32")).status == "FAIL" for case in cases)


def test_bounds_grow_with_fewer_bits() -> None:
    for count in (1, 32, 128, 4096):
        errors = [ACCUMULATORS[name].error(count) for name in ("fp32", "fp8-tensor-core", "fp16")]
        assert errors == sorted(errors)
