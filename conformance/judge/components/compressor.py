"""Compression of the token stream (numerics.md 6.2) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components.linear import Parameters, product
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.quantize import FP4_E4M3
from conformance.judge.components.rotary import rotate

Ints = npt.NDArray[np.int64]


def projections(config: ModelConfig, layer: int, weights: Parameters, x: Bounded) -> tuple[Bounded, Bounded | None]:
    """kv and gate of every token, fp32 [B,T,d]; a ratio-1 layer has no gate."""
    kv = product(x, weights["compressor.wkv.weight"])
    if config.ratio(layer) == 1:
        return kv, None
    return kv, product(x, weights["compressor.wgate.weight"])


def latents(config: ModelConfig, layer: int, weights: Parameters, x: Bounded) -> Bounded:
    """One latent a complete group of x [B,T,D] from position 0: [B, T div r, d], before the last rounding."""
    kv, gate = projections(config, layer, weights, x)
    if gate is None:
        pooled = kv.rounded(BF16)
    else:
        ratio = config.ratio(layer)
        batch, length, width = kv.shape
        whole = length // ratio
        kv = kv[:, : whole * ratio].reshape(batch, whole, ratio, width)
        gate = gate[:, : whole * ratio].reshape(batch, whole, ratio, width)
        weight = (gate - Bounded.exact(gate.value.max(2, keepdims=True))).exp()
        pooled = ((weight * kv).sum(2) / weight.sum(2)).rounded(BF16)
    return rms_norm(pooled, weights["compressor.norm.weight"], config.norm_eps)


def compressed_rows(config: ModelConfig, layer: int, latent: Bounded, positions: Ints) -> Bounded:
    """Cached rows of latents [B,n,d] whose groups begin at `positions` [B,n]: turned and fake-quantised."""
    return FP4_E4M3.fake(rotate(config, layer, latent, positions).rounded(BF16))
