"""Mixture of experts: gate and experts together (numerics.md 7)."""

from __future__ import annotations

import torch

from reference.config import Config
from reference.experts import experts
from reference.gate import gate
from reference.parameters import Scoped, Weights


def moe_taps(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """bf16 x [N,D], bool image_mask [N] or None -> `gate_weights`, `gate_indices` [N,k] and `ffn_out` bf16 [N,D]."""
    routing, indices = gate(config, Scoped(weights, "gate"), x, image_mask, compute=compute)
    out = experts(config, weights, x, routing, indices, compute=compute)
    return {"gate_weights": routing, "gate_indices": indices, "ffn_out": out}


def moe(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """bf16 x [N,D], bool image_mask [N] or None -> bf16 [N,D].  `weights` are those of the layer's `ffn`."""
    return moe_taps(config, weights, x, image_mask, compute=compute)["ffn_out"]
