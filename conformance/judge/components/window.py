"""Window rows and the ring (numerics.md 6, items 2 and 3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components.linear import Parameters, quantized
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.quantize import FP8
from conformance.judge.components.rotary import rotate

Ints = npt.NDArray[np.int64]


def window_rows(config: ModelConfig, layer: int, weights: Parameters, x: Bounded, positions: Ints) -> Bounded:
    """The window key (= value) rows of x [B,T,D]: projected, normed, turned, fake-quantised; [B,T,d]."""
    projected = quantized(x, weights["wkv.weight"]).rounded(BF16)
    normed = rms_norm(projected, weights["kv_norm.weight"], config.norm_eps).rounded(BF16)
    return FP8.fake(rotate(config, layer, normed, positions).rounded(BF16))


def window_mask(positions: Ints, total: int, window: int) -> npt.NDArray[np.bool_]:
    """Which of positions 0...total-1 a query at `positions` [B,T] attends to: [B,T,total]."""
    keys = np.arange(total)
    return (keys <= positions[..., None]) & (keys > positions[..., None] - window)


def window_sets(start: int, length: int, window: int) -> list[set[int]]:
    """For each query, the rows that must be listed: this call's rows in prefill, ring slots in decode."""
    if start == 0:
        return [set(range(max(0, t - window + 1), t + 1)) for t in range(length)]
    return [{p % window for p in range(max(0, s - window + 1), s + 1)} for s in range(start, start + length)]


def ring_positions(total: int, window: int) -> Ints:
    """The newest position at each slot once positions 0...total-1 were written; -1 for a slot never written."""
    slots = np.arange(window)
    newest = total - 1 - (total - 1 - slots) % window
    return np.where(newest >= 0, newest, -1)
