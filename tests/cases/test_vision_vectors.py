"""The hand-made vectors of vision: the reference passes each, and each rejects the mistakes that it is made for."""

from __future__ import annotations

from functools import cache

import pytest

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.vectors import images, vision
from conformance.faults.catalogue import FAULTS
from conformance.runner import CaseResult, run_case

CAUGHT = {
    "rotate/one-hot-on-2x2-patches": (
        "neighbours-paired",
        "quarters-paired",
        "rows-and-columns-swapped",
        "turned-backwards",
    ),
    "rotate/long-rows-and-columns": (
        "frequencies-over-the-head",
        "base-of-compressed-layers",
        "columns-first",
        "places-not-restarted",
    ),
    "attention/several-images": ("attention-across-images", "causal", "places-not-restarted"),
    "attention/one-patch": ("values-first", "qkv-bias-missing", "heads-interleaved"),
    "mlp/gates-of-both-signs": ("up-before-gate", "gelu-in-mlp", "activation-not-rounded", "clamped-swiglu"),
    "block/small-values-into-attention": ("eps-of-the-text-model", "norm-after-attention"),
    "block/small-values-into-mlp": ("second-eps-of-the-text-model", "norm-weight-in-bf16"),
    "block/fp32-norm-weights": ("norms-swapped", "residual-of-the-norm"),
    "aligner/odd-grids": ("padded-left-and-above", "padded-with-the-edge", "patches-last-in-cell", "cells-by-column"),
    "aligner/grid-1x1": ("padded-left-and-above", "padded-with-ones"),
    "aligner/grid-2x4": ("padded-with-the-edge", "cell-transposed"),
    "aligner/grid-3x3": ("cell-transposed", "aligner-bias-missing"),
    "aligner/gelu-from-minus-5-to-5": ("gelu-by-tanh", "gelu-by-sigmoid"),
    "tower/silent-blocks": ("final-norm-missing", "patch-channels-last", "patch-transposed"),
    "plan/sides-rounded-up": ("sides-rounded-down", "sides-rounded-to-cells", "sides-swapped"),
    "plan/small-images-grow": ("small-images-kept", "growth-without-root", "growth-rounded-up"),
    "plan/too-many-tokens": ("newlines-not-counted", "limit-as-area", "limit-off-by-one", "shrunk-to-whole-cells"),
    "plan/one-column-one-row": ("tall-strip-unlimited", "wide-strip-off-by-one"),
    "plan/float64-decides": ("plan-in-fp32", "plan-rounded-safely"),
    "plan/width-limited": ("width-not-limited", "height-limited"),
    "plan/many-sizes": ("sides-rounded-down", "growth-without-root", "delimiters-not-counted", "plan-in-fp32"),
    "patches/every-value": ("divided-by-256", "not-centred", "normalised-in-bf16", "blue-first"),
    "patches/patches-in-rows": ("patches-by-column", "pixels-transposed", "channels-innermost"),
    "patches/grey-around": ("black-padding", "grey-of-128", "half-rounded-down", "half-rounded-up"),
    "patches/resampled": ("bilinear", "bicubic-of-another-library", "panorama-padded", "always-stretched"),
    "span/several-images": ("newline-missing", "grids-reversed", "odd-grid-cut", "span-transposed"),
    "merge/several-images": ("features-shifted", "features-in-every-place", "end-is-newline"),
}
FAULT_OF = {fault.id: fault for fault in FAULTS}


@cache
def cases() -> dict[str, Case]:
    return {case.id.removeprefix("vision/"): case for module in (vision, images) for case in module.cases()}


def run(name: str) -> CaseResult:
    return run_case(cases()[name], InProcess(Reference()))


def test_every_vector_is_here() -> None:
    assert set(CAUGHT) == set(cases())


@pytest.mark.parametrize("name", CAUGHT)
def test_the_reference_passes(name: str) -> None:
    result = run(name)
    assert result.status == "PASS", result.message or result.first_failure
    assert result.judged


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in CAUGHT.items() for fault in faults])
def test_a_vector_rejects_the_mistakes_that_it_is_made_for(name: str, fault: str) -> None:
    with FAULT_OF[f"vision/{fault}"].applied():
        assert run(name).status in ("FAIL", "CRASH")
