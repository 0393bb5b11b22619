"""The catalogues of faults and honest variants, and a handful of each from end to end."""

from __future__ import annotations

import pytest

from conformance.faults.catalogue import FAULTS
from conformance.faults.classics import power
from conformance.faults.fault import Fault
from conformance.faults.honest import HONEST_VARIANTS, NOISE_NAMES, NOISE_VARIANTS, HonestVariant
from conformance.faults.matrix import Kill, Matrix, Weakness, Workbench, one_per_flag
from conformance.faults.prepared import same
from conformance.interface import COMPONENTS

BY_ID = {fault.id: fault for fault in FAULTS}


def test_every_component_has_faults() -> None:
    assert len(FAULTS) >= 130
    assert {fault.component for fault in FAULTS} == set(COMPONENTS)


def test_faults_are_distinct() -> None:
    assert len(BY_ID) == len(FAULTS)
    changes = [fault.change for fault in FAULTS]
    assert len({str(change) for change in changes}) == len(changes)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_every_fault_can_be_applied(fault: Fault) -> None:
    with fault.applied():
        pass


@pytest.mark.parametrize("variant", HONEST_VARIANTS, ids=lambda variant: variant.name)
def test_every_honest_variant_can_be_applied(variant: HonestVariant) -> None:
    with variant.session() as session:
        assert session.describe().name == "reference"


def test_honest_variants_are_many_and_distinct() -> None:
    assert len({variant.name for variant in HONEST_VARIANTS}) == len(HONEST_VARIANTS) >= 25
    assert {variant.name for variant in NOISE_VARIANTS} == set(NOISE_NAMES)


@pytest.mark.parametrize(
    "fault_id",
    [
        "quantize/e2m1-ties-away",
        "norm/eps-of-vision",
        "rotary/half-split-pairs",
        "gate/bias-in-weights",
        "candidates/padded-with-zero",
        "sampling/tile-start",
    ],
)
def test_a_fault_is_killed_by_a_case_that_names_it(bench: Workbench, fault_id: str) -> None:
    kill = bench.kill(BY_ID[fault_id])
    assert kill.named
    assert kill.by
    assert not kill.problem


def test_the_reference_is_whole_again_after_a_fault(bench: Workbench) -> None:
    prepared = bench.prepared("norm/rms-vectors/mean-square-1e-12")
    with BY_ID["norm/eps-of-vision"].applied():
        assert not same(prepared.ask(bench.session), prepared.answers)
    assert same(prepared.ask(bench.session), prepared.answers)
    assert prepared.judge(prepared.answers).status == "PASS"


@pytest.mark.parametrize("case_id", ["norm/rms-vectors/huge-values", "gate/vectors/many-tokens"])
def test_a_case_notices_the_classics(bench: Workbench, case_id: str) -> None:
    found = power(bench.prepared(case_id))
    assert "zeros" in found.tried
    assert "NaN" in found.tried
    assert not found.missed


@pytest.mark.parametrize("name", ["sums-split-in-2", "norm-weight-first", "ties-random"])
def test_an_honest_variant_differs_and_passes(bench: Workbench, name: str) -> None:
    variant = next(variant for variant in HONEST_VARIANTS if variant.name == name)
    ids = (
        "compressor/carry-ratio-2/prefill-several-windows",
        "norm/rms-vectors/huge-values",
        "norm/rms/block-inputs",
        "indexer/select/ties-at-the-last-place",
    )
    prepared = [bench.prepared(case_id) for case_id in ids]
    with variant.session() as session:
        answers = [case.ask(session) for case in prepared]
    different = sum(not same(given, case.answers) for given, case in zip(answers, prepared, strict=True))
    assert all(case.judge(given).status == "PASS" for given, case in zip(answers, prepared, strict=True))
    assert different


def test_the_exit_code_of_a_matrix() -> None:
    killed = Kill("norm/a", "flag", "norm/case/one", True)
    strong = Weakness("norm/case/one", ("zeros",), ())
    weak = Weakness("norm/case/two", ("zeros",), ("zeros",))
    assert Matrix([killed], [strong]).exit_code == 0
    assert Matrix([killed], [strong, weak]).exit_code == 1
    assert Matrix([killed, Kill("norm/b", "flag", "norm/case/two", True)], [strong, weak]).exit_code == 0
    assert Matrix([killed, Kill("norm/b", "flag")], [strong]).exit_code == 1
    assert Matrix([Kill("norm/a", "flag", "norm/case/one", True, problem="raised")], [strong]).exit_code == 1


def test_the_quick_subset_has_one_fault_for_every_flag() -> None:
    quick = one_per_flag(FAULTS)
    assert len(quick) == len({fault.flag for fault in quick}) == len({fault.flag for fault in FAULTS})
