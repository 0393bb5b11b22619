"""RMSNorm as a kernel, alone or with the quantiser that follows it (numerics.md 3)."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.codecs import encode_e4m3
from optimized.quantize import FP8_GROUP, scale_fp8

ROWS_PER_PROGRAM = 64 if INTERPRETED else 1
LARGEST_WIDTH = 1 << 15
"""A row is held in registers."""


@triton.jit
def normalised(values, weight, eps, width: tl.constexpr):
    """fp32 [ROWS, WIDTH] (zeros beyond `width`), fp32 weight [WIDTH] -> fp32, not rounded."""
    mean = tl.sum(values * values, axis=1) / width
    return values * tl.rsqrt(mean + eps)[:, None] * weight[None, :]


@triton.jit
def _norm_kernel(
    x, weight, out, scales, rows, eps, width: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    offsets = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = normalised(values, factor, eps, width).to(tl.bfloat16)
    if FP8:
        # The quantiser reads the rounded norm, as it would from memory.
        groups = tl.reshape(normed.to(tl.float32), (ROWS * (WIDTH // 32), 32))
        scaled, code, _ = scale_fp8(groups)
        tl.store(out + offsets, tl.reshape(encode_e4m3(scaled), (ROWS, WIDTH)), mask=inside)
        group = tl.arange(0, WIDTH // 32)
        present = (row < rows)[:, None] & (group < width // 32)[None, :]
        codes = tl.reshape(code.to(tl.uint8), (ROWS, WIDTH // 32))
        tl.store(scales + row[:, None] * (width // 32) + group[None, :], codes, mask=present)
    else:
        tl.store(out + offsets, normed, mask=inside)


def _check(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = require_bf16("x", x)
    require_shape("weight", weight, x.shape[-1])
    if x.shape[-1] > LARGEST_WIDTH:
        raise ValueError(f"x: a width of {x.shape[-1]} is more than {LARGEST_WIDTH}")
    return x


def _run(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, scales: torch.Tensor | None) -> None:
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    if not x.numel():
        return
    padded = max(32, triton.next_power_of_2(width))
    _norm_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        x,
        weight.contiguous(),
        out,
        out if scales is None else scales,
        rows,
        eps,
        width,
        WIDTH=padded,
        ROWS=ROWS_PER_PROGRAM,
        FP8=scales is not None,
        num_warps=8 if padded >= 4096 else 4,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x · rsqrt(mean(x²) + eps) · weight: bf16 [..., K], bf16 or fp32 [K] -> bf16 [..., K] (numerics.md 3)."""
    x = _check(x, weight)
    out = torch.empty_like(x)
    _run(x, weight, eps, out, None)
    return out


def rms_norm_quantize_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` and Q8 of it in one pass: codes E4M3 [..., K], scales E8M0 [..., K/32]; K a multiple of 32."""
    x = _check(x, weight)
    if x.shape[-1] % FP8_GROUP:
        raise ValueError(f"x: a width of {x.shape[-1]} is not a multiple of {FP8_GROUP}")
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // FP8_GROUP, dtype=torch.uint8, device=x.device)
    _run(x, weight, eps, codes, scales)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
