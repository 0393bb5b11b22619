"""Experts and their sum (numerics.md 7) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, sum_roundoff
from conformance.judge.components.hyper_connections import sigmoid
from conformance.judge.components.linear import Parameters, quantized

Ints = npt.NDArray[np.int64]


def expert(config: ModelConfig, weights: Parameters, x: Bounded, routing_weight: Bounded | None) -> Bounded:
    """One expert on x [N,D] with fp32 routing weights [N] or none; before the last rounding: [N,D]."""
    gate = quantized(x, weights["w1.weight"]).rounded(BF16).clamp(high=config.swiglu_limit)
    up = quantized(x, weights["w3.weight"]).rounded(BF16).clamp(-config.swiglu_limit, config.swiglu_limit)
    hidden = gate * sigmoid(gate) * up
    if routing_weight is not None and deviations.active("routing-weight-after-expert"):
        return quantized(hidden.rounded(BF16), weights["w2.weight"]).rounded(BF16) * routing_weight.reshape(-1, 1)
    if routing_weight is not None:
        hidden = hidden * routing_weight.reshape(-1, 1)
    return quantized(hidden.rounded(BF16), weights["w2.weight"])


def combined(config: ModelConfig, weights: Parameters, x: Bounded, routing_weights: Bounded, indices: Ints) -> Bounded:
    """Routed experts as chosen, [N,k] each, plus the shared ones, summed in fp32; before the last rounding: [N,D]."""
    value, error, absolute = (np.zeros(x.shape) for _ in range(3))
    for index in np.unique(indices):
        tokens, slots = np.nonzero(indices == index)
        part = expert(config, weights.within(f"experts.{index}."), x[tokens], routing_weights[tokens, slots])
        if not deviations.active("routing-weight-after-expert"):
            part = part.rounded(BF16)
        # A token may list an expert more than once.
        np.add.at(value, tokens, part.value)
        np.add.at(error, tokens, part.error)
        np.add.at(absolute, tokens, part.magnitude)
    terms = indices.shape[-1]
    if config.n_shared_experts:
        shared = expert(config, weights.within("shared_experts."), x, None).rounded(BF16)
        value, error, absolute = value + shared.value, error + shared.error, absolute + shared.magnitude
        terms += 1
    return Bounded(value, error + sum_roundoff(terms) * absolute)
