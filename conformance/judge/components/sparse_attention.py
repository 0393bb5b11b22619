"""Sparse attention with a sink (numerics.md 6, item 5) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.judge import deviations
from conformance.judge.bounded import (
    ELEMENTARY_ROUNDOFF,
    UNIT_ROUNDOFF,
    Bounded,
    Floats,
    accumulated,
    dot,
    sum_roundoff,
)

Bools = npt.NDArray[np.bool_]

PROBABILITY_ROUNDOFF = 2.0**-8
"""Probabilities are rounded to bf16, relative to a maximum that may be running or final: half an ulp, 2^-8 at most."""


def probability_roundoff() -> float:
    """`PROBABILITY_ROUNDOFF`, or none where a declared deviation leaves probabilities in fp32."""
    return 0.0 if deviations.active("fp32-probabilities") else PROBABILITY_ROUNDOFF


def merging_roundoff(top: Floats, count: int) -> Floats:
    """Relative error of the weights by which parts of a list are merged, [...] like the largest scores `top`.

    Workers that share a list of `count` rows each leave a normalised result and the logarithm L of its denominator,
    about `top` + log(count), and are weighted by exp(L - total): both L are rounded, and a log and an exp are taken.
    """
    logarithm: Floats = np.abs(top) + np.log(count + 1.0)
    return 2 * UNIT_ROUNDOFF * (logarithm + 1.0) + 2 * ELEMENTARY_ROUNDOFF


def attend(q: Bounded, kv: Bounded, counts: Floats, maybe: Bools | None, sink: Floats, scale: float) -> Bounded:
    """Output before its rounding, [B,T,H,d], of queries [B,T,H,d] over rows kv [B,N,d].

    `counts` [B,T,N] says how often each row is listed; `maybe` marks rows that an honest selection may list or not.
    The softmax weights enter the numerator rounded to bf16 and the denominator unrounded, in fp32, with one rescaling a
    change of the running maximum, or one weight for each part of a split list.  A query without any row gives zeros.
    """
    heads = q.swapaxes(1, 2)
    rows = kv.reshape(kv.shape[0], 1, *kv.shape[1:])
    scores = dot(heads, rows) * scale
    listed = counts[:, None]
    possible = (listed > 0) | (False if maybe is None else maybe[:, None])
    sinks = sink[None, :, None, None]
    top = np.maximum(np.where(possible, scores.value, -np.inf).max(-1, keepdims=True, initial=-np.inf), sinks)
    offset = scores.value - top
    weight = np.where(possible, np.exp(np.minimum(offset, 0.0)), 0.0)
    # exp of a value with an absolute error e is off by expm1(e) relative; |offset| u is the exp2 form's product; two
    # more roundings belong to the rescaling by the running maximum.
    relative = (
        np.expm1(np.minimum(scores.error, 700.0)) + UNIT_ROUNDOFF * (np.abs(offset) * 2 + 2) + ELEMENTARY_ROUNDOFF
    )
    times = np.maximum(listed, 1.0)
    error = np.where(possible, weight * relative * times, 0.0)
    # A row that may or may not be listed enters or leaves with its whole weight: no rounding, so added at its worst.
    optional = np.zeros_like(weight) if maybe is None else np.where(maybe[:, None], weight * times, 0.0)
    weight = weight * listed

    sink_weight = np.exp(sinks - top)
    count = kv.shape[1]
    denominator = weight.sum(-1, keepdims=True) + sink_weight
    denominator_error = (error + optional).sum(-1, keepdims=True) + (
        sum_roundoff(count + 1) * denominator
        + sink_weight * (ELEMENTARY_ROUNDOFF + UNIT_ROUNDOFF * np.abs(sinks - top))
    )
    absolute = np.abs(rows.value) + rows.error
    numerator = weight @ rows.value
    rounding = error + (weight + error) * probability_roundoff()
    # Equal probabilities round alike: their errors are one error, and only those of different ones are independent.
    alike = _repeated(weight)
    together, apart = np.where(alike, rounding, 0.0), np.where(alike, 0.0, rounding)
    # One weight for all rows of a part: its error is not independent from row to row.
    common = weight * (sum_roundoff(count) + merging_roundoff(top, count))
    numerator_error = (
        accumulated(
            apart @ absolute + weight @ rows.error,
            apart**2 @ absolute**2 + weight**2 @ rows.error**2,
        )
        + (together + optional + common) @ absolute
    )
    value = numerator / denominator
    smallest = np.maximum(denominator - denominator_error, sink_weight * 0.5)
    spread = (numerator_error + np.abs(value) * denominator_error) / smallest
    error = spread + ELEMENTARY_ROUNDOFF * (np.abs(value) + spread)
    if maybe is not None:
        # Whatever is listed, the output is a convex combination of possible rows and zero, up to the roundings above.
        reach = np.where(possible[..., None], absolute[:, :, None], 0.0).max(-2) * (1 + 2 * PROBABILITY_ROUNDOFF)
        error = np.minimum(error, reach + np.abs(value))
    return Bounded(value, error).swapaxes(1, 2)


def _repeated(weights: Floats) -> Bools:
    """Which positive weights of a row [..., N] occur more than once, up to float64's own rounding."""
    order = np.argsort(weights, -1)
    ordered = np.take_along_axis(weights, order, -1)
    near = (ordered[..., 1:] - ordered[..., :-1] <= 1e-12 * ordered[..., 1:]) & (ordered[..., :-1] > 0)
    equal = np.zeros_like(weights, dtype=np.bool_)
    equal[..., 1:] |= near
    equal[..., :-1] |= near
    result = np.zeros_like(equal)
    np.put_along_axis(result, order, equal, -1)
    return result


def counts_of(indices: npt.NDArray[np.int64], rows: int) -> Floats:
    """How often each of `rows` rows stands in lists [B,T,n] with -1 for none: [B,T,rows]."""
    batch, length, _ = indices.shape
    counts = np.zeros((batch, length, rows + 1))
    b, t, _ = np.indices(indices.shape)
    np.add.at(counts, (b, t, np.where(indices < 0, rows, indices)), 1.0)
    return counts[..., :rows]
