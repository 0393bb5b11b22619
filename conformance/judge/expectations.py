"""How a result is compared with what it must be: one class a mode.

Every expectation looks at one or more named results and answers with a `Verdict`.  The allowed error is a function of
(case, element) that the expectation carries; cosine and relative errors are never gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from conformance.formats import FORMATS
from conformance.judge import accumulators
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.histogram import Histogram, histogram, of_equality
from conformance.tensors import Tensor

Mode = Literal["exact", "ulp", "dot", "composed", "choice", "propagated"]
Axes = tuple[str, ...]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

CODE_DTYPES = frozenset({"U8", "F8_E4M3", "F8_E8M0", "F4_E2M1", "I32", "I64", "BOOL"})
BIAS_SIGMAS = 5.0
STATISTICS_MINIMUM = 256
"""Fewer distinct elements than this say nothing about the bias and spread of roundings."""


@dataclass(frozen=True)
class Verdict:
    """What was found for one tap: the worst element, and how many were wrong."""

    tap: str
    mode: Mode
    passed: bool
    count: int = 0
    wrong: int = 0
    ratio: float = 0.0
    """Error over bound of the worst element; infinity where no error is allowed."""
    index: tuple[int, ...] = ()
    axes: Axes = ()
    actual: float | None = None
    expected: float | None = None
    bound: float | None = None
    actual_bits: str = ""
    expected_bits: str = ""
    bias: float | None = None
    """Mean signed error in standard deviations, where the mode tests it."""
    message: str = ""
    note: str = ""
    """What a reader must know of the rule itself, such as a bound that is measured and not derived."""
    distances: Sequence[float] = ()
    """Mode `propagated`: the relative distance of each position, for the median over a whole case."""
    median_allowance: float = np.inf
    """What that median may be."""
    scale: float = 0.0
    """Mode `propagated`: |log2| of the norm over the recorded one."""
    histogram: Histogram = field(default_factory=dict)
    """Elements by error over bound, where each element has a bound of its own."""


class Expectation(Protocol):
    """One rule over named results."""

    @property
    def taps(self) -> tuple[str, ...]:
        """The results it needs; the first one names it in reports."""

    @property
    def mode(self) -> Mode:
        """The mode shown in reports."""

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """The recorded results, if any: they must satisfy the rule themselves."""

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Judge results that hold every name in `taps`."""


def formed(tap: str, mode: Mode, actual: Tensor, dtype: str, shape: Sequence[int]) -> Tensor | Verdict:
    """The result in its logical dtype, or the verdict that its shape or dtype is wrong.

    bf16 may come in a wider type when every value is exactly a bf16 number: a port without the type can still answer,
    but not without the rounding.  float64 is rounded where fp32 is due, codes may come as U8, and I64 for I32.
    """
    if tuple(actual.shape) != tuple(shape):
        message = f"wrong shape {list(actual.shape)}, expected {list(shape)}"
        return Verdict(tap, mode, False, ratio=np.inf, message=message)
    if actual.dtype == dtype:
        return actual
    if actual.dtype == "U8" and dtype in ("F8_E4M3", "F8_E8M0", "F4_E2M1"):
        return Tensor(dtype, actual.data)
    if actual.dtype == "I64" and dtype == "I32" and ((actual.data >= -(2**31)) & (actual.data < 2**31)).all():
        return Tensor(dtype, actual.data.astype(np.int32))
    if actual.dtype == "F64" and dtype == "F32":
        return Tensor.from_values(actual.values(), dtype)
    if actual.dtype in ("F64", "F32") and dtype == "BF16":
        values = actual.values()
        narrow = FORMATS[dtype].round(values)
        unequal = (narrow != values) & ~np.isnan(values)
        if not unequal.any():
            return Tensor.from_values(values, dtype)
        index = first_index(unequal)
        message = f"{actual.dtype} result is not rounded to {dtype}: {float(values[index])!r} at {list(index)}"
        return Verdict(tap, mode, False, int(unequal.size), int(unequal.sum()), float("inf"), index, message=message)
    return Verdict(tap, mode, False, ratio=np.inf, message=f"wrong dtype {actual.dtype}, expected {dtype}")


def bits_of(tensor: Tensor, index: tuple[int, ...]) -> str:
    """The element's bit pattern in hexadecimal."""
    raw = np.ascontiguousarray(tensor.data[index]).tobytes()
    return "0x" + raw[::-1].hex()


class OneTap:
    """What rules on a single tap have in common; `recorded` is a golden value that must satisfy the rule itself."""

    tap: str
    recorded: Tensor | None = None

    @property
    def taps(self) -> tuple[str, ...]:
        """The one tap judged."""
        return (self.tap,)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """The recorded value, if one was given."""
        return {} if self.recorded is None else {self.tap: self.recorded}


@dataclass(frozen=True)
class Exact(OneTap):
    """Mode `exact`: every element equal; in floating point -0 equals +0, in codes it does not."""

    tap: str
    expected: Tensor
    axes: Axes
    note: str = ""

    mode: Mode = "exact"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Compare element by element; NaN equals NaN."""
        actual = formed(self.tap, self.mode, results[self.tap], self.expected.dtype, self.expected.shape)
        if isinstance(actual, Verdict):
            return actual
        if self.expected.dtype in CODE_DTYPES:
            different = actual.data != self.expected.data
        else:
            a, e = actual.values(), self.expected.values()
            different = (a != e) & ~(np.isnan(a) & np.isnan(e))
        count = int(different.size)
        if not different.any():
            return Verdict(
                self.tap, self.mode, True, count, axes=self.axes, note=self.note, histogram=of_equality(count, 0)
            )
        index = first_index(different)
        return Verdict(
            self.tap,
            self.mode,
            False,
            count,
            int(different.sum()),
            float("inf"),
            index,
            self.axes,
            float(actual.values()[index]),
            float(self.expected.values()[index]),
            0.0,
            bits_of(actual, index),
            bits_of(self.expected, index),
            message=f"{int(different.sum())} of {count} elements differ",
            note=self.note,
            histogram=of_equality(count, int(different.sum())),
        )


@dataclass(frozen=True)
class Within(OneTap):
    """Modes `dot` and `composed`: each element inside the interval that `expected` allows, rounded to `dtype`.

    `expected` stands before the final rounding.  Rounding is monotone, so the values allowed are those from
    round(value - error) to round(value + error); the bound shown is error + half an ulp of the output.  An infinite
    expected value must be met exactly.
    """

    tap: str
    expected: Bounded
    dtype: str
    axes: Axes
    mode: Mode = "composed"
    recorded: Tensor | None = None
    terms: int = 0
    """Length of the sum behind each element, for the message of a `dot` that is beyond any rounding."""
    note: str = ""

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Error over bound for each element, NaN positions, and in mode `dot` the bias and spread over the tensor."""
        actual = formed(self.tap, self.mode, results[self.tap], self.dtype, self.expected.shape)
        if isinstance(actual, Verdict):
            return actual
        number_format = FORMATS[self.dtype]
        value = self.expected.value
        low, high = number_format.round(np.stack((self.expected.low, self.expected.high)))
        got = actual.values()
        bound = self.expected.error + 0.5 * number_format.spacing(value)
        ratio = error_over_bound(got, value, low, high, bound)
        count = int(ratio.size)
        if count == 0:
            return Verdict(self.tap, self.mode, True, 0, axes=self.axes, note=self.note)
        wrong = ratio > 1.0
        index = first_index(wrong) if wrong.any() else first_index(ratio == ratio.max())
        statistical = self.mode == "dot" and not accumulators.current().truncates
        scaled = _distinct_errors(got, value, bound) if statistical else np.zeros(0)
        bias = _bias(scaled)
        message = self._message(ratio, wrong, bias, scaled)
        return Verdict(
            self.tap,
            self.mode,
            not message,
            count,
            int(wrong.sum()),
            float(ratio.max()),
            index,
            self.axes,
            float(got[index]),
            float(value[index]),
            float(bound[index]),
            bits_of(actual, index),
            bits_of(Tensor.from_values(value[index], self.dtype), ()),
            bias,
            message,
            self.note,
            histogram=histogram(ratio, int((np.isneginf(low) & np.isposinf(high) & ~np.isnan(got)).sum())),
        )

    def _message(self, ratio: Floats, wrong: Bools, bias: float | None, scaled: Floats) -> str:
        """What is wrong, in words; empty when nothing is."""
        if wrong.any():
            text = f"{int(wrong.sum())} of {ratio.size} elements beyond their bound"
            if self.terms and ratio.max() > max(1.0, np.sqrt(self.terms)):
                text += "; not rounding: no order of the sum comes this far"
            return text
        if bias is not None and abs(bias) > BIAS_SIGMAS:
            return f"every element in bounds, but errors lean to one side by {bias:+.1f} sigma: not round to nearest"
        if scaled.size >= STATISTICS_MINIMUM and (scaled**2).mean() > _largest_mean_square(scaled.size):
            spread = float(np.sqrt((scaled**2).mean()))
            return f"every element in bounds, but errors are {spread:.2f} of them on average: rounding spreads evenly"
        return ""


def _distinct_errors(got: Floats, value: Floats, bound: Floats) -> Floats:
    """Signed error over bound, one for each distinct expected value.

    Equal elements (repeated streams, repeated tokens) round alike and would count many times in a statistic.
    """
    usable = np.isfinite(value) & np.isfinite(got) & np.isfinite(bound)
    _, unique = np.unique(value[usable], return_index=True)
    errors: Floats = ((got[usable] - value[usable]) / bound[usable])[unique]
    return errors


def _bias(scaled: Floats) -> float | None:
    """Sum of signed errors over the root of their squares' sum: a standard normal for independent honest roundings."""
    norm = float(np.sqrt((scaled**2).sum()))
    if scaled.size < STATISTICS_MINIMUM or norm == 0.0:
        return None
    return float(scaled.sum()) / norm


def _largest_mean_square(count: int) -> float:
    """Mean square of errors spread evenly up to their bounds, 1/3, plus five deviations of such a mean.

    Honest errors spread at most so: a rounding to nearest is even over half an ulp, sums stay far below their bound.
    The square of an even variable has variance 1/5 - 1/9 = 4/45.
    """
    return 1.0 / 3.0 + BIAS_SIGMAS * float(np.sqrt(4.0 / 45.0 / count))


JUST_ABOVE_ONE = float(np.nextafter(1.0, 2.0))


def error_over_bound(got: Floats, value: Floats, low: Floats, high: Floats, bound: Floats) -> Floats:
    """|got - value| over `bound`; above 1 exactly where `got` is outside [low, high], the rounded ends of the interval.

    An interval without ends (an undecidable element) allows everything but NaN; otherwise infinite or NaN expected
    values must be met exactly.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.abs(got - value)
        ratio = np.where(distance == 0, 0.0, distance / bound)
        inside = (got >= low) & (got <= high)
        ratio = np.where(inside, np.minimum(ratio, 1.0), np.maximum(ratio, JUST_ABOVE_ONE))
        # `value` lies between finite ends.
        if np.isfinite(low + high + got).all():
            return ratio
    open_ended = np.isneginf(low) & np.isposinf(high) & ~np.isnan(got)
    special = ~np.isfinite(value) | ~np.isfinite(got)
    matches = (got == value) | (np.isnan(got) & np.isnan(value))
    result: Floats = np.where(open_ended, 0.0, np.where(special, np.where(matches, 0.0, np.inf), ratio))
    return result


@dataclass(frozen=True)
class Ulp(OneTap):
    """Mode `ulp`: elementwise functions, at most `allowance` steps of the output format from the float64 value."""

    tap: str
    expected: Floats
    dtype: str
    allowance: int
    axes: Axes
    recorded: Tensor | None = None
    note: str = ""

    mode: Mode = "ulp"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Distance from the exact value in units of the format's spacing there."""
        actual = formed(self.tap, self.mode, results[self.tap], self.dtype, self.expected.shape)
        if isinstance(actual, Verdict):
            return actual
        spacing = FORMATS[self.dtype].spacing(self.expected)
        got = actual.values()
        if not got.size:
            return Verdict(self.tap, self.mode, True, axes=self.axes, note=self.note)
        ratio = np.abs(got - self.expected) / (self.allowance * spacing)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        wrong = ratio > 1.0
        index = first_index(wrong) if wrong.any() else first_index(ratio == ratio.max())
        return Verdict(
            self.tap,
            self.mode,
            not wrong.any(),
            int(ratio.size),
            int(wrong.sum()),
            float(ratio.max()),
            index,
            self.axes,
            float(got[index]),
            float(self.expected[index]),
            float(self.allowance * spacing[index]),
            bits_of(actual, index),
            bits_of(Tensor.from_values(self.expected[index], self.dtype), ()),
            message=f"{int(wrong.sum())} of {ratio.size} elements beyond {self.allowance} ulp" if wrong.any() else "",
            note=self.note,
            histogram=histogram(ratio),
        )


def first_index(mask: Any) -> tuple[int, ...]:
    """Index of the first true element in row-major order."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


@dataclass(frozen=True)
class OwnArgmax:
    """Greedy output ids are a largest element of the logits that came with them, whatever those are."""

    tap: str
    logits: str

    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """Ids and the logits they were chosen from."""
        return (self.tap, self.logits)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Nothing recorded is needed."""
        return {}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Each id in range, and no logit larger than its own."""
        logits = results[self.logits].values()
        ids = formed(self.tap, self.mode, results[self.tap], "I32", logits.shape[:-1])
        if isinstance(ids, Verdict):
            return ids
        in_range = (ids.data >= 0) & (ids.data < logits.shape[-1])
        own = np.take_along_axis(logits, np.where(in_range, ids.data, 0)[..., None], -1)[..., 0]
        wrong = ~in_range | ~(own >= logits.max(-1))
        if not wrong.any():
            return Verdict(self.tap, self.mode, True, int(wrong.size), axes=("request",))
        index = first_index(wrong)
        message = f"id {int(ids.data[index])} has a smaller logit than id {int(logits[index].argmax())}"
        return Verdict(
            self.tap, self.mode, False, int(wrong.size), int(wrong.sum()), np.inf, index, ("request",), message=message
        )


@dataclass(frozen=True)
class NoRows:
    """No group was completed: the tap is left out, or holds no rows along axis 1."""

    tap: str

    mode: Mode = "exact"

    @property
    def taps(self) -> tuple[str, ...]:
        """Nothing is required."""
        return ()

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Nothing recorded is needed."""
        return {}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Fails when rows came out."""
        rows = results[self.tap].shape[1] if self.tap in results and len(results[self.tap].shape) > 1 else 0
        message = f"{rows} rows came out although no group is complete" if rows else ""
        return Verdict(self.tap, self.mode, not rows, 1, int(rows > 0), np.inf if rows else 0.0, message=message)
