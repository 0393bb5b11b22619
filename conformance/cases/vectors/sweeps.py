"""Inputs that cover a quantiser's domain: every bf16 value, every group maximum, every code under every scale.

Groups are rows [G, group] of values that bf16 holds exactly.  Infinities and NaN are left out: the specification does
not say what a quantiser makes of them.
"""

from __future__ import annotations

import numpy as np

from conformance.formats import BF16
from conformance.judge.bounded import Floats
from conformance.judge.components.quantize import FP8, Quantizer

GROUPS_IN_A_ROW = 4
FP4_NEGATIVE_ZERO = 8


def finite_bf16() -> Floats:
    """All 65,280 finite bf16 values, both zeros among them, in the order of their codes."""
    values = BF16.decode(np.arange(1 << 16, dtype=np.uint16))
    return np.asarray(values[np.isfinite(values)])


def positive_bf16(low: float, high: float) -> Floats:
    """All bf16 values in [low, high], ascending; low must be positive."""
    values = finite_bf16()
    return np.asarray(values[(values >= low) & (values <= high)])


def around(values: Floats) -> Floats:
    """Each positive bf16 value with its two neighbours."""
    codes = BF16.encode(values).astype(np.int64)
    return np.asarray(BF16.decode((codes[:, None] + np.array([-1, 0, 1])).reshape(-1).astype(np.uint16)))


def midpoints(quantizer: Quantizer) -> Floats:
    """What lies half-way between neighbouring codes, both signs, ascending in magnitude."""
    codes = np.arange(1 << (quantizer.code.width - 1))
    magnitudes = quantizer.code.decode(codes.astype(np.uint8))
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    halves = (magnitudes[1:] + magnitudes[:-1]) / 2
    return np.asarray(np.stack([halves, -halves], -1).reshape(-1))


def every_value(quantizer: Quantizer, amax: float) -> Floats:
    """Every finite bf16 value up to `amax` in magnitude, `group - 1` of them to a group that `amax` completes."""
    values = finite_bf16()
    values = values[np.abs(values) <= amax]
    beside = quantizer.group - 1
    filled = np.pad(values, (0, -values.size % beside)).reshape(-1, beside)
    return _completed(quantizer, filled, np.full(len(filled), amax))


def every_maximum(quantizer: Quantizer, maxima: Floats) -> Floats:
    """One group to a maximum, filled up with midpoints between codes under the scale that the maximum gives."""
    scale = quantizer.scale.decode(quantizer.scales(maxima))
    pool = midpoints(quantizer)
    beside = quantizer.group - 1
    index = np.arange(len(maxima) * beside).reshape(-1, beside) % len(pool)
    values = pool[index] * scale[:, None]
    values = np.where(np.abs(values) <= maxima[:, None], values, maxima[:, None])
    return _completed(quantizer, values, maxima)


def every_code_under_scale(quantizer: Quantizer, scale: float) -> Floats:
    """Every bf16 value that does not round to zero under `scale` and does not raise it, with the maximum that sets it.

    For E4M3 scales only: the maximum is the bf16 value nearest to six times the scale.
    """
    amax = float(BF16.round(quantizer.code.largest * scale))
    positive = positive_bf16(scale / 8, amax)
    values = np.concatenate([positive, -positive])
    beside = quantizer.group - 1
    filled = np.pad(values, (0, -values.size % beside)).reshape(-1, beside)
    return _completed(quantizer, filled, np.full(len(filled), amax))


def _completed(quantizer: Quantizer, values: Floats, maxima: Floats) -> Floats:
    """Put each group's maximum among its values: the place moves on and the sign alternates from group to group."""
    number = np.arange(len(values))
    place = number % quantizer.group
    groups = np.zeros((len(values), quantizer.group))
    others = np.arange(quantizer.group)[None, :] != place[:, None]
    groups[others] = values.reshape(-1)
    groups[number, place] = np.where(number % 2, -maxima, maxima)
    return groups if quantizer is FP8 else without_negative_zero(quantizer, groups)


def without_negative_zero(quantizer: Quantizer, groups: Floats) -> Floats:
    """Make positive what would become the code -0, on which ports differ: a case of its own asks for it."""
    scale = quantizer.scale.decode(quantizer.scales(np.abs(groups).max(-1)))[:, None]
    return np.where(quantizer.codes(groups, scale) == FP4_NEGATIVE_ZERO, np.abs(groups), groups)


def as_rows(groups: Floats) -> Floats:
    """Several groups to a row [rows, K], so that a scale in another group's place shows; zeros fill the last row."""
    missing = -len(groups) % GROUPS_IN_A_ROW
    filled = np.pad(groups, ((0, missing), (0, 0)))
    return filled.reshape(-1, GROUPS_IN_A_ROW * groups.shape[1])
