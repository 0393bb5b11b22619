"""Ports with one mistake each are told which; ports that are wrong in a way nobody knows are told nothing."""

from __future__ import annotations

from functools import cache

import pytest
from planted_ports import (
    BiasInTheWeights,
    CombTransposed,
    DequantisedAtLoad,
    HalfSplitRotation,
    NibblesSwapped,
    NoisyNorm,
    NoisyProduct,
    NormOfVision,
    OneRandomElement,
    OneRowTooMany,
    Port,
    ReluLeftOut,
    ScaledProduct,
    ScaleRoundedDown,
    SinkScaled,
    TileScalesOffByOne,
    Zeros,
)

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.catalogue import VECTORS
from conformance.interface import METHODS
from conformance.runner import run_case
from conformance.signatures.candidates import candidates
from conformance.signatures.matcher import FoundMatch, explain

PLENTY = 120.0
"""Seconds: no test may depend on how much can be tried in a time."""


@cache
def hand_made() -> tuple[Case, ...]:
    return tuple(case for vectors in VECTORS for case in vectors.cases() if case.level != "full")


def failures(port: Port, most: int) -> list[tuple[Case, float]]:
    """The first hand-made cases that the port fails."""
    session = InProcess(port)
    (component,) = {method.component for name, method in METHODS.items() if session.supports(name)}
    failed: list[tuple[Case, float]] = []
    for case in hand_made():
        if case.component == component and len(failed) < most:
            result = run_case(case, InProcess(port))
            if result.status == "FAIL":
                failed.append((case, result.seconds))
    assert failed
    return failed


def named(found: tuple[FoundMatch, ...]) -> set[str]:
    return {entry.match.candidate.flag or entry.match.candidate.name for entry in found if entry.rank == 1}


@pytest.mark.parametrize(
    ("port", "mistake"),
    [
        (DequantisedAtLoad, {"activation-not-quantised", "no-activation-quantiser"}),
        (TileScalesOffByOne, {"scale-layout"}),
        (NibblesSwapped, {"nibble-order"}),
        (HalfSplitRotation, {"rope-pairing"}),
        (CombTransposed, {"comb-transposed"}),
        (NormOfVision, {"norm-eps"}),
        (ReluLeftOut, {"relu-missing"}),
        (SinkScaled, {"sink-scaled"}),
        (BiasInTheWeights, {"gate-bias-in-weights"}),
        (ScaleRoundedDown, {"scale-not-rounded-up"}),
        (OneRowTooMany, {"window-one-too-wide"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_mistake_is_named(port: type[Port], mistake: set[str]) -> None:
    failed = failures(port(), 3)
    found = explain(failed, InProcess(port()), PLENTY)
    assert found
    for case_id, matches in found.items():
        assert named(matches) <= mistake, case_id


@pytest.mark.parametrize(
    "port", [NoisyNorm, NoisyProduct, ScaledProduct, OneRandomElement, Zeros], ids=lambda port: port.__name__
)
def test_what_nobody_knows_is_not_named(port: type[Port]) -> None:
    failed = failures(port(), 3)
    assert explain(failed, InProcess(port()), PLENTY) == {}


def test_a_mistake_that_is_not_in_the_catalogue_is_not_named() -> None:
    rest = [known for known in candidates() if known.flag != "comb-transposed"]
    assert explain(failures(CombTransposed(), 3), InProcess(CombTransposed()), PLENTY, among=rest) == {}


def test_without_time_nothing_is_tried() -> None:
    assert explain(failures(CombTransposed(), 1), InProcess(CombTransposed()), 0.0) == {}


def test_a_port_that_is_right_is_told_nothing() -> None:
    """Even where its roundings, which are not always to the nearest number, are all that could be looked at."""
    chosen = [case for case in hand_made() if case.id.startswith(("attention/sources", "norm/rms-vectors/fp32"))]
    assert len(chosen) == 2
    assert explain([(case, 0.0) for case in chosen], InProcess(Reference()), PLENTY) == {}
