"""The indexer (numerics.md 6.3) on values with error bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, Floats, dot, where
from conformance.judge.components.linear import Parameters, product, quantized
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.quantize import FP4_E8M0
from conformance.judge.components.rotary import rotate

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def index_keys(config: ModelConfig, layer: int, weights: Parameters, latent: Bounded, positions: Ints) -> Bounded:
    """Keys of latents [B,n,d] whose groups begin at `positions` [B,n]: [B,n,index_head_dim]."""
    projected = product(latent, weights["indexer.wk.weight"]).rounded(BF16)
    normed = rms_norm(projected, weights["indexer.k_norm.weight"], config.norm_eps).rounded(BF16)
    return FP4_E8M0.fake(rotate(config, layer, normed, positions).rounded(BF16))


def index_queries(config: ModelConfig, layer: int, weights: Parameters, q_latent: Bounded, positions: Ints) -> Bounded:
    """Queries of q_latent [B,T,q_lora_rank]: [B,T,index_n_heads,index_head_dim]."""
    projected = quantized(q_latent, weights["indexer.wq_b.weight"]).rounded(BF16)
    heads = projected.reshape(*q_latent.shape[:2], config.index_n_heads, config.index_head_dim)
    return FP4_E8M0.fake(rotate(config, layer, heads, positions).rounded(BF16))


def index_weights(config: ModelConfig, weights: Parameters, x: Bounded) -> Bounded:
    """Head weights of x [B,T,D], rounded, scaled; before the second rounding: [B,T,index_n_heads]."""
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return product(x, weights["indexer.weights_proj.weight"]).rounded(BF16) * float(scale)


def visible_counts(config: ModelConfig, layer: int, positions: Ints) -> Ints:
    """How many compressed positions a query at `positions` sees: (t + 1) div r."""
    return (positions + 1) // config.ratio(layer)


def visibility(config: ModelConfig, layer: int, positions: Ints, total: int) -> Bools:
    """Which of the compressed positions 0...total-1 each query sees: [B,T,total]."""
    return np.arange(total) < visible_counts(config, layer, positions)[..., None]


def index_scores(queries: Bounded, head_weights: Bounded, keys: Bounded, allowed: Bools) -> Bounded:
    """Scores [B,T,C] before their last rounding; -inf where not `allowed`.

    Queries [B,T,H,d] and keys [B,C,d]: dot product, rounded; ReLU; times the head's weight, rounded; summed over heads.
    """
    stored = deviations.score_format()
    by_head = dot(queries.swapaxes(1, 2), _over_heads(keys)).rounded(stored).clamp(low=0.0)
    weighted = (by_head * head_weights.swapaxes(1, 2)[..., None]).rounded(stored)
    return masked(weighted.sum(1), allowed)


def masked(scores: Bounded, allowed: Bools) -> Bounded:
    """-inf, exactly, where not allowed."""
    return where(allowed, scores, Bounded.exact(np.full(scores.shape, -np.inf)))


def _over_heads(keys: Bounded) -> Bounded:
    return keys.reshape(keys.shape[0], 1, *keys.shape[1:])


def membership(low: Floats, high: Floats, topk: int) -> tuple[Bools, Bools]:
    """Which entries a top-k of scores between low and high [..., C] surely keeps, and which it may keep or not.

    An entry is surely kept when fewer than k others could reach its lowest score, surely left out when k others must
    exceed its highest.  An entry whose highest score is -inf is left out.
    """
    visible = high > -np.inf
    rivals = _count_at_least(high, low) - 1
    betters = _count_above(low, high)
    surely = (low > -np.inf) & (rivals < topk)
    maybe = visible & ~surely & (betters < topk)
    return surely, maybe


def _count_at_least(values: Floats, thresholds: Floats) -> Ints:
    """For each threshold [..., C], how many of the row's values are at least as large."""
    ordered = np.sort(values, -1)
    counts = [len(v) - np.searchsorted(v, t, "left") for v, t in zip(_rows(ordered), _rows(thresholds), strict=True)]
    return np.asarray(counts, dtype=np.int64).reshape(thresholds.shape)


def _count_above(values: Floats, thresholds: Floats) -> Ints:
    """For each threshold [..., C], how many of the row's values are larger."""
    ordered = np.sort(values, -1)
    counts = [len(v) - np.searchsorted(v, t, "right") for v, t in zip(_rows(ordered), _rows(thresholds), strict=True)]
    return np.asarray(counts, dtype=np.int64).reshape(thresholds.shape)


def _rows(array: Floats) -> Floats:
    return array.reshape(-1, array.shape[-1])
