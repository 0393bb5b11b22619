"""Hand-made vectors of `sparse_attention`: lists, the sink, and the running maximum (numerics.md 6, item 5).

Where every listed row has the same score its probability is exactly one, unless the maximum takes a larger sink in, and
the result is a quotient of small whole numbers: that leaves an honest implementation nothing but the division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import exact
from conformance.cases.vectors import weights as made
from conformance.judge import deviations
from conformance.judge.bounded import ELEMENTARY_ROUNDOFF, Bounded, Floats, sum_roundoff
from conformance.judge.components.sparse_attention import (
    attend,
    counts_of,
    merging_roundoff,
    probability_roundoff,
)
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
AXES = ("request", "position", "head", "feature")
WIDTH = 8
NO_SINK = -3e4
"""A sink this far below the scores has no weight at all: exp underflows in every precision used."""
LIST_LENGTHS = (63, 64, 65, 128, 640)
"""Around one block of 64, two whole blocks, and the released list of 128 + 512."""


@dataclass(frozen=True)
class Inputs:
    """One call: q [B,T,H,d], rows [B,N,d], indices [B,T,n], sink [H], and the scale of the scores."""

    q: Floats
    rows: Floats
    indices: Ints
    sink: Floats
    scale: float = WIDTH**-0.5


@dataclass(frozen=True)
class Vector:
    """A vector by what it catches; `equal` says that all listed scores are equal and probabilities therefore one."""

    name: str
    why: str
    flags: tuple[str, ...]
    inputs: Callable[[], list[Inputs]]
    equal: bool = False


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    for vector in VECTORS:
        yield Case(
            f"sparse_attention/{vector.name}",
            "core",
            "composed",
            vector.why,
            "numerics.md 6, item 5",
            partial(_steps, vector),
            flags=vector.flags,
            source="hand-made",
        )


def _steps(vector: Vector) -> Iterator[Step]:
    for number, inputs in enumerate(vector.inputs()):
        q, rows = Tensor.from_values(inputs.q, "BF16"), Tensor.from_values(inputs.rows, "BF16")
        arguments = {
            "q": q,
            "kv": rows,
            "indices": Tensor("I32", inputs.indices.astype(np.int32)),
            "sink": Tensor.from_values(inputs.sink, "F32"),
            "scale": inputs.scale,
        }
        rules = partial(_rules, inputs, q, rows, vector.equal)
        yield Step(Call("sparse_attention", arguments), rules, Place(None, [f"list {number}"]))


def _rules(inputs: Inputs, q: Tensor, rows: Tensor, equal: bool) -> list[Expectation]:
    counts = counts_of(inputs.indices, inputs.rows.shape[1])
    sink = np.asarray(inputs.sink, np.float32).astype(np.float64)
    if equal:
        expected = mean_of_listed(q.values(), rows.values(), counts, sink, inputs.scale)
    else:
        expected = attend(exact(q), exact(rows), counts, None, sink, inputs.scale)
    return [Within("attn_o", expected, "BF16", AXES)]


def mean_of_listed(q: Floats, rows: Floats, counts: Floats, sink: Floats, scale: float) -> Bounded:
    """Sum of the listed rows over their number plus the sink's weight, where all listed scores of a head are equal.

    Rows are whole numbers, so the sums are exact in fp32; the sink's exponential and the division round, and so do the
    weights with which parts of a split list are merged.
    """
    scores = np.einsum("bthd,bnd->bthn", q, rows) * scale
    listed = np.broadcast_to((counts > 0)[:, :, None], scores.shape)
    top = np.where(listed, scores, -np.inf).max(-1)
    assert (np.where(listed, scores, top[..., None]) == top[..., None]).all(), "scores differ"
    sums = (counts @ rows)[:, :, None] * np.ones_like(q)
    # Relative to a maximum that takes the sink in, probabilities below it are rounded.
    rounded = np.where(sink > top, probability_roundoff(), 0.0)[..., None]
    spread = (counts @ np.abs(rows))[:, :, None]
    largest = np.where(np.isneginf(top), 0.0, np.maximum(top, sink))[..., None]
    error = np.abs(sums) * rounded + spread * (merging_roundoff(largest, rows.shape[1]) + sum_roundoff(rows.shape[1]))
    if deviations.active("fp32-probabilities"):
        # Divided before the value product, as a softmax is, equal probabilities round too.
        roundoff = ELEMENTARY_ROUNDOFF + sum_roundoff(rows.shape[1])
        error = error + spread * roundoff
    total = Bounded(sums, error)
    # Without any listed row the quotient is zero over whatever the sink weighs.
    sink_weight = Bounded.exact(np.where(np.isneginf(top), 0.0, sink - top)).exp()
    denominator = Bounded.exact(counts.sum(-1)[..., None] * np.ones_like(top)) + sink_weight
    return total / denominator.reshape(*top.shape, 1)


def _whole_rows(name: str, batch: int, count: int) -> Floats:
    """Rows of whole numbers from -12 to 12, all different."""
    return np.round(4 * made.normal(f"sparse_attention.{name}", batch, count, WIDTH)).clip(-12, 12)


def _zero_scores(
    name: str, lists: list[list[int]], count: int, sink: tuple[float, ...] = (NO_SINK, NO_SINK)
) -> list[Inputs]:
    """One call a list: a zero query gives every row score zero."""
    q = np.zeros((1, 1, len(sink), WIDTH))
    rows = _whole_rows(name, 1, count)
    return [Inputs(q, rows, np.asarray([[listed]]), np.asarray(sink)) for listed in lists]


def _empty() -> list[Inputs]:
    lists = [[-1], [-1] * 5, [-1] * 64, [-1] * 65]
    calls = [call for sink in (NO_SINK, 0.0, 30.0) for call in _zero_scores("empty", lists, 4, (sink, 0.0))]
    # One query of three sees nothing, between two that do.
    rows = _whole_rows("empty", 1, 4)
    q = np.zeros((1, 3, 2, WIDTH))
    indices = np.asarray([[[0, 1, -1], [-1, -1, -1], [2, -1, 3]]])
    return [*calls, Inputs(q, rows, indices, np.asarray([NO_SINK, 1.0]))]


def _duplicates() -> list[Inputs]:
    return _zero_scores("duplicates", [[1, 1, 2], [1, 2, 1], [2, 2, 2], [3, -1, 3, 0]], 4)


def _in_window_and_compressed() -> list[Inputs]:
    """Rows 0-3 are a window, rows 4-7 the compressed rows of the same tokens (ratio 1): both are listed."""
    window = _whole_rows("window-and-compressed", 1, 4)
    rows = np.concatenate([window, window], 1)
    q = np.zeros((1, 1, 2, WIDTH))
    return [Inputs(q, rows, np.asarray([[[0, 1, 2, 3, 5, 7]]]), np.asarray([NO_SINK, 0.0]))]


def _minus_one() -> list[Inputs]:
    """The first and the last row, which -1 may be read as, are larger than the rest."""
    lists = [[-1, 2, 3], [2, -1, 3], [2, 3, -1], [-1, 2, -1, 3, -1], [*[-1] * 63, 2, *[-1] * 64, 3]]
    calls = _zero_scores("minus-one", lists, 6)
    for call in calls:
        call.rows[:, [0, -1]] = 96.0
    return calls


def _lengths_equal() -> list[Inputs]:
    return _zero_scores("lengths", [list(range(n)) for n in LIST_LENGTHS], max(LIST_LENGTHS))


def _visibility() -> list[Inputs]:
    """Query t lists rows 0...t, as a prefill does; two requests with rows of their own."""
    rows = _whole_rows("visibility", 2, 6)
    indices = np.broadcast_to(np.where(np.tri(6, dtype=np.bool_), np.arange(6), -1), (2, 6, 6)).copy()
    return [Inputs(np.zeros((2, 6, 2, WIDTH)), rows, indices, np.asarray([NO_SINK, 1.0]))]


def _very_negative() -> list[Inputs]:
    """Scores of -10,000 each: 100 times -100."""
    q = np.zeros((1, 1, 2, WIDTH))
    q[..., 0] = -100.0
    rows = _whole_rows("very-negative", 1, 70)
    rows[..., 0] = 100.0
    lists = [list(range(3)), list(range(70))]
    return [Inputs(q, rows, np.asarray([[listed]]), np.full(2, NO_SINK), 1.0) for listed in lists]


def _sinks() -> list[Inputs]:
    return _zero_scores("sinks", [[0, 1, 2], list(range(70))], 70, (-3.0, 0.0, 2.0, 5.0))


def _sink_above() -> list[Inputs]:
    return _zero_scores("sink-above", [[0, 1]], 3, (50.0, 20.0, 8.0))


def _scored(name: str, rows: int, heads: int = 2, queries: int = 1) -> tuple[Floats, Floats]:
    q = 2 * made.normal(f"sparse_attention.{name}.q", 1, queries, heads, WIDTH)
    return q, made.normal(f"sparse_attention.{name}.rows", 1, rows, WIDTH)


def _sink_below_maximum() -> list[Inputs]:
    """Scores around six: a sink that is not taken relative to the maximum weighs 400 times too little."""
    q, rows = np.zeros((1, 1, 3, WIDTH)), _whole_rows("sink-below", 1, 4)
    q[..., 0], rows[..., 0] = 6.0, [2.0, 3.0, 2.75, 2.5]
    return [Inputs(q, rows, np.asarray([[[0, 1, 2, 3]]]), np.asarray([1.0, 4.0, 7.0]))]


def _two_keys() -> list[Inputs]:
    q, rows = np.zeros((1, 1, 2, WIDTH)), np.zeros((1, 2, WIDTH))
    q[..., 0], q[..., 1] = 1.0, 2.0
    rows[0, 0, :4], rows[0, 1, :4] = [1.0, 0.0, 8.0, -4.0], [0.0, 1.0, -8.0, 2.0]
    return [Inputs(q, rows, np.asarray([[[0, 1]]]), np.asarray([NO_SINK, 0.0]))]


def _growing(order: Callable[[Ints], Ints], lengths: tuple[int, ...] = LIST_LENGTHS) -> list[Inputs]:
    """Scores that grow along the rows up to twelve above the first, listed in some order."""
    calls = []
    for n in lengths:
        q, rows = _scored("growing", n)
        q[..., 0], rows[..., 0] = WIDTH**0.5, np.linspace(-4.0, 8.0, n)
        calls.append(Inputs(q, rows, order(np.arange(n))[None, None], np.asarray([NO_SINK, 3.0])))
    return calls


def _ascending(rows: Ints) -> Ints:
    return rows


def _reversed(rows: Ints) -> Ints:
    return rows[::-1]


def _shuffled(rows: Ints) -> Ints:
    return rows[np.argsort(rows * 37 % 641, kind="stable")]


VECTORS = (
    Vector(
        "nothing-listed/zeros",
        "Fails when a query without any valid index gives NaN, the mean of all rows, or row 0.",
        ("empty-list-not-zero", "minus-one-read-as-row"),
        _empty,
        equal=True,
    ),
    Vector(
        "duplicate-index/counts-twice",
        "Fails when a list is made a set: an index that is listed twice counts twice.",
        ("duplicates-removed",),
        _duplicates,
        equal=True,
    ),
    Vector(
        "same-token-twice/window-and-compressed",
        "Fails when a token that stands in the window is dropped from the compressed rows.",
        ("same-rows-removed",),
        _in_window_and_compressed,
        equal=True,
    ),
    Vector(
        "minus-one/front-middle-end",
        "Fails when -1 is read as the first or last row, or ends the list.",
        (
            "minus-one-read-as-row",
            "list-ends-at-minus-one",
            "maximum-of-last-block",
        ),
        _minus_one,
        equal=True,
    ),
    Vector(
        "list-length/around-64",
        "Fails when the last, partly filled block of a list is dropped, or rows beyond its end are read.",
        ("last-list-block-dropped", "unlisted-rows-read"),
        _lengths_equal,
        equal=True,
    ),
    Vector(
        "lists-by-query/ascending-visibility",
        "Fails when all queries read one query's list, or requests read one another's rows.",
        ("list-of-first-query", "unlisted-rows-read", "requests-mixed"),
        _visibility,
        equal=True,
    ),
    Vector(
        "equal-scores/very-negative",
        "Fails when the running maximum starts at 0 instead of -1e30: every probability then underflows.",
        ("maximum-starts-at-zero", "no-maximum"),
        _very_negative,
        equal=True,
    ),
    Vector(
        "sink/own-value-per-head",
        "Fails when the sink is left out, scaled, shared by all heads, or adds a row of its own.",
        (
            "sink-missing",
            "sink-scaled",
            "sink-of-first-head",
            "sink-per-block",
            "sink-has-value",
            "bf16-truncated",
        ),
        _sinks,
        equal=True,
    ),
    Vector(
        "sink/above-all-scores",
        "Fails when a sink far above the scores overflows, or is clipped to the largest score.",
        ("sink-missing", "sink-clipped"),
        _sink_above,
        equal=True,
    ),
    Vector(
        "sink/below-maximum",
        "Fails when the sink's exponential is not taken relative to the maximum of the scores.",
        ("sink-not-shifted", "sink-scaled"),
        _sink_below_maximum,
    ),
    Vector(
        "scale/two-keys",
        "Fails when scores are scaled by another width or not at all.",
        ("scale-wrong",),
        _two_keys,
    ),
    Vector(
        "running-maximum/in-last-block",
        "Fails when sums of earlier blocks are not rescaled once a later block raises the maximum.",
        ("no-rescaling", "numerator-not-rescaled", "last-list-block-dropped"),
        partial(_growing, _ascending),
    ),
    Vector(
        "running-maximum/in-first-block",
        "Fails when the maximum of the newest block replaces a larger one before it.",
        (
            "scores-in-bf16",
            "scale-wrong",
        ),
        partial(_growing, _reversed),
    ),
    Vector(
        "running-maximum/any-order",
        "Fails when the result depends on the order of the list by more than rounding.",
        (
            "no-rescaling",
            "bf16-accumulator",
        ),
        partial(_growing, _shuffled, (65, 640)),
    ),
)
