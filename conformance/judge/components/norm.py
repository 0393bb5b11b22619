"""RMSNorm (numerics.md 3) on values with error bounds."""

from __future__ import annotations

from conformance.formats import BF16
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, Floats


def rms_norm(x: Bounded, weight: Floats, eps: float) -> Bounded:
    """x [..., K] times rsqrt(mean(x^2) + eps) times weight [K], before the output rounding.

    The three factors may be multiplied in any order: two roundings, as written here.
    """
    mean = (x * x).sum(-1, keepdims=True) * (1.0 / x.shape[-1])
    normed = x * (mean + eps).rsqrt()
    if deviations.active("norm-rounded-before-weight"):
        normed = normed.rounded(BF16)
    return normed * Bounded.exact(weight)
