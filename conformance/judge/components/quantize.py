"""Quantisers (numerics.md 2), exactly on exact inputs and as hulls on inputs with an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.formats import BF16, E2M1, E4M3, E8M0, Format, power_of_two_scale
from conformance.judge.bounded import Bounded, Floats

Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Quantizer:
    """One row of the table in numerics.md 2."""

    name: str
    group: int
    floor: float
    code: Format
    scale: Format

    def scales(self, amax: Floats) -> Codes:
        """Scale codes of groups with these maxima (any shape)."""
        floored = np.maximum(amax, self.floor)
        if self.scale is E8M0:
            return power_of_two_scale(floored.astype(np.float32), self.code.largest)
        # True fp32 division of an fp32 maximum, clamped, then rounded to nearest even.
        quotient = (floored.astype(np.float32) / np.float32(self.code.largest)).astype(np.float64)
        return E4M3.encode(np.minimum(quotient, E4M3.largest)).astype(np.uint8)

    def codes(self, x: Floats, scale: Floats) -> Codes:
        """Codes of values under decoded scales that broadcast to them: a true fp32 division, clamped, RNE."""
        return self.code.encode(self._quotient(x, scale)).astype(np.uint8)

    def _quotient(self, x: Floats, scale: Floats) -> Floats:
        with np.errstate(over="ignore"):
            quotient = (x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
        return np.clip(quotient, -self.code.largest, self.code.largest)

    def grouped(self, x: Floats) -> Floats:
        """[..., K] -> [..., K / group, group]."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)

    def quantize(self, x: Floats) -> tuple[Codes, Codes]:
        """Exact input [..., K] -> codes [..., K] (FP4 unpacked) and scale codes [..., K / group]."""
        groups = self.grouped(x)
        scales = self.scales(np.abs(groups).max(-1))
        return self.codes(groups, self.scale.decode(scales)[..., None]).reshape(x.shape), scales

    def fake(self, x: Bounded) -> Bounded:
        """Quantise and dequantise: the value is exact for exact inputs.

        With an input error, a scale and a code may be any that the intervals reach.  Code times scale is monotone in
        the input for one scale, so the hull over all reachable scales of both ends' images holds every honest result.
        """
        value = self.grouped(x.value)
        nominal = self._dequantized(value, self.scales(np.abs(value).max(-1)))
        if x.is_exact:
            return Bounded(nominal.reshape(x.shape), np.zeros(x.shape))
        ends = np.stack((self.grouped(x.low), self.grouped(x.high)))
        magnitudes = np.abs(ends)
        smallest = np.where((ends[0] <= 0) & (ends[1] >= 0), 0.0, magnitudes.min(0))
        first, last = self.scales(np.stack((smallest.max(-1), magnitudes.max(0).max(-1)))).astype(np.int64)
        upper, lower = nominal, nominal
        for offset in range(int((last - first).max(initial=0)) + 1):
            of_low, of_high = self._dequantized(ends, np.minimum(first + offset, last).astype(np.uint8))
            upper, lower = np.maximum(upper, of_high), np.minimum(lower, of_low)
        error = np.maximum(upper - nominal, nominal - lower)
        return Bounded(nominal.reshape(x.shape), error.reshape(x.shape))

    def _dequantized(self, groups: Floats, scales: Any) -> Floats:
        scale = self.scale.decode(scales)[..., None]
        # What the codes decode to, without making them.
        return BF16.round(self.code.round(self._quotient(groups, scale)) * scale)


FP8 = Quantizer("fp8", 32, 1e-4, E4M3, E8M0)
FP4_E8M0 = Quantizer("fp4_e8m0", 32, 6 * 2.0**-126, E2M1, E8M0)
FP4_E4M3 = Quantizer("fp4_e4m3", 16, 6 * 2.0**-9, E2M1, E4M3)
