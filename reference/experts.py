"""The experts of the mixture (numerics.md 7)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.linear import scaled_product
from reference.parameters import Scoped, Weights
from reference.precision import to_bf16
from reference.quantize import fp4_weight, fp8_weight, quantized_fp8


def expert_matrix(weights: Weights, name: str, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of one matrix of an expert, FP4 (routed) or FP8 (shared) by the type of its weight: [M,K]."""
    weight, scale = weights[f"{name}.weight"], weights[f"{name}.scale"]
    dequantized = fp4_weight if weight.dtype == torch.uint8 else fp8_weight
    return dequantized(weight, scale, compute=compute)


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
    """One expert: bf16 x [N,D], fp32 routing_weight [N] or None (shared) -> bf16 [N,D] (numerics.md 7)."""
    return expert_of_quantized(config, weights, quantized_fp8(x, compute=compute), routing_weight, compute=compute)


def expert_of_quantized(
    config: Config,
    weights: Weights,
    a: torch.Tensor,
    routing_weight: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`expert` of an input that is quantised already: a [N,D] of the arithmetic's type.

    The routing weight enters before the down projection.
    """
    g = scaled_product(a, expert_matrix(weights, "w1", compute=compute)).to(compute)
    u = scaled_product(a, expert_matrix(weights, "w3", compute=compute)).to(compute)
    hidden = clamped_swiglu(config, g, u)
    if routing_weight is not None:
        hidden = hidden * routing_weight.to(compute).unsqueeze(-1)
    a = quantized_fp8(to_bf16(hidden), compute=compute)
    return scaled_product(a, expert_matrix(weights, "w2", compute=compute))


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
    a = quantized_fp8(x, compute=compute)
    total = torch.zeros(x.shape, dtype=compute)
    for index in sorted(set(expert_indices.flatten().tolist())):
        token, choice = torch.nonzero(expert_indices == index, as_tuple=True)
        routed = Scoped(weights, f"experts.{index}")
        out = expert_of_quantized(config, routed, a[token], routing_weights[token, choice], compute=compute)
        total.index_add_(0, token, out.to(compute))
    if config.n_shared_experts:
        shared = Scoped(weights, "shared_experts")
        total = total + expert_of_quantized(config, shared, a, None, compute=compute).to(compute)
    return to_bf16(total)
