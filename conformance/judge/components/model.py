"""The end of the model (numerics.md 9) on values with error bounds."""

from __future__ import annotations

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components.hyper_connections import read
from conformance.judge.components.linear import Parameters, product
from conformance.judge.components.norm import rms_norm


def head(config: ModelConfig, weights: Parameters, h: Bounded, pre: Bounded) -> tuple[Bounded, Bounded]:
    """Final norm [B,T,D] before its rounding, and logits [B,T,V], of h [B,T,S,D] read with pre [B,T,S]."""
    final = rms_norm(read(h, pre).rounded(BF16), weights["norm.weight"], config.norm_eps)
    return final, product(final.rounded(BF16), weights["head.weight"])
