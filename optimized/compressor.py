"""The compressor's rows as they are cached (numerics.md 6.2)."""

from __future__ import annotations

import torch

from optimized.config import Config
from optimized.rotary import rotate


def compressed_rows(config: Config, layer_id: int, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bf16 latent [B,n,d], int64 positions [B,n] of each group's first token -> bf16 cached rows (numerics.md 6.2)."""
    return rotate(config, layer_id, latent, positions, form="fp4_e4m3")
