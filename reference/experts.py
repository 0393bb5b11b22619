"""The experts of the mixture (numerics.md 7)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.linear import linear_fp4, linear_fp8
from reference.parameters import Scoped, Weights
from reference.precision import to_bf16


def expert_linear(
    weights: Weights, name: str, x: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """One matrix of an expert, FP4 (routed) or FP8 (shared) by the type of its weight: bf16 [N,K] -> bf16 [N,M]."""
    weight, scale = weights[f"{name}.weight"], weights[f"{name}.scale"]
    linear = linear_fp4 if weight.dtype == torch.uint8 else linear_fp8
    return linear(x, weight, scale, compute=compute)


def clamped_swiglu(config: Config, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit): fp32 [N,M] twice -> fp32 [N,M] (numerics.md 7)."""
    limit = config.swiglu_limit
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    routing_weight: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One expert: bf16 x [N,D], fp32 routing_weight [N] or None (shared) -> bf16 [N,D] (numerics.md 7).

    The routing weight enters before the down projection.
    """
    g = expert_linear(weights, "w1", x, compute=compute).to(compute)
    u = expert_linear(weights, "w3", x, compute=compute).to(compute)
    hidden = clamped_swiglu(config, g, u)
    if routing_weight is not None:
        hidden = hidden * routing_weight.to(compute).unsqueeze(-1)
    return expert_linear(weights, "w2", to_bf16(hidden), compute=compute)


def experts(
    config: Config,
    weights: Weights,
    x: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_indices: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sum of the chosen routed experts in fp32 plus the shared expert (numerics.md 7).

    bf16 x [N,D], fp32 routing_weights [N,k], int32 expert_indices [N,k] -> bf16 [N,D].
    """
    total = torch.zeros(x.shape, dtype=compute)
    for index in sorted(set(expert_indices.flatten().tolist())):
        token, choice = torch.nonzero(expert_indices == index, as_tuple=True)
        routed = Scoped(weights, f"experts.{index}")
        out = expert(config, routed, x[token], routing_weights[token, choice], compute=compute)
        total.index_add_(0, token, out.to(compute))
    if config.n_shared_experts:
        total = total + expert(config, Scoped(weights, "shared_experts"), x, None, compute=compute).to(compute)
    return to_bf16(total)
