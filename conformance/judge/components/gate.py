"""Routing scores (numerics.md 7) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.judge.bounded import ELEMENTARY_ROUNDOFF, Bounded, Floats, flushed
from conformance.judge.components.linear import Parameters, product

SOFTPLUS_THRESHOLD = 20.0


def softplus(z: Floats) -> Floats:
    """log(1 + exp(z)), linear above the usual threshold; the step there is below 3e-9 and kept monotone by the max."""
    return np.where(z > SOFTPLUS_THRESHOLD, z, np.log1p(np.exp(np.minimum(z, SOFTPLUS_THRESHOLD))))


def scores(weights: Parameters, x: Bounded, image_mask: npt.NDArray[np.bool_] | None) -> tuple[Bounded, Bounded]:
    """Scores of x [N,D] over the experts, and the same with the selection bias: [N,E] each."""
    logits = product(x, weights["weight"])
    activated = logits.monotone(softplus, roundoff=2 * ELEMENTARY_ROUNDOFF)
    plain = Bounded(activated.value, activated.error + flushed(activated.value)).sqrt()
    bias = np.broadcast_to(weights["bias"], plain.shape)
    if image_mask is not None:
        bias = np.where(image_mask[:, None], weights["bias_vl"], bias)
    return plain, plain + Bounded.exact(bias)
