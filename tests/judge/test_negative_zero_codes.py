"""The FP4 code of -0: kept by the specification, cleared by whoever declares it, and by nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.check import CheckOptions, check
from conformance.errors import TargetError
from conformance.fixtures import Fixtures
from conformance.interface import Description
from conformance.runner import run_case
from conformance.selection import Selection

CODES = [
    f"quantize/fp4-{scale}-{behaviour}"
    for scale in ("e8m0", "e4m3")
    for behaviour in ("negative-zero/sign-kept", "codes-and-scales/trace", "nibbles/all-codes")
]


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Case]:
    return {case.id: case for case in catalogue(Fixtures.open(verify=False)) if case.id in CODES}


def without_negative_zeros(packed: torch.Tensor) -> torch.Tensor:
    packed = torch.where(packed & 0xF == 0x8, packed & 0xF0, packed)
    return torch.where(packed & 0xF0 == 0x80, packed & 0xF, packed)


class Keeping(Reference):
    """The reference with a declared convention."""

    conventions: ClassVar[Mapping[str, str]] = {"negative-zero-code": "cleared"}

    def describe(self) -> Description:
        return replace(super().describe(), conventions=self.conventions)


class Clearing(Keeping):
    """It clears the sign of zero codes, as some ports do, and says so."""

    def quantize_fp4_e8m0(self, x: Any) -> Any:
        codes, scales = super().quantize_fp4_e8m0(x)
        return without_negative_zeros(codes), scales

    def quantize_fp4_e4m3(self, x: Any) -> Any:
        codes, scales = super().quantize_fp4_e4m3(x)
        return without_negative_zeros(codes), scales


class ClearingUndeclared(Clearing):
    """It does not say so."""

    conventions: ClassVar[Mapping[str, str]] = {}


class ClearingOnes(Clearing):
    """It declares the convention, and loses the sign of other codes too."""

    def quantize_fp4_e8m0(self, x: Any) -> Any:
        codes, scales = super().quantize_fp4_e8m0(x)
        return torch.where(codes & 0xF == 0x9, codes & 0xF7, codes), scales

    quantize_fp4_e4m3 = quantize_fp4_e8m0


class Unknown(Reference):
    """It declares something that is no convention."""

    def describe(self) -> Description:
        return replace(super().describe(), conventions={"negative-zero-code": "flipped"})


@pytest.mark.parametrize("case_id", CODES)
def test_the_declared_convention_is_judged_exactly(cases: Mapping[str, Case], case_id: str) -> None:
    status = {port: run_case(cases[case_id], InProcess(port())).status for port in (Reference, Clearing)}
    assert status == {Reference: "PASS", Clearing: "PASS"}
    with_zeros = "nibbles" not in case_id
    for port in (ClearingUndeclared, Keeping):
        assert run_case(cases[case_id], InProcess(port())).status == ("FAIL" if with_zeros else "PASS")


@pytest.mark.parametrize("case_id", [case_id for case_id in CODES if "e8m0-nibbles" in case_id])
def test_the_declaration_excuses_nothing_else(cases: Mapping[str, Case], case_id: str) -> None:
    result = run_case(cases[case_id], InProcess(ClearingOnes()))
    assert result.status == "FAIL"
    assert result.first_failure is not None
    assert "convention" not in result.first_failure.verdict.message


@pytest.mark.parametrize(("port", "other"), [(ClearingUndeclared, "cleared"), (Keeping, "kept")])
def test_the_message_names_the_convention(cases: Mapping[str, Case], port: type[Reference], other: str) -> None:
    found = run_case(cases["quantize/fp4-e8m0-negative-zero/sign-kept"], InProcess(port())).first_failure
    assert found is not None
    assert f'conventions={{"negative-zero-code": "{other}"}}' in found.verdict.message


def test_the_header_shows_it_and_only_two_values_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    selection = Selection("core", "negative-zero")
    assert check(CheckOptions(f"{__name__}:Clearing", selection)) == 0
    assert "negative-zero-code  cleared" in capsys.readouterr().out
    with pytest.raises(TargetError, match="declares convention negative-zero-code 'flipped', not kept or cleared"):
        check(CheckOptions(f"{__name__}:Unknown", selection))
