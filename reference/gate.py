"""The gate of the mixture of experts (numerics.md 7)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.linear import linear_fp32
from reference.parameters import Weights


def gate(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased scores and weigh them by the scores without bias (numerics.md 7).

    bf16 x [N,D], bool image_mask [N] or None -> routing weights fp32 [N,k], expert indices int32 [N,k].  `weights`:
    `weight`, `bias`, `bias_vl`.
    """
    scores = functional.softplus(linear_fp32(x, weights["weight"], compute=compute)).sqrt()
    bias = weights["bias"].to(compute)
    if image_mask is not None:
        bias = torch.where(image_mask.unsqueeze(-1), weights["bias_vl"].to(compute), bias)
    indices = (scores + bias).topk(config.n_activated_experts, dim=-1).indices
    chosen = scores.gather(-1, indices)
    routing = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * config.route_scale
    return routing, indices.to(torch.int32)
