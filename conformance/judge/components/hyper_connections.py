"""Hyper-connections (numerics.md 5) on values with error bounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conformance.config import ModelConfig
from conformance.judge.bounded import (
    ELEMENTARY_ROUNDOFF,
    EXP2_ROUNDINGS,
    UNIT_ROUNDOFF,
    Bounded,
    Floats,
    accumulated,
    dot,
    flushed,
)

SECOND_ORDER = 1.01
"""First-order propagation leaves out products of relative errors, below 1e-4 of the first order here."""


class Coefficients(NamedTuple):
    """pre, post [B,T,S] and comb [B,T,S,S]."""

    pre: Bounded
    post: Bounded
    comb: Bounded


def sigmoid(x: Bounded) -> Bounded:
    """1 / (1 + exp(-x)): exp, one addition and one division."""
    result = x.monotone(lambda v: 1.0 / (1.0 + np.exp(-v)), roundoff=2 * ELEMENTARY_ROUNDOFF + UNIT_ROUNDOFF)
    # exp(-x) as exp2 is off by that much of itself; d sigmoid / d log exp(-x) = -sigmoid (1 - sigmoid).
    exponential = EXP2_ROUNDINGS * UNIT_ROUNDOFF * x.magnitude
    return Bounded(result.value, result.error + exponential * result.value * (1 - result.value) + flushed(result.value))


def coefficients(config: ModelConfig, h: Bounded, fn: Floats, scale: Floats, base: Floats) -> Coefficients:
    """From the stream h [B,T,S,D] with fn [(2+S)S, S*D], scale [3] and base [(2+S)S]."""
    batch, length, streams, width = h.shape
    flat = h.reshape(batch, length, streams * width)
    mean = (flat * flat).sum(-1, keepdims=True) * (1.0 / (streams * width))
    mixed = dot(flat, Bounded.exact(fn)) * (mean + config.norm_eps).rsqrt()
    pre = sigmoid(mixed[..., :streams] * float(scale[0]) + Bounded.exact(base[:streams])) + config.hc_eps
    post_base = Bounded.exact(base[streams : 2 * streams])
    post = sigmoid(mixed[..., streams : 2 * streams] * float(scale[1]) + post_base).scaled(2.0)
    logits = mixed[..., 2 * streams :] * float(scale[2]) + Bounded.exact(base[2 * streams :])
    comb = sinkhorn(logits.reshape(batch, length, streams, streams), config.hc_sinkhorn_iters, config.hc_eps)
    return Coefficients(pre, post, comb)


def sinkhorn(logits: Bounded, rounds: int, eps: float) -> Bounded:
    """Row softmax + eps, one column normalisation, then `rounds - 1` times rows and columns: [..., S, S].

    Dividing intervals by intervals would double the error at each of some forty divisions although the map does not
    amplify: numerator and divisor move together.  So errors are propagated to first order with the map's own Jacobian.
    In relative terms, c' = c / (sum c + eps) has d log c'_k = d log c_k - sum_l w_l d log c_l with
    w = c / (sum c + eps) over the row or column.  Each step also makes a fresh relative rounding error of S additions
    and one division.  Going backwards, M is the Jacobian from after step k to the result; what remains of each step's
    fresh errors is |M| times them, and the steps' roundings are accumulated as independent ones.
    """
    streams = logits.shape[-1]
    shifted = logits - Bounded.exact(logits.value.max(-1, keepdims=True))
    soft = np.exp(shifted.value)
    soft_sum = soft.sum(-1, keepdims=True)
    values = [soft / soft_sum + eps]
    absolute = logits.error + UNIT_ROUNDOFF * (2 * np.abs(shifted.value) + 2 * np.abs(logits.value))
    fresh_exp = absolute + ELEMENTARY_ROUNDOFF
    # Softmax: an entry's own exponential, minus the row's weighted mean of them; the sum, the division and + eps round.
    weights = soft / soft_sum
    fresh = [
        fresh_exp + (weights * fresh_exp).sum(-1, keepdims=True) + ELEMENTARY_ROUNDOFF + (streams + 2) * UNIT_ROUNDOFF
    ]
    jacobians = []
    step_error = ELEMENTARY_ROUNDOFF + (streams + 1) * UNIT_ROUNDOFF
    for axis in [-2] + [-1, -2] * (rounds - 1):
        current = values[-1]
        divisor = current.sum(axis, keepdims=True) + eps
        values.append(current / divisor)
        jacobians.append(_normalisation_jacobian(values[-1], axis))
        fresh.append(np.full_like(current, step_error))
    cells = streams * streams
    onward = np.broadcast_to(np.eye(cells), (*logits.shape[:-2], cells, cells))
    inherited = fresh[0].reshape(*logits.shape[:-2], cells, 1)
    linear = fresh[-1].reshape(*logits.shape[:-2], cells)
    squares = linear**2
    for jacobian, error in zip(reversed(jacobians[1:]), reversed(fresh[1:-1]), strict=True):
        onward = onward @ jacobian
        left = (np.abs(onward) @ error.reshape(*logits.shape[:-2], cells, 1))[..., 0]
        linear, squares = linear + left, squares + left**2
    onward = onward @ jacobians[0]
    relative = accumulated(linear, squares) + (np.abs(onward) @ inherited)[..., 0]
    result = values[-1]
    return Bounded(result, SECOND_ORDER * relative.reshape(result.shape) * result)


def _normalisation_jacobian(weights: Floats, axis: int) -> Floats:
    """d log out / d log in of one normalisation over rows (-1) or columns (-2): [..., S*S, S*S]."""
    streams = weights.shape[-1]
    cells = streams * streams
    index = np.arange(cells)
    line = index // streams if axis == -1 else index % streams
    same_line = line[:, None] == line[None, :]
    flat = weights.reshape(*weights.shape[:-2], 1, cells)
    jacobian: Floats = np.eye(cells) - np.where(same_line, flat, 0.0)
    return jacobian


def read(h: Bounded, pre: Bounded) -> Bounded:
    """sum_j pre[j] h[j]: [B,T,D], before the output rounding."""
    return (h * pre[..., None]).sum(-2)


def write(y: Bounded, h: Bounded, post: Bounded, comb: Bounded) -> Bounded:
    """h'[k] = post[k] y + sum_j comb[j,k] h[j]: [B,T,S,D], before the output rounding."""
    batch, length, width = y.shape
    carried = dot(comb.swapaxes(-1, -2), h.swapaxes(-1, -2))
    return y.reshape(batch, length, 1, width) * post[..., None] + carried
