"""The four kinds of linear layer (numerics.md 3)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.precision import to_bf16
from reference.quantize import WEIGHT_TILE, fp4_weight, fp8_weight, quantized_fp8

DEQUANTIZED_ELEMENTS = 1 << 22
"""Bound on a weight's elements that are dequantised at once, so that they take little memory and stay in cache."""


def scaled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Product of dequantised numbers: [..., K], [N, K] of the arithmetic's type -> bf16 [..., N] (numerics.md 3).

    The sum over blocks of 32 inputs, each block's times its scales, is the same one in another order.
    """
    return to_bf16(functional.linear(x, weight))


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Q8 of the input times an FP8 weight: bf16 [..., K], E4M3 [N, K], E8M0 tiles -> bf16 [..., N] (numerics.md 3).

    Output features do not depend on each other: those of a large weight are worked off in turn.
    """
    a = quantized_fp8(x, compute=compute)
    if weight.numel() <= DEQUANTIZED_ELEMENTS:
        return scaled_product(a, fp8_weight(weight, scale, compute=compute))
    tile_rows = max(1, DEQUANTIZED_ELEMENTS // (WEIGHT_TILE * weight.shape[1]))
    parts = zip(torch.split(weight, tile_rows * WEIGHT_TILE), torch.split(scale, tile_rows), strict=True)
    return torch.cat([scaled_product(a, fp8_weight(*part, compute=compute)) for part in parts], dim=-1)


def linear_fp4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Q8 of the input times an FP4 weight: bf16 [..., K], packed uint8 [N, K/2], E8M0 [N, K/32] -> bf16 [..., N].

    (numerics.md 3)
    """
    return scaled_product(quantized_fp8(x, compute=compute), fp4_weight(weight, scale, compute=compute))


def linear_bf16(x: torch.Tensor, weight: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """bf16 [..., K], bf16 [N, K] -> bf16 [..., N], the sum in fp32 (numerics.md 3)."""
    return to_bf16(functional.linear(x.to(compute), weight.to(compute)))


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """Input and weight promoted: bf16 or fp32 [..., K] and [N, K] -> fp32 [..., N], not rounded (numerics.md 3)."""
    return functional.linear(x.to(compute), weight.to(compute))
