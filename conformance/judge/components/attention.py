"""The projections around the sparse attention (numerics.md 6, items 1 and 6) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded, dot
from conformance.judge.components.linear import Parameters, quantized
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.rotary import rotate

Ints = npt.NDArray[np.int64]


def query_latent(config: ModelConfig, weights: Parameters, x: Bounded) -> Bounded:
    """x [B,T,D] -> [B,T,q_lora_rank], before the last rounding."""
    projected = quantized(x, weights["wq_a.weight"]).rounded(BF16)
    return rms_norm(projected, weights["q_norm.weight"], config.norm_eps)


def queries(config: ModelConfig, layer: int, weights: Parameters, q_latent: Bounded, positions: Ints) -> Bounded:
    """q_latent [B,T,q_lora_rank] -> turned heads [B,T,H,d], before the last rounding."""
    projected = quantized(q_latent, weights["wq_b.weight"]).rounded(BF16)
    heads = projected.reshape(*q_latent.shape[:2], config.n_heads, config.head_dim)
    return rotate(config, layer, heads, positions)


def output(config: ModelConfig, layer: int, weights: Parameters, o: Bounded, positions: Ints) -> Bounded:
    """o [B,T,H,d] -> turned back, grouped projection, output projection [B,T,D], before the last rounding."""
    batch, length = o.shape[:2]
    turned = rotate(config, layer, o, positions, inverse=True).rounded(BF16)
    grouped = turned.reshape(batch * length, config.o_groups, -1).swapaxes(0, 1)
    matrices = Bounded.exact(weights["wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1))
    low_rank = dot(grouped, matrices).rounded(BF16).swapaxes(0, 1)
    return quantized(low_rank.reshape(batch, length, config.o_groups * config.o_lora_rank), weights["wo_b.weight"])
