"""Values that carry the largest error an honest implementation may have made.

A `Bounded` is a pair of float64 arrays: what exact arithmetic gives between the specification's rounding points, and
how far an implementation in the stated precision may be from it.  Writing a component's equations with the operations
below therefore yields, element by element, the interval in which its result must lie.  Nothing here is tuned: each
operation's docstring derives what it adds.

Rounding points are followed exactly: a value that cannot reach a rounding boundary leaves `rounded` without any error,
one that can leaves it with the distance to the neighbour it may land on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.formats import Format

Floats = npt.NDArray[np.float64]
Index = Any

UNIT_ROUNDOFF = 2.0**-24
"""Half an fp32 ulp, relative: the error of one fp32 operation."""

ELEMENTARY_ROUNDOFF = 4 * UNIT_ROUNDOFF
"""Two fp32 ulps, relative: exp, log1p, sqrt, rsqrt, division as GPU libraries document them (CUDA C++ Programming
Guide, mathematical functions: expf 1, log1pf 1, rsqrtf 2, approximate division 2 ulp)."""

EXP2_ROUNDINGS = 1.25
"""exp(a) as exp2(a log2 e) is off by so many roundings of a: one of the product, and a quarter of one for log2 e
itself, which as an fp32 number is 0.23 units off."""


SMALLEST_NORMAL = 2.0**-126


def flushed(value: Floats) -> Floats:
    """Error of a positive fp32 result that may be flushed to zero: the whole of it, below the normal numbers."""
    result: Floats = np.where((value > 0) & (value < 2 * SMALLEST_NORMAL), SMALLEST_NORMAL, 0.0)
    return result


CONFIDENCE = 4.0
"""Independent errors inside their bounds add up to at most this many times the root of their squares' sum: for errors
uniform in their bounds that is about seven standard deviations, for errors always at their bounds four."""


def accumulated(linear: Floats, square_sum: Floats) -> Floats:
    """Error of a sum whose terms' errors add up to `linear` at worst and whose squares add up to `square_sum`.

    Few uncertain terms are added up at their worst; many of them, being roundings of different values, are taken as
    independent (the argument behind the square root in the `dot` rule of design.md 4).
    """
    result: Floats = np.minimum(linear, CONFIDENCE * np.sqrt(square_sum))
    return result


def sum_roundoff(count: int) -> float:
    """Error of an fp32 sum of `count` terms, as a multiple of the sum of their absolute values.

    Each addition rounds once, so `count * u` always holds.  For many terms the roundings are independent and the error
    grows with the square root of the count (the `dot` rule of design.md section 4); below 256 terms that argument is
    weak, so the factor stays at 16 until the root reaches it.
    """
    return UNIT_ROUNDOFF * min(float(count), max(16.0, float(np.sqrt(count))))


@dataclass(frozen=True)
class Bounded:
    """`value` and `error` >= 0, float64 arrays of one shape; immutable."""

    value: Floats
    error: Floats

    @staticmethod
    def exact(value: npt.ArrayLike) -> Bounded:
        """Wrap a value that every implementation has exactly, such as a golden input."""
        array = np.asarray(value, dtype=np.float64)
        return Bounded(array, np.zeros_like(array))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both arrays."""
        return self.value.shape

    @property
    def low(self) -> Floats:
        """Lower end of the interval."""
        return self.value - self.error

    @property
    def high(self) -> Floats:
        """Upper end of the interval."""
        return self.value + self.error

    @property
    def magnitude(self) -> Floats:
        """Largest absolute value in the interval."""
        return np.abs(self.value) + self.error

    @property
    def is_exact(self) -> bool:
        """Whether no element has an error."""
        return not self.error.any()

    def __getitem__(self, index: Index) -> Bounded:
        return Bounded(self.value[index], self.error[index])

    def reshape(self, *shape: int) -> Bounded:
        """Both arrays reshaped."""
        return Bounded(self.value.reshape(shape), self.error.reshape(shape))

    def swapaxes(self, first: int, second: int) -> Bounded:
        """Both arrays with two axes exchanged."""
        return Bounded(self.value.swapaxes(first, second), self.error.swapaxes(first, second))

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error)

    def __add__(self, other: Bounded | float) -> Bounded:
        """One fp32 addition: the errors add up, the sum rounds once."""
        other = _bounded(other)
        value = self.value + other.value
        error = self.error + other.error
        return Bounded(value, error + UNIT_ROUNDOFF * (np.abs(value) + error))

    def __sub__(self, other: Bounded | float) -> Bounded:
        """One fp32 subtraction."""
        return self + (-_bounded(other))

    def __mul__(self, other: Bounded | float) -> Bounded:
        """One fp32 product: |ab - a'b'| <= |a| eb + |b| ea + ea eb, and the product rounds once."""
        other = _bounded(other)
        value = self.value * other.value
        error = np.abs(self.value) * other.error + self.error * other.magnitude
        return Bounded(value, error + UNIT_ROUNDOFF * (np.abs(value) + error))

    def __truediv__(self, other: Bounded | float) -> Bounded:
        """One fp32 division by a divisor whose interval excludes zero; an interval that holds zero gives infinity."""
        other = _bounded(other)
        with np.errstate(divide="ignore", invalid="ignore"):
            value = self.value / other.value
            smallest = np.abs(other.value) - other.error
            spread = (self.error + np.abs(value) * other.error) / np.where(smallest > 0, smallest, 0.0)
            spread = np.where(self.error + np.abs(value) * other.error == 0, 0.0, spread)
        return Bounded(value, spread + ELEMENTARY_ROUNDOFF * (np.abs(value) + spread))

    def scaled(self, factor: Floats | float) -> Bounded:
        """Multiply by an exact power of two (or zero): no rounding."""
        return Bounded(self.value * factor, self.error * np.abs(factor))

    def sum(self, axis: int | tuple[int, ...], keepdims: bool = False) -> Bounded:
        """An fp32 sum in any order."""
        axes = (axis,) if isinstance(axis, int) else axis
        count = int(np.prod([self.shape[a] for a in axes]))
        worst = self.error.sum(axis=axes, keepdims=keepdims)
        error = accumulated(worst, (self.error**2).sum(axis=axes, keepdims=keepdims))
        absolute = np.abs(self.value).sum(axis=axes, keepdims=keepdims) + error
        return Bounded(self.value.sum(axis=axes, keepdims=keepdims), error + sum_roundoff(count) * absolute)

    def monotone(self, function: Any, roundoff: float = ELEMENTARY_ROUNDOFF) -> Bounded:
        """Apply a monotone elementwise function: the interval's ends bound the image, the result rounds once more."""
        value = function(self.value)
        if self.is_exact:
            return Bounded(value, roundoff * np.abs(value))
        low, high = function(self.low), function(self.high)
        spread = np.maximum(np.abs(high - value), np.abs(low - value))
        return Bounded(value, spread + roundoff * (np.abs(value) + spread))

    def exp(self) -> Bounded:
        """The exponential, also as exp2(a log2 e), and flushed to zero where it is below the normal numbers."""
        result = self.monotone(np.exp)
        return Bounded(
            result.value,
            result.error
            + EXP2_ROUNDINGS * UNIT_ROUNDOFF * self.magnitude * (result.value + result.error)
            + flushed(result.value),
        )

    def sqrt(self) -> Bounded:
        """Square root of a value that is not negative."""
        return self.monotone(lambda x: np.sqrt(np.maximum(x, 0.0)))

    def rsqrt(self) -> Bounded:
        """Reciprocal square root of a positive value."""
        return self.monotone(_rsqrt)

    def clamp(self, low: float = -np.inf, high: float = np.inf) -> Bounded:
        """Clamp to exact limits: no rounding."""
        return self.monotone(lambda x: np.clip(x, low, high), roundoff=0.0)

    def rounded(self, target: Format) -> Bounded:
        """A rounding point: rounding is monotone, so the interval's ends round to the ends of the result."""
        value = target.round(self.value)
        touched = self.error > 0
        error = np.zeros_like(value)
        if touched.any():
            low, high = target.round(np.stack((self.low[touched], self.high[touched])))
            centre = value[touched]
            error[touched] = np.maximum(high - centre, centre - low)
        return Bounded(value, error)


def _bounded(value: Bounded | float) -> Bounded:
    """A constant is uncertain by its own rounding to fp32: implementations hold it in either precision."""
    if isinstance(value, Bounded):
        return value
    constant = np.asarray(value, np.float64)
    return Bounded(constant, np.minimum(np.abs(np.float32(value) - constant), UNIT_ROUNDOFF * np.abs(constant)))


def _rsqrt(x: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        result: Floats = 1.0 / np.sqrt(np.maximum(x, 0.0))
    return result


def dot(a: Bounded, b: Bounded, sum_error: Callable[[int], float] = sum_roundoff) -> Bounded:
    """Products of the rows of `a` [..., M, K] with the rows of `b` [..., N, K], summed over K in fp32: [..., M, N].

    Operands' errors propagate as |a| eb + ea |b| + ea eb and are `accumulated`; the sum in any order adds
    `sum_error(K)` (|a||b|).  Zero operands leave a zero bound: an exact zero is required there.
    """
    value = a.value @ b.value.swapaxes(-1, -2)
    magnitude, b_error = b.magnitude.swapaxes(-1, -2), b.error.swapaxes(-1, -2)
    error = sum_error(a.shape[-1]) * (a.magnitude @ magnitude)
    linear, squares = np.zeros_like(value), np.zeros_like(value)
    if not a.is_exact:
        linear, squares = a.error @ magnitude, a.error**2 @ magnitude**2
    if not b.is_exact:
        linear, squares = linear + np.abs(a.value) @ b_error, squares + a.value**2 @ b_error**2
    return Bounded(value, error + accumulated(linear, squares))


def concatenate(parts: Sequence[Bounded], axis: int) -> Bounded:
    """Join along an axis."""
    return Bounded(
        np.concatenate([part.value for part in parts], axis), np.concatenate([part.error for part in parts], axis)
    )


def take_rows(rows: Bounded, indices: npt.NDArray[np.int64]) -> Bounded:
    """Rows [B, N, d] gathered by [B, T, n] -> [B, T, n, d]; indices must be inside 0...N-1."""
    batch = np.arange(rows.shape[0])[:, None, None]
    return rows[batch, indices]


def where(condition: npt.NDArray[np.bool_], first: Bounded, second: Bounded) -> Bounded:
    """Elementwise choice."""
    return Bounded(np.where(condition, first.value, second.value), np.where(condition, first.error, second.error))


def hull(candidates: Sequence[Bounded]) -> Bounded:
    """The smallest interval around the first candidate's value that holds every candidate."""
    value = candidates[0].value
    error = candidates[0].error
    for other in candidates[1:]:
        error = np.maximum(error, np.maximum(other.high - value, value - other.low))
    return Bounded(value, error)
