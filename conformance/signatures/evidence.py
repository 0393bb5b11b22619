"""How a port's answer is compared with the expected one and with that of a reference that makes a mistake.

Every judged result is seen element by element (a choice query by query): an element is *wrong* when the port is outside
the case's own bound, and *explained* when it is wrong and the faulty reference gives the same value.  It is
*contradicted* when the port is right where the mistake would show.

Same means within what honest implementations differ by, not bit-equal: a port that makes the mistake may well add in
another order.  The case's own bound says how much that is, scaled up where the mistake makes values larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.formats import FORMATS
from conformance.judge.choices import CandidateBlocks, GateChoice, RowSets, Selection
from conformance.judge.expectations import CODE_DTYPES, Exact, Expectation, NoRows, Ulp, Verdict, Within, formed
from conformance.judge.own_drafts import AfterOwnDrafts
from conformance.judge.own_scores import DistantScores, OwnCandidates, OwnSelection, SameSelection
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRows
from conformance.tensors import Tensor

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MALFORMED_ALIKE = 0.98
"""Share of elements that must be alike, to the last place, where a result has another form than it must have."""
SMALLEST = 1e-300
LARGEST_FACTOR = 2.0**40
"""Values that a mistake makes larger than this are compared as if they were."""


@dataclass(frozen=True)
class Counts:
    """What a comparison found."""

    explained: float = 0.0
    unexplained: float = 0.0
    """Wrong, and not the faulty reference's value."""
    contradicted: float = 0.0
    """Right, where the faulty reference has another value."""
    nearness: float = 0.0
    """Sum over explained elements of the distance to the faulty value over that to the expected one."""
    next_to: float = 0.0
    """Explained elements that are numbers next to the expected ones: two mistakes may well meet there."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.explained + other.explained,
            self.unexplained + other.unexplained,
            self.contradicted + other.contradicted,
            self.nearness + other.nearness,
            self.next_to + other.next_to,
        )


class Evidence:
    """One result of the port beside what it had to be."""

    wrong: float = 0.0
    """Wrong elements of the port."""

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        """Hold the port's result against the one of a reference that makes a mistake."""
        raise NotImplementedError

    def look_closer(self) -> None:
        """Where no element is wrong by itself: count what is wrong of them all together, such as their order."""


def evidence(rule: Expectation, port: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Evidence | None:
    """What one rule has to say; None for a rule about something else than values, or without the results it needs."""
    if isinstance(rule, OfRows):
        rows = list(rule.rows)
        if any(tap not in port or port[tap].shape[1:2] != (rule.length,) for tap in rule.taps):
            return None
        inner = evidence(rule.rule, _picked(port, rule.taps, rows), _picked(reference, rule.taps, rows))
        return None if inner is None else _OfRows(inner, rule.taps, rows)
    if isinstance(rule, DistantScores):
        rule = rule.rule
    if isinstance(rule, SameSelection):
        return None
    if isinstance(rule, NoRows):
        return _Malformed(rule.tap, port[rule.tap]) if rule.tap in port and not rule.judge(port).passed else None
    if any(tap not in reference for tap in rule.taps):
        return None
    missing = next((tap for tap in rule.taps if tap not in port), None)
    if missing is not None:
        return _Missing(missing)
    if isinstance(rule, AfterOwnDrafts):
        # What follows from ids that are none says no more than they do, and they have a rule of their own.
        following = rule.following(port)
        return None if isinstance(following, Verdict) else evidence(following, port, reference)
    if isinstance(rule, Within):
        bound = rule.expected.error + 0.5 * FORMATS[rule.dtype].spacing(rule.expected.value)
        return _numbers(rule.tap, rule.dtype, port, rule.expected.value, bound)
    if isinstance(rule, Ulp):
        return _numbers(
            rule.tap, rule.dtype, port, rule.expected, rule.allowance * FORMATS[rule.dtype].spacing(rule.expected)
        )
    if isinstance(rule, Exact) and rule.expected.dtype not in CODE_DTYPES:
        values = np.asarray(rule.expected.values(), np.float64)
        return _numbers(rule.tap, rule.expected.dtype, port, values, np.zeros(values.shape))
    if isinstance(rule, Exact):
        return _Codes(rule.tap, port[rule.tap], rule.expected)
    if isinstance(rule, Propagated):
        return _Whole(rule, port[rule.tap])
    if isinstance(rule, GateChoice):
        return _Gate(port, reference)
    if isinstance(rule, Selection | OwnSelection | RowSets):
        return _Lists(rule.tap, port[rule.tap], reference[rule.tap])
    # Any other rule accepts several answers: what it does not accept is held against the reference's.
    tap = rule.taps[0]
    if isinstance(rule, CandidateBlocks | OwnCandidates) or not rule.judge(port).passed:
        return _Codes(tap, port[tap], reference[tap])
    return None


def _picked(results: Mapping[str, Tensor], taps: tuple[str, ...], rows: list[int]) -> Mapping[str, Tensor]:
    return {tap: results[tap][:, rows] for tap in taps if tap in results}


class _OfRows(Evidence):
    def __init__(self, inner: Evidence, taps: tuple[str, ...], rows: list[int]) -> None:
        self._inner, self._taps, self._rows = inner, taps, rows
        self.wrong = inner.wrong

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        return self._inner.compare(_picked(faulty, self._taps, self._rows))


def _numbers(tap: str, dtype: str, port: Mapping[str, Tensor], value: Floats, bound: Floats) -> Evidence | None:
    actual = formed(tap, "composed", port[tap], dtype, value.shape)
    if isinstance(actual, Verdict):
        return _Malformed(tap, port[tap])
    return _Numbers(tap, dtype, np.asarray(actual.values(), np.float64), value, bound)


class _Numbers(Evidence):
    """Floating-point elements with a bound each."""

    def __init__(self, tap: str, dtype: str, port: Floats, value: Floats, bound: Floats) -> None:
        self._tap, self._format = tap, FORMATS[dtype]
        self._dtype = dtype
        self._port, self._value, self._bound = port, value, bound
        self._distance = _distance(port, value)
        self._wrong: Bools = self._distance > bound * (1 + 1e-9)
        self.wrong = float(self._wrong.sum())

    def look_closer(self) -> None:
        nearest = self._format.round(self._value)
        self._wrong = self._port != nearest
        self._bound = np.zeros_like(self._bound)
        self._distance = _distance(self._port, nearest)
        self.wrong = float(self._wrong.sum())

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        tensor = faulty.get(self._tap)
        if tensor is None or tensor.shape != self._port.shape:
            return Counts(unexplained=max(1.0, self.wrong))
        there = np.asarray(tensor.values(), np.float64)
        apart = _distance(self._port, there)
        # A mistake that makes values larger or smaller does so to their roundings.  What is expected to be exact is
        # compared to the last place only: a mistake may take sums off a lattice.
        with np.errstate(invalid="ignore", divide="ignore"):
            factor = np.minimum(_sizes(there) / np.maximum(_sizes(self._value), SMALLEST), LARGEST_FACTOR)
            allowed = self._bound * factor + self._format.spacing(np.where(np.isfinite(there), there, 0.0))
        # Where nothing is bounded nothing is said: any value will do.
        same = (apart <= allowed) | ~np.isfinite(self._bound)
        explained = self._wrong & same & (apart < self._distance)
        with np.errstate(invalid="ignore", divide="ignore"):
            near = np.where(explained & np.isfinite(apart) & np.isfinite(self._distance), apart / self._distance, 0.0)
        return Counts(
            float(explained.sum()),
            float((self._wrong & ~explained).sum()),
            float((~self._wrong & ~same).sum()),
            float(np.nan_to_num(near).sum()),
            float((explained & (self._distance <= 1.5 * self._format.spacing(self._value))).sum()),
        )


def _distance(a: Floats, b: Floats) -> Floats:
    """|a - b|; zero for equal infinities and for two NaNs, infinite where only one is."""
    with np.errstate(invalid="ignore"):
        plain = np.abs(a - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    result: Floats = np.where(equal, 0.0, np.where(np.isnan(plain), np.inf, plain))
    return result


def _sizes(values: Floats) -> Floats:
    """Root mean square of the finite elements along the last axis, kept as an axis of one; of all, for single ones."""
    axis = -1 if values.ndim and values.shape[-1] > 1 else None
    squares = np.where(np.isfinite(values), values, 0.0) ** 2
    result: Floats = np.sqrt(squares.mean(axis, keepdims=True))
    return result


class _Malformed(Evidence):
    """A result of another shape or type than it must have: the mistake must give the same form and values."""

    def __init__(self, tap: str, port: Tensor) -> None:
        self._tap, self._port = tap, port
        self.wrong = 1.0

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        tensor = faulty.get(self._tap)
        if tensor is None or tensor.shape != self._port.shape or tensor.dtype != self._port.dtype:
            return Counts(unexplained=1.0)
        a, b = np.asarray(self._port.values(), np.float64), np.asarray(tensor.values(), np.float64)
        rounding = FORMATS[tensor.dtype].spacing(np.where(np.isfinite(b), b, 0.0)) if tensor.dtype in FORMATS else 0.0
        same = bool((_distance(a, b) <= rounding).mean() >= MALFORMED_ALIKE) if a.size else True
        return Counts(explained=1.0) if same else Counts(unexplained=1.0)


class _Missing(Evidence):
    """A result that did not come back: nor must it with the mistake."""

    def __init__(self, tap: str) -> None:
        self._tap = tap
        self.wrong = 1.0

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        return Counts(unexplained=1.0) if self._tap in faulty else Counts(explained=1.0)


class _Codes(Evidence):
    """Codes, integers and masks: equal or not."""

    def __init__(self, tap: str, port: Tensor, expected: Tensor) -> None:
        self._tap = tap
        self._port = port
        formed_port = formed(tap, "exact", port, expected.dtype, expected.shape)
        self._formed = not isinstance(formed_port, Verdict)
        self._data: Any = port.data if isinstance(formed_port, Verdict) else formed_port.data
        self._wrong = self._data != expected.data if self._formed else np.ones((), np.bool_)
        self.wrong = float(self._wrong.sum())

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        tensor = faulty.get(self._tap)
        if tensor is None or tensor.shape != self._port.shape:
            return Counts(unexplained=max(1.0, self.wrong))
        same = self._data == tensor.data
        if not self._formed:
            return Counts(explained=1.0) if bool(same.all()) else Counts(unexplained=1.0)
        return Counts(
            float((self._wrong & same).sum()), float((self._wrong & ~same).sum()), float((~self._wrong & ~same).sum())
        )


class _Lists(Evidence):
    """Lists of rows along the last axis, compared as sets; where all sets are right, as lists."""

    def __init__(self, tap: str, port: Tensor, expected: Tensor) -> None:
        self._tap = tap
        self._port, self._expected = port, expected
        self._in_order = False
        self._formed = port.shape == expected.shape
        self._wrong: Bools = self._differ(expected) if self._formed else np.ones((), np.bool_)
        self.wrong = float(self._wrong.sum())

    def look_closer(self) -> None:
        self._in_order = self._formed
        if self._formed:
            self._wrong = self._differ(self._expected)
        self.wrong = float(self._wrong.sum())

    def _differ(self, other: Tensor) -> Bools:
        view = _in_order if self._in_order else _sorted
        result: Bools = (view(self._port) != view(other)).any(-1)
        return result

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        tensor = faulty.get(self._tap)
        if tensor is None or tensor.shape != self._port.shape:
            return Counts(unexplained=max(1.0, self.wrong))
        same = ~self._differ(tensor)
        if not self._formed:
            return Counts(explained=1.0) if bool(same.all()) else Counts(unexplained=1.0)
        return Counts(
            float((self._wrong & same).sum()), float((self._wrong & ~same).sum()), float((~self._wrong & ~same).sum())
        )


def _in_order(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.data.astype(np.int64)


def _sorted(tensor: Tensor) -> npt.NDArray[Any]:
    return np.sort(tensor.data.astype(np.int64), -1)


class _Gate(Evidence):
    """Experts and their weights, token by token, in any order."""

    RELATIVE = 2.0**-16
    """How far weights may be apart: some rounding of fp32 scores, far less than bf16 would do."""

    def __init__(self, port: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
        self._port = self._by_expert(port)
        self._wrong = ~self._same(self._by_expert(reference))
        self.wrong = float(self._wrong.sum())

    @staticmethod
    def _by_expert(results: Mapping[str, Tensor]) -> tuple[npt.NDArray[np.int64], Floats]:
        indices = results["gate_indices"].data.astype(np.int64)
        weights = np.asarray(results["gate_weights"].values(), np.float64)
        if weights.shape != indices.shape:
            return indices, np.full(indices.shape, np.nan)
        order = np.argsort(indices, -1, kind="stable")
        return np.take_along_axis(indices, order, -1), np.take_along_axis(weights, order, -1)

    def _same(self, other: tuple[npt.NDArray[np.int64], Floats]) -> Bools:
        indices, weights = other
        if indices.shape != self._port[0].shape:
            return np.zeros(self._port[0].shape[:-1], np.bool_)
        near = _distance(weights, self._port[1]) <= self.RELATIVE * np.nan_to_num(np.abs(weights), posinf=0.0)
        result: Bools = ((indices == self._port[0]) & near).all(-1)
        return result

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        if not {"gate_indices", "gate_weights"} <= faulty.keys():
            return Counts(unexplained=max(1.0, self.wrong))
        same = self._same(self._by_expert(faulty))
        return Counts(
            float((self._wrong & same).sum()), float((self._wrong & ~same).sum()), float((~self._wrong & ~same).sum())
        )


class _Whole(Evidence):
    """A result whose allowance is a distance of the whole tensor: one element."""

    def __init__(self, rule: Propagated, port: Tensor) -> None:
        self._rule, self._tensor = rule, port
        self._formed = port.shape == rule.recorded.shape
        self._port = np.asarray(port.values(), np.float64).reshape(-1)
        expected = np.asarray(rule.recorded.values(), np.float64).reshape(-1)
        self._expected_norm = float(np.linalg.norm(expected))
        self._distance = float(np.linalg.norm(self._port - expected)) if self._formed else np.inf
        allowed = rule.allowance.largest * self._expected_norm
        # What is judged over all positions of a case is wrong below the largest allowance of a call already.
        self.wrong = float(not self._distance <= min(allowed, rule.allowance.median * self._expected_norm))

    def compare(self, faulty: Mapping[str, Tensor]) -> Counts:
        tensor = faulty.get(self._rule.tap)
        if tensor is None or tensor.shape != self._tensor.shape or not self._formed:
            return Counts(unexplained=self.wrong)
        there = np.asarray(tensor.values(), np.float64).reshape(-1)
        apart = float(np.linalg.norm(self._port - there))
        if np.isnan(apart):
            apart = 0.0 if np.array_equal(self._port, there, equal_nan=True) else np.inf
        size = max(self._expected_norm, float(np.linalg.norm(there[np.isfinite(there)])))
        same = apart <= self._rule.allowance.largest * size
        if self.wrong:
            near = apart / self._distance if np.isfinite(self._distance) else 0.0
            return Counts(explained=1.0, nearness=near) if same and near < 1 else Counts(unexplained=1.0)
        return Counts(contradicted=float(not same))
