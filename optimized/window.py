"""The sliding window: its rows and the ring that keeps them (numerics.md 6, items 2-3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimized.config import Config
from optimized.linear import linear_fp8
from optimized.norm import rms_norm
from optimized.rotary import rotate


def window_rows(
    config: Config, layer_id: int, weights: Mapping[str, torch.Tensor], x: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 x [B,T,D] -> the window's key (= value) rows, rotated, fake-quantised, bf16 [B,T,d] (numerics.md 6)."""
    kv = linear_fp8(x, weights["wkv.weight"], weights["wkv.scale"])
    kv = rms_norm(kv, weights["kv_norm.weight"], config.norm_eps)
    return rotate(config, layer_id, kv, positions, form="fp8")
