"""Sampling, judged as a choice where the noise is given, and as a distribution where it is the port's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.judge.bounded import Floats
from conformance.judge.choices import dominated
from conformance.judge.expectations import Axes, Mode, OneTap, Verdict, first_index, formed
from conformance.tensors import Tensor

UNIT = 2.0**-24
"""Unit roundoff of fp32."""
ELEMENTARY = 8.0
"""Roundings of a key beyond those that grow with its logarithm: exp or log (2 ulp each), sum, two divisions."""
SMALLEST_NORMAL = 2.0**-126
ALPHA = 1e-6
"""How often an honest port fails one test of its draws: seldom enough that no run of the suite sees it."""
FEWEST_EXPECTED = 50.0
"""Expected draws of every bin: the chi-square distribution holds far into its tail where no bin is nearly empty."""


def log_probabilities(logits: Floats, temperature: float) -> Floats:
    """log softmax(logits / temperature), [..., V]."""
    scaled = logits / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def key_interval(logits: Floats, exponentials: Floats, temperature: float) -> tuple[Floats, Floats]:
    """Logarithm of softmax(logits / temperature) / exponentials, [..., V]: lowest and highest in fp32.

    First-order: a relative error of a factor is an absolute one of its logarithm.  logits/T, its difference to the
    largest, and the logarithms of the form argmax(logits/T - log exponential), which is as good, are each rounded once.
    A probability below the smallest normal number may be zero.
    """
    with np.errstate(divide="ignore"):
        noise = np.log(exponentials)
    scaled = logits / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    key = log_probabilities(logits, temperature) - noise
    sizes = np.abs(scaled) + np.abs(shifted) + np.abs(noise) + np.abs(scaled - noise)
    error = UNIT * (np.where(np.isfinite(sizes), sizes, 0.0) + ELEMENTARY)
    smallest = math.log(SMALLEST_NORMAL)
    underflows = key + noise < smallest + 1.0
    low = np.where(underflows, -np.inf, key - error)
    high = np.where(underflows, np.maximum(key, smallest - noise) + error, key + error)
    return low, np.where(np.isneginf(key), -np.inf, high)


@dataclass(frozen=True)
class SampledChoice(OneTap):
    """Ids int32 [B]: the largest key of logits and exponentials [B,V], or any that fp32 cannot tell from it."""

    tap: str
    logits: Floats
    exponentials: Floats
    temperature: float

    mode: Mode = "choice"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Each id in range, and no other token whose key is surely larger."""
        batch, vocabulary = self.logits.shape
        ids = formed(self.tap, self.mode, results[self.tap], "I32", (batch,))
        if isinstance(ids, Verdict):
            return ids
        in_range = (ids.data >= 0) & (ids.data < vocabulary)
        kept = np.arange(vocabulary) == np.where(in_range, ids.data, 0)[:, None]
        low, high = key_interval(self.logits, self.exponentials, self.temperature)
        beaten, best_out, worst_in = dominated(kept, np.ones_like(kept), low, high)
        wrong = ~in_range | beaten
        axes = ("request",)
        if not wrong.any():
            return Verdict(self.tap, self.mode, True, batch, axes=axes)
        index = first_index(wrong)
        message = (
            f"id {int(ids.data[index])} is not a token"
            if not in_range[index]
            else (
                f"{int(wrong.sum())} of {batch} ids are not the largest key: id {int(ids.data[index])} has at most "
                f"{worst_in[index]:.6g}, id {int(low[index].argmax())} at least {best_out[index]:.6g}"
            )
        )
        return Verdict(self.tap, self.mode, False, batch, int(wrong.sum()), np.inf, index, axes, message=message)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` degrees of freedom >= statistic), by its finite sum; exact but for rounding.

    For even degrees 2m it is exp(-x/2) sum_{j<m} (x/2)^j / j!; for odd ones erfc(sqrt(x/2)) plus the same sum over
    half-integers (Abramowitz and Stegun 26.4.4 and 26.4.5).
    """
    half = statistic / 2.0
    if half <= 0.0:
        return 1.0
    odd = degrees % 2
    total = math.erfc(math.sqrt(half)) if odd else 0.0
    for j in range(degrees // 2):
        power = j + 0.5 if odd else float(j)
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1.0))
    return min(total, 1.0)


def bins(probabilities: Floats, count: int) -> Any:
    """Bin of every token, int [V]: tokens by falling probability, put together until a bin expects enough draws."""
    order = np.argsort(-probabilities, kind="stable")
    numbers = np.zeros(len(order), dtype=np.int64)
    bin_number, expected = 0, 0.0
    left = float(probabilities.sum() * count)
    for token in order:
        numbers[token] = bin_number
        expected += float(probabilities[token]) * count
        left -= float(probabilities[token]) * count
        # The last bin takes what would not fill one of its own.
        if expected >= FEWEST_EXPECTED and left >= FEWEST_EXPECTED:
            bin_number, expected = bin_number + 1, 0.0
    return numbers


def pearson(observed: Floats, expected: Floats) -> float:
    """Pearson's statistic."""
    return float(((observed - expected) ** 2 / expected).sum())


@dataclass(frozen=True)
class Distribution(OneTap):
    """Draws int32 [B,n]: each row from softmax(logits / temperature), and independent of the draw and row before.

    Two tests a row: the counts of tokens, and the counts of successive pairs of bins.  Neighbouring rows have the same
    logits; a third test counts how often they draw the same bins in the same place.  Pearson's chi-square, `ALPHA`
    each; tokens of probability zero are never drawn.
    """

    tap: str
    logits: Floats
    temperature: float
    count: int

    mode: Mode = "choice"

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """In range and possible, then the tests; the ratio shown is the logarithm of the p-value over that of ALPHA."""
        batch, vocabulary = self.logits.shape
        drawn = formed(self.tap, self.mode, results[self.tap], "I32", (batch, self.count))
        if isinstance(drawn, Verdict):
            return drawn
        ids = drawn.data.astype(np.int64)
        probabilities = np.exp(log_probabilities(self.logits, self.temperature))
        outside = (ids < 0) | (ids >= vocabulary)
        safe = np.clip(ids, 0, vocabulary - 1)
        impossible = np.take_along_axis(probabilities, safe, -1) == 0.0
        for wrong, what in ((outside, "is not a token"), (impossible, "has probability zero")):
            if wrong.any():
                index = first_index(wrong)
                message = f"draw {int(ids[index])} {what} ({int(wrong.sum())} of {wrong.size})"
                return self._refused(index, np.inf, int(wrong.sum()), message)
        worst, least, where = "", 1.0, 0
        for row in range(batch):
            numbers = bins(probabilities[row], self.count)
            for what, p_value in self._tests(row, numbers, probabilities[row], ids):
                if p_value < least:
                    worst, least, where = what, p_value, row
        ratio = math.log(max(least, 1e-300)) / math.log(ALPHA)
        if least >= ALPHA:
            return Verdict(self.tap, self.mode, True, ids.size, ratio=ratio, axes=("request", "draw"), note=self.note)
        message = f"{worst}: p = {least:.2g}, an honest port is below {ALPHA:g} once in {1 / ALPHA:,.0f} tests"
        return self._refused((where, 0), ratio, ids.size, message)

    @property
    def note(self) -> str:
        """What a reader must know of the rule."""
        return f"draws are tested by chi-square, each test at a false alarm rate of {ALPHA:g}"

    def _refused(self, index: tuple[int, ...], ratio: float, wrong: int, message: str) -> Verdict:
        count = self.logits.shape[0] * self.count
        axes: Axes = ("request", "draw")
        return Verdict(self.tap, self.mode, False, count, wrong, ratio, index, axes, message=message, note=self.note)

    def _tests(self, row: int, numbers: Any, probabilities: Floats, ids: Any) -> list[tuple[str, float]]:
        size = int(numbers.max()) + 1
        if size < 2:
            return []
        share: Floats = np.bincount(numbers, weights=probabilities, minlength=size).astype(np.float64)
        observed = np.bincount(numbers[ids[row]], minlength=size).astype(np.float64)
        tests = [("token frequencies differ", chi_square_tail(pearson(observed, share * self.count), size - 1))]
        # Tokens in two parts as equal as may be: all four cells of pairs are full, whatever the distribution.
        upper = ((np.cumsum(share) - share / 2)[numbers] > 0.5).astype(np.int64)
        if 0 < upper.sum() < len(upper):
            half = upper[ids[row]]
            first, second = half[0 : self.count // 2 * 2 : 2], half[1::2][: self.count // 2]
            tests.append(("successive draws depend on each other", _dependence(first, second)))
            if row and np.array_equal(self.logits[row], self.logits[row - 1]):
                tests.append(("requests draw the same tokens", _dependence(half, upper[ids[row - 1]])))
        return tests


def _dependence(first: Any, second: Any) -> float:
    """p-value of Pearson's test of independence of two bits, one degree of freedom."""
    table = np.bincount(2 * first + second, minlength=4).reshape(2, 2).astype(np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    if (expected == 0).any():
        # One of the two never changes: then the frequencies say so.
        return 1.0
    return chi_square_tail(pearson(table, expected), 1)
