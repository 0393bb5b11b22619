"""The four kinds of linear layer (numerics.md 3)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.precision import to_bf16
from reference.quantize import FP8_GROUP, WEIGHT_TILE, quantize_fp8, unpack_e4m3, unpack_fp4

PARTIAL_ELEMENTS = 1 << 17
"""Bound on the elements of a partial result, so that it stays in cache; more output features are worked off in turn."""


def block_scaled_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Σ over blocks of 32 inputs, in order, of (block's product sum) · (scale of x · scale of weight).

    x [..., K], x_scale [..., K/32], weight [N, K], weight_scale [N, K/32], all of the arithmetic's type -> [..., N].
    The products are exact and the scales powers of two, so every rounding here is one of a sum (numerics.md 3).
    """
    flat, flat_scale = x.flatten(0, -2), x_scale.flatten(0, -2)
    step = max(1, PARTIAL_ELEMENTS // max(1, flat.shape[0]))
    pieces = zip(torch.split(weight, step), torch.split(weight_scale, step), strict=True)
    product = torch.cat([_sum_blocks(flat, flat_scale, *piece) for piece in pieces], dim=-1)
    return product.view(*x.shape[:-1], weight.shape[0])


def _sum_blocks(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`block_scaled_product` of x [M, K] and a few output features."""
    total = x.new_zeros(x.shape[0], weight.shape[0])
    blocks = zip(
        torch.split(x, FP8_GROUP, dim=-1),
        torch.split(x_scale, 1, dim=-1),
        torch.split(weight, FP8_GROUP, dim=-1),
        torch.unbind(weight_scale, dim=-1),
        strict=True,
    )
    for x_codes, x_factor, weight_codes, weight_factor in blocks:
        total.addcmul_(functional.linear(x_codes, weight_codes), x_factor * weight_factor)
    return total


def linear_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Q8 of the input times an FP8 weight: bf16 [..., K], E4M3 [N, K], E8M0 tiles -> bf16 [..., N] (numerics.md 3)."""
    codes, x_scale = quantize_fp8(x)
    scale_by_row = scale.to(compute).repeat_interleave(WEIGHT_TILE, dim=0)[: weight.shape[0]]
    values = unpack_e4m3(weight).to(compute)
    return to_bf16(block_scaled_product(codes.to(compute), x_scale.to(compute), values, scale_by_row))


def linear_fp4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Q8 of the input times an FP4 weight: bf16 [..., K], packed uint8 [N, K/2], E8M0 [N, K/32] -> bf16 [..., N].

    (numerics.md 3)
    """
    codes, x_scale = quantize_fp8(x)
    values = unpack_fp4(weight).to(compute)
    return to_bf16(block_scaled_product(codes.to(compute), x_scale.to(compute), values, scale.to(compute)))


def linear_bf16(x: torch.Tensor, weight: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """bf16 [..., K], bf16 [N, K] -> bf16 [..., N], the sum in fp32 (numerics.md 3)."""
    return to_bf16(functional.linear(x.to(compute), weight.to(compute)))


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """Input and weight promoted: bf16 or fp32 [..., K] and [N, K] -> fp32 [..., N], not rounded (numerics.md 3)."""
    return functional.linear(x.to(compute), weight.to(compute))
