"""Hand-made vectors and exhaustive sweeps of the quantisers and dequantisers (numerics.md 1 and 2).

The specification keeps the sign of zero in codes, and ports differ in FP4: some clear it.  Dequantised values are equal
either way.  So the code -0 occurs in one case for each FP4 format, `negative-zero`, and in no other vector: a port that
clears it without declaring so (`conformance.judge.fp4_codes`) fails there and learns the rest from the other cases.
What a quantiser makes of infinities and NaN is not specified; that a weight's scale byte 255 is NaN is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Level, Step
from conformance.cases.vectors import sweeps
from conformance.cases.vectors.hand_groups import HAND_GROUPS, HandGroup
from conformance.cases.vectors.weight_sweeps import cases as weight_cases
from conformance.formats import BF16, E4M3, pack_fp4
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.quantize import FP4_E4M3, FP4_E8M0, FP8, Codes, Quantizer
from conformance.judge.expectations import Exact
from conformance.judge.fp4_codes import PackedCodes
from conformance.tensors import Tensor

CODE_AXES = ("row", "code")
SCALE_AXES = ("row", "group")
VALUE_AXES = ("row", "feature")
SMALLEST_MAXIMUM = 2.0**-118
"""Below it an FP4 group holds subnormal numbers, which have a case of their own."""


@dataclass(frozen=True)
class Sweep:
    """Groups for one quantiser; each sweep makes a case for the codes and one for the fake-quantised values."""

    behaviour: str
    quantizer: Quantizer
    groups: Callable[[], list[Floats]]
    """Lists of groups [G, group], a step each."""
    why: str
    flags: tuple[str, ...]
    level: Level = "core"


def _every_value(quantizer: Quantizer, *maxima: float) -> Callable[[], list[Floats]]:
    return lambda: [sweeps.every_value(quantizer, amax) for amax in maxima]


def _every_maximum(quantizer: Quantizer) -> list[Floats]:
    return [sweeps.every_maximum(quantizer, sweeps.positive_bf16(SMALLEST_MAXIMUM, np.inf))]


def _boundaries(quantizer: Quantizer, first: int, last: int) -> Callable[[], list[Floats]]:
    exact = quantizer.code.largest * np.exp2(np.arange(first, last + 1, dtype=np.float64))
    return lambda: [sweeps.every_maximum(quantizer, sweeps.around(exact))]


def _small(quantizer: Quantizer, maxima: tuple[float, ...]) -> Callable[[], list[Floats]]:
    zeros = np.zeros((sweeps.GROUPS_IN_A_ROW, quantizer.group))
    return lambda: [zeros, sweeps.every_maximum(quantizer, sweeps.around(np.array(maxima)))]


def _subnormals(quantizer: Quantizer) -> list[Floats]:
    return [sweeps.every_value(quantizer, 2.0**-124), sweeps.every_maximum(quantizer, 2.0 ** np.arange(-132.0, -117.0))]


def _every_scale(quantizer: Quantizer) -> list[Floats]:
    return [sweeps.every_code_under_scale(quantizer, float(scale)) for scale in E4M3.decode(np.arange(1, 127))]


def _uneven_halves(quantizer: Quantizer) -> list[Floats]:
    """Runs of 16 whose maxima differ by 2, 8 and 64: one scale for 32 and one for 16 give other codes."""
    run = np.array([6, -5, 4, 3.5, -3, 2.5, 2, 1.75, -1.5, 1.25, 1, 0.75, -0.5, 3, 6, 1])
    large = np.concatenate([run * factor for pair in ((1, 2), (8, 1), (1, 64), (4, 4)) for factor in pair])
    return [sweeps.without_negative_zero(quantizer, large.reshape(-1, quantizer.group))]


SCALE = ("scale-by-log2", "scale-not-rounded-up", "scale-of-exact-power-doubled", "scale-not-power-of-two")
FP8_CODES = ("fp8-truncated", "fp8-tie-away-from-zero", "fp8-fnuz", "scale-group-size")
FP4_CODES = ("fp4-tie-away-from-zero", "fp4-truncated", "fp4-sign", "nibble-order", "scale-group-size")
FLOOR = ("amax-floor",)

SWEEPS = (
    Sweep(
        "fp8-every-value",
        FP8,
        _every_value(FP8, 448.0, 450.0, 1.0, 2.0**-20, BF16.largest),
        "Fails when any bf16 value is coded wrongly under one of five group maxima: ties, subnormal codes, saturation.",
        FP8_CODES,
    ),
    Sweep(
        "fp8-every-maximum",
        FP8,
        partial(_every_maximum, FP8),
        "Fails when any bf16 group maximum gives another scale, or midpoints between codes do not go to the even one.",
        (*SCALE, *FP8_CODES, *FLOOR),
    ),
    Sweep(
        "fp8-scale-steps-above-448",
        FP8,
        _boundaries(FP8, -22, 119),
        "Fails when the scale does not step up one ulp above 448 times a power of two, or does so at it.",
        SCALE,
        "smoke",
    ),
    Sweep(
        "fp8-floor",
        FP8,
        _small(FP8, (1e-4, 2e-4, 1e-3, 1e-2, 4.48e-2, 1e-5, 2.0**-30)),
        "Fails when the floor of 1e-4 bounds the scale instead of the maximum: it acts from 4.48e-2 on.",
        FLOOR,
        "smoke",
    ),
    Sweep(
        "fp4-e8m0-every-value",
        FP4_E8M0,
        _every_value(FP4_E8M0, 6.0, 6.03125, 1.0, BF16.largest),
        "Fails when any bf16 value is coded wrongly under one of four group maxima.",
        FP4_CODES,
    ),
    Sweep(
        "fp4-e8m0-every-maximum",
        FP4_E8M0,
        partial(_every_maximum, FP4_E8M0),
        "Fails when any bf16 group maximum gives another scale, or midpoints between codes do not go to the even one.",
        (*SCALE, *FP4_CODES, *FLOOR, "fp4-formats-swapped"),
    ),
    Sweep(
        "fp4-e8m0-scale-steps-above-6",
        FP4_E8M0,
        _boundaries(FP4_E8M0, -115, 125),
        "Fails when the scale does not step up one ulp above 6 times a power of two, or does so at it.",
        (*SCALE, "fp4-formats-swapped"),
        "smoke",
    ),
    Sweep(
        "fp4-e8m0-floor",
        FP4_E8M0,
        _small(FP4_E8M0, (6 * 2.0**-9, 1e-4, 1e-12, 2.0**-100)),
        "Fails when small groups get the floor of the other quantisers, or zeros another scale than 2^-126.",
        (*FLOOR, "fp4-formats-swapped"),
    ),
    Sweep(
        "fp4-e8m0-subnormals",
        FP4_E8M0,
        partial(_subnormals, FP4_E8M0),
        "Fails when subnormal inputs, or quotients of them, are flushed to zero.",
        ("subnormals-flushed",),
        "full",
    ),
    Sweep(
        "fp4-e8m0-uneven-halves",
        FP4_E8M0,
        partial(_uneven_halves, FP4_E8M0),
        "Fails when 16 values share a scale where 32 must.",
        ("fp4-formats-swapped", "scale-group-size", "nibble-order"),
    ),
    Sweep(
        "fp4-e4m3-every-value",
        FP4_E4M3,
        _every_value(FP4_E4M3, 6.0, 2688.0, BF16.largest, 2.0**-8),
        "Fails when any bf16 value is coded wrongly under one of four group maxima, the scale at its limits included.",
        (*FP4_CODES, "e4m3-scale-overflow"),
    ),
    Sweep(
        "fp4-e4m3-every-maximum",
        FP4_E4M3,
        partial(_every_maximum, FP4_E4M3),
        "Fails when any bf16 group maximum gives another E4M3 scale.",
        ("fp4-formats-swapped", "e4m3-scale-overflow", "e4m3-scale-rounding", *FLOOR, *FP4_CODES),
    ),
    Sweep(
        "fp4-e4m3-every-scale",
        FP4_E4M3,
        partial(_every_scale, FP4_E4M3),
        "Fails when x times 1/s replaces the true division: exact ties move under 14 of the 126 scales.",
        ("fp4-reciprocal-multiply", *FP4_CODES),
    ),
    Sweep(
        "fp4-e4m3-floor",
        FP4_E4M3,
        _small(FP4_E4M3, (6 * 2.0**-9, 2.0**-7, 1e-3, 1e-20)),
        "Fails when the floor of 6*2^-9 is missing: a scale of zero, and NaN for a group of zeros.",
        (*FLOOR, "fp4-formats-swapped"),
    ),
    Sweep(
        "fp4-e4m3-uneven-halves",
        FP4_E4M3,
        partial(_uneven_halves, FP4_E4M3),
        "Fails when 32 values share a scale where 16 must.",
        ("fp4-formats-swapped", "scale-group-size", "nibble-order"),
    ),
)


def cases() -> Iterator[Case]:
    """Sweeps through each quantiser, groups with results worked out by hand, and the weight formats."""
    for sweep in SWEEPS:
        for variant, steps in (("codes", _code_steps), ("fake", _fake_steps)):
            yield Case(
                f"quantize/{sweep.behaviour}/{variant}",
                sweep.level,
                "exact",
                sweep.why,
                "numerics.md 2",
                partial(steps, sweep),
                _flags_of(sweep, variant),
                "exhaustive sweep",
            )
    for hand in HAND_GROUPS:
        yield Case(
            f"quantize/{hand.id}",
            hand.level,
            "exact",
            hand.why,
            "numerics.md 2",
            partial(_hand_steps, hand),
            hand.flags,
            "worked out by hand",
        )
    yield from weight_cases()


def _flags_of(sweep: Sweep, variant: str) -> tuple[str, ...]:
    """Fake quantisation packs nothing, but multiplies by a scale once more."""
    if variant == "codes":
        return sweep.flags
    return (*(flag for flag in sweep.flags if flag != "nibble-order"), "scale-layout")


def _code_steps(sweep: Sweep) -> Iterator[Step]:
    for groups in sweep.groups():
        x = sweeps.as_rows(groups)
        yield Step(
            Call(f"quantize_{sweep.quantizer.name}", {"x": Tensor.from_values(x, "BF16")}),
            partial(_code_rules, sweep.quantizer, x),
        )


def _code_rules(quantizer: Quantizer, x: Floats) -> list[Exact]:
    codes, scales = quantizer.quantize(x)
    return _expected(quantizer, codes, scales)


def _expected(quantizer: Quantizer, codes: Codes, scales: Codes) -> list[Exact]:
    expected_scales = Exact("scales", Tensor(quantizer.scale.name, scales), SCALE_AXES)
    if quantizer is FP8:
        return [Exact("codes", Tensor("F8_E4M3", codes), CODE_AXES), expected_scales]
    return [PackedCodes("codes", Tensor("U8", pack_fp4(codes)), CODE_AXES), expected_scales]


def _fake_steps(sweep: Sweep) -> Iterator[Step]:
    for groups in sweep.groups():
        x = sweeps.as_rows(groups)
        yield Step(
            Call(f"fake_quantize_{sweep.quantizer.name}", {"x": Tensor.from_values(x, "BF16")}),
            partial(_fake_rules, sweep.quantizer, x),
        )


def _fake_rules(quantizer: Quantizer, x: Floats) -> list[Exact]:
    values = quantizer.fake(Bounded.exact(x)).value
    return [Exact("values", Tensor.from_values(values, "BF16"), VALUE_AXES)]


def _hand_steps(hand: HandGroup) -> Iterator[Step]:
    quantizer = hand.quantizer
    x = np.array(hand.values, dtype=np.float64)
    x = np.pad(x, (0, quantizer.group - x.size))[None]
    codes = np.pad(np.array(hand.codes, dtype=np.uint8), (0, quantizer.group - len(hand.codes)))[None]
    scales = np.array([[hand.scale]], dtype=np.uint8)
    yield Step(
        Call(f"quantize_{quantizer.name}", {"x": Tensor.from_values(x, "BF16")}),
        lambda: _expected(quantizer, codes, scales),
    )
