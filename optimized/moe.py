"""Mixture of experts: gate and experts together (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimized.config import Config
from optimized.experts import experts
from optimized.gate import gate


def moe(
    config: Config, weights: Mapping[str, torch.Tensor], x: torch.Tensor, image_mask: torch.Tensor | None
) -> torch.Tensor:
    """bf16 x [N,D], bool image_mask [N] or None -> bf16 [N,D].  `weights` are those of the layer's `ffn`."""
    own_gate = {name.removeprefix("gate."): weights[name] for name in weights if name.startswith("gate.")}
    routing, indices = gate(config, own_gate, x, image_mask)
    return experts(config, weights, x, routing, indices)
