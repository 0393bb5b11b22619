"""Every code under every scale through the two weight dequantisers (numerics.md 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Level, Step
from conformance.formats import E2M1, E4M3, E8M0, unpack_fp4
from conformance.judge.components.linear import fp8_weight
from conformance.judge.expectations import Exact
from conformance.tensors import Tensor

AXES = ("output", "input")
TILE = 32
FP4_GROUP = 32
NAN_SCALE = 255

RANGES: tuple[tuple[str, dict[str, Sequence[int]], Level, str, tuple[str, ...]], ...] = (
    (
        "normal-range",
        # Every product stays a normal bf16 number: codes reach from 2^-9 to 448, and from 0.5 to 6.
        {"fp8": range(10, 247), "fp4": range(2, 253)},
        "core",
        "Fails when any code under any scale has another value, or a scale acts on a neighbour's elements.",
        ("scale-layout",),
    ),
    (
        "extreme-scales",
        {"fp8": [*range(10), *range(247, 255)], "fp4": [0, 1, 253, 254]},
        "full",
        "Fails when scale byte 0 is read as zero, or results below the normal range are flushed to zero.",
        ("subnormals-flushed", "scale-byte-zero-misread"),
    ),
    (
        "nan-scale",
        {"fp8": [127, NAN_SCALE], "fp4": [127, NAN_SCALE]},
        "core",
        "Fails when scale byte 255 is taken for 2^128 and not for NaN.",
        ("nan-scale-misread",),
    ),
)


def cases() -> Iterator[Case]:
    """Codes times scales in three ranges, and tiles that the matrix fills only partly."""
    for variant, scales, level, why, flags in RANGES:
        for name, steps in (("fp8", _fp8), ("fp4", _fp4)):
            yield Case(
                f"quantize/{name}-weight-every-code-and-scale/{variant}",
                level,
                "exact",
                why,
                "numerics.md 1",
                partial(steps, scales[name]),
                (*flags, "nibble-order", "fp4-sign", "fp4-subnormal-decoded")
                if (name, variant) == ("fp4", "normal-range")
                else flags,
                "exhaustive sweep",
            )
    yield Case(
        "quantize/fp8-weight-partial-tiles/40-by-72",
        "smoke",
        "exact",
        "Fails when the scale of the last, partly filled tiles is taken from another tile or is missing.",
        "numerics.md 2",
        _partial_tiles,
        ("scale-layout",),
        "worked out by hand",
    )


def _fp8(scale_bytes: Sequence[int]) -> Iterator[Step]:
    """Tiles in a row of matrices [32, 32 * tiles]: each holds all 256 codes, in another order than its neighbour."""
    codes = np.arange(TILE * TILE)
    tiles = [
        ((codes * 5 + 37 * number) % 256).astype(np.uint8).reshape(TILE, TILE) for number in range(len(scale_bytes))
    ]
    yield _step("dequantize_fp8_weight", Tensor("F8_E4M3", np.concatenate(tiles, axis=1)), np.array([scale_bytes]))


def _fp4(scale_bytes: Sequence[int]) -> Iterator[Step]:
    """All 256 packed bytes are 16 groups; every row and group has another scale until all have met all."""
    packed = np.arange(256, dtype=np.uint8)
    rows, groups = len(scale_bytes), 256 // (FP4_GROUP // 2)
    which = (np.arange(rows)[:, None] + 7 * np.arange(groups)) % rows
    yield _step("dequantize_fp4_weight", Tensor("U8", np.tile(packed, (rows, 1))), np.array(scale_bytes)[which])


def _partial_tiles() -> Iterator[Step]:
    """Weights of one, so that the result shows which scale each element got."""
    ones = Tensor.from_values(np.ones((40, 72)), "F8_E4M3")
    yield _step("dequantize_fp8_weight", ones, np.array([[120, 124, 130], [128, 133, 125]]))


def _step(method: str, weight: Tensor, scale_bytes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Step:
    scale = Tensor("F8_E8M0", scale_bytes.astype(np.uint8))

    def rules() -> list[Exact]:
        factors = E8M0.decode(scale.data)
        if weight.dtype == "F8_E4M3":
            values = fp8_weight(E4M3.decode(weight.data), factors)
        else:
            values = E2M1.decode(unpack_fp4(weight.data)) * np.repeat(factors, FP4_GROUP, axis=-1)
        return [Exact("values", Tensor.from_values(values, "BF16"), AXES)]

    return Step(Call(method, {"weight": weight, "scale": scale}), rules)
