"""RMSNorm (numerics.md 3)."""

from __future__ import annotations

import torch

from reference.precision import to_bf16


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """x · rsqrt(mean(x²) + eps) · weight: bf16 [..., K], bf16 or fp32 [K] -> bf16 [..., K] (numerics.md 3)."""
    x = x.to(compute)
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return to_bf16(normed * weight.to(compute))
