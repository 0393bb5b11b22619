"""The projections around the sparse attention (numerics.md 6, items 1 and 6)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimized.config import Config
from optimized.linear import grouped_linear_bf16, linear_fp8
from optimized.norm import rms_norm
from optimized.quantize import dequantize_fp8_weight
from optimized.rotary import rotate

Weights = Mapping[str, torch.Tensor]


def query_latent(config: Config, layer_id: int, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """bf16 x [B,T,D] -> bf16 [B,T,q_lora_rank], normed (numerics.md 6, item 1)."""
    latent = linear_fp8(x, weights["wq_a.weight"], weights["wq_a.scale"])
    return rms_norm(latent, weights["q_norm.weight"], config.norm_eps)


def attention_queries(
    config: Config, layer_id: int, weights: Weights, q_latent: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 q_latent [B,T,q_lora_rank] -> rotated heads bf16 [B,T,H,d] (numerics.md 6, item 1)."""
    q = linear_fp8(q_latent, weights["wq_b.weight"], weights["wq_b.scale"])
    return rotate(config, layer_id, torch.unflatten(q, -1, (config.n_heads, config.head_dim)), positions)


def attention_output(
    config: Config, layer_id: int, weights: Weights, o: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 o [B,T,H,d] of the sparse attention -> turned back, projected, bf16 [B,T,D] (numerics.md 6, item 6).

    `wo_a` may come dequantised (bf16) or as the checkpoint stores it (FP8 with `wo_a.scale`).
    """
    o = rotate(config, layer_id, o, positions, inverse=True)
    wo_a = weights["wo_a.weight"]
    if "wo_a.scale" in weights:
        wo_a = dequantize_fp8_weight(wo_a, weights["wo_a.scale"])
    low = grouped_linear_bf16(o.flatten(-2), wo_a, config.o_groups)
    return linear_fp8(low, weights["wo_b.weight"], weights["wo_b.scale"])
