"""Quantisers, fused fake-quantisers and dequantisation as kernels (numerics.md 1 and 2).

Bit-equal to the definition for every finite input.  A group that holds NaN or infinity gets a NaN scale, and every
element of it dequantises to NaN.
"""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_codes, require_shape
from optimized.codecs import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_pairs,
    power_of_two_scale,
    unpack_pairs,
)

FP8_GROUP = 32
FP4_E8M0_GROUP = 32
FP4_E4M3_GROUP = 16
WEIGHT_TILE = 32
WEIGHT_DTYPES = {"fp8": torch.float8_e4m3fn, "fp4": torch.uint8}

FP8_AMAX_FLOOR = tl.constexpr(1e-4)
FP4_E8M0_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-126)
FP4_E4M3_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-9)

GROUPS_PER_PROGRAM = 2048 if INTERPRETED else 64
"""The interpreter pays by the program, a GPU wants many."""


@triton.jit
def largest_magnitude(values, floor: tl.constexpr):
    """fp32 [ROWS, GROUP] -> fp32 [ROWS], not below the floor; infinity where the row holds NaN or infinity."""
    amax = tl.maximum(tl.max(tl.abs(values), axis=1), floor)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(tl.max(bits, axis=1) >= 0x7F800000, float("inf"), amax)


@triton.jit
def scale_fp8(values):
    """Q8 of fp32 [ROWS, 32]: scaled fp32 values ready to be encoded, E8M0 codes int32 [ROWS], scales fp32 [ROWS]."""
    code, inverse = power_of_two_scale(largest_magnitude(values, FP8_AMAX_FLOOR), 1.0 / E4M3_LARGEST)
    scale = decode_e8m0(code)
    scaled = tl.where((code < 255)[:, None], values * inverse[:, None], float("nan"))
    return scaled, code, scale


@triton.jit
def scale_fp4_e8m0(values):
    """Q4-E8M0 of fp32 [ROWS, 32]: as `scale_fp8`."""
    code, inverse = power_of_two_scale(largest_magnitude(values, FP4_E8M0_AMAX_FLOOR), 1.0 / E2M1_LARGEST)
    return values * inverse[:, None], code, decode_e8m0(code)


@triton.jit
def scale_fp4_e4m3(values):
    """Q4-E4M3 of fp32 [ROWS, 16]: as `scale_fp8`, with E4M3 codes.

    Both divisions are true divisions: a product with a reciprocal would move exact ties.
    """
    amax = largest_magnitude(values, FP4_E4M3_AMAX_FLOOR)
    code = encode_e4m3(tl.div_rn(amax, E2M1_LARGEST)).to(tl.int32)
    code = tl.where(amax == float("inf"), 0x7F, code)
    scale = decode_e4m3(code)
    return tl.div_rn(values, scale[:, None]), code, scale


@triton.jit
def scale_groups(values, FORMAT: tl.constexpr):
    """One of the three quantisers' scales, by name."""
    if FORMAT == "fp8":
        scaled, code, scale = scale_fp8(values)
    elif FORMAT == "fp4_e8m0":
        scaled, code, scale = scale_fp4_e8m0(values)
    else:
        scaled, code, scale = scale_fp4_e4m3(values)
    return scaled, code, scale


@triton.jit
def fake_quantize_groups(values, FORMAT: tl.constexpr):
    """fp32 [ROWS, GROUP] -> what is left of it after quantising and dequantising, fp32 (exact in bf16)."""
    scaled, _, scale = scale_groups(values, FORMAT)
    if FORMAT == "fp8":
        kept = decode_e4m3(encode_e4m3(scaled))
    else:
        kept = decode_e2m1(encode_e2m1(scaled))
    return kept * scale[:, None]


@triton.jit
def _group_offsets(width, groups_in_row, groups, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of this program's groups: their numbers [ROWS], element offsets [ROWS, GROUP] and which elements exist."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, place = group // groups_in_row, group % groups_in_row
    column = place[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return group, row[:, None] * width + column, (group < groups)[:, None] & (column < width)


@triton.jit
def _quantize_kernel(
    x, codes, scales, width, groups_in_row, groups, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    group, offsets, present = _group_offsets(width, groups_in_row, groups, GROUP, ROWS)
    scaled, scale_code, _ = scale_groups(tl.load(x + offsets, mask=present, other=0.0).to(tl.float32), FORMAT)
    if FORMAT == "fp8":
        tl.store(codes + offsets, encode_e4m3(scaled), mask=present)
    else:
        # Widths are even, so that a byte's two elements exist together.
        packed = pack_pairs(encode_e2m1(scaled), ROWS, GROUP // 2)
        row, place = group // groups_in_row, group % groups_in_row
        column = place[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        inside = (group < groups)[:, None] & (column < width // 2)
        tl.store(codes + row[:, None] * (width // 2) + column, packed, mask=inside)
    tl.store(scales + group, scale_code.to(tl.uint8), mask=group < groups)


@triton.jit
def _fake_quantize_kernel(
    x, out, width, groups_in_row, groups, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    _, offsets, present = _group_offsets(width, groups_in_row, groups, GROUP, ROWS)
    values = tl.load(x + offsets, mask=present, other=0.0).to(tl.float32)
    tl.store(out + offsets, fake_quantize_groups(values, FORMAT).to(tl.bfloat16), mask=present)


@triton.jit
def _dequantize_kernel(
    weight, scale, out, width, columns, groups, WEIGHT: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr
):
    """Groups of 32 along a row; `columns` scales in a row, one for `TILE_ROWS` rows."""
    group, offsets, present = _group_offsets(width, columns, groups, 32, ROWS)
    row, place = group // columns, group % columns
    if WEIGHT == "fp8":
        values = decode_e4m3(tl.load(weight + offsets, mask=present, other=0))
    else:
        column = place[:, None] * 16 + tl.arange(0, 16)[None, :]
        inside = (group < groups)[:, None] & (column < width // 2)
        values = unpack_pairs(tl.load(weight + row[:, None] * (width // 2) + column, mask=inside, other=0))
    factor = decode_e8m0(tl.load(scale + (row // TILE_ROWS) * columns + place, mask=group < groups, other=127))
    tl.store(out + offsets, (values * factor[:, None]).to(tl.bfloat16), mask=present)


def _grid(groups: int) -> tuple[int]:
    return (triton.cdiv(groups, GROUPS_PER_PROGRAM),)


def _quantize(x: torch.Tensor, form: str, group: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = require_bf16("x", x)
    width = x.shape[-1]
    packing = 1 if form == "fp8" else 2
    if width % packing:
        raise ValueError(f"x: a width of {width} cannot be packed two codes a byte")
    in_row = triton.cdiv(width, group)
    codes = torch.empty(*x.shape[:-1], width // packing, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], in_row, dtype=torch.uint8, device=x.device)
    groups = scales.numel()
    if groups:
        _quantize_kernel[_grid(groups)](x, codes, scales, width, in_row, groups, form, group, GROUPS_PER_PROGRAM)
    return codes.view(torch.float8_e4m3fn) if form == "fp8" else codes, scales.view(scale_dtype)


def _fake_quantize(x: torch.Tensor, form: str, group: int) -> torch.Tensor:
    x = require_bf16("x", x)
    out = torch.empty_like(x)
    in_row = triton.cdiv(x.shape[-1], group)
    groups = x.shape[:-1].numel() * in_row
    if groups:
        _fake_quantize_kernel[_grid(groups)](x, out, x.shape[-1], in_row, groups, form, group, GROUPS_PER_PROGRAM)
    return out


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8: bf16 [..., K] -> codes E4M3 [..., K], scales E8M0 [..., K/32] (numerics.md 2)."""
    return _quantize(x, "fp8", FP8_GROUP, torch.float8_e8m0fnu)


def quantize_fp4_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E8M0: bf16 [..., K] -> packed uint8 [..., K/2], scales E8M0 [..., K/32] (numerics.md 2)."""
    return _quantize(x, "fp4_e8m0", FP4_E8M0_GROUP, torch.float8_e8m0fnu)


def quantize_fp4_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E4M3: bf16 [..., K] -> packed uint8 [..., K/2], scales E4M3 [..., K/16] (numerics.md 2)."""
    return _quantize(x, "fp4_e4m3", FP4_E4M3_GROUP, torch.float8_e4m3fn)


def fake_quantize_fp8(x: torch.Tensor) -> torch.Tensor:
    """Q8 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    return _fake_quantize(x, "fp8", FP8_GROUP)


def fake_quantize_fp4_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Q4-E8M0 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    return _fake_quantize(x, "fp4_e8m0", FP4_E8M0_GROUP)


def fake_quantize_fp4_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Q4-E4M3 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    return _fake_quantize(x, "fp4_e4m3", FP4_E4M3_GROUP)


def _dequantize(weight: torch.Tensor, scale: torch.Tensor, width: int, kind: str, tile_rows: int) -> torch.Tensor:
    if weight.dim() != 2:
        raise ValueError(f"weight: expected a matrix, got {list(weight.shape)}")
    codes = require_codes("weight", weight, WEIGHT_DTYPES[kind])
    columns = triton.cdiv(width, 32)
    scales = require_codes("scale", scale, torch.float8_e8m0fnu)
    scales = require_shape("scale", scales, triton.cdiv(weight.shape[0], tile_rows), columns)
    out = torch.empty(weight.shape[0], width, dtype=torch.bfloat16, device=weight.device)
    groups = weight.shape[0] * columns
    if groups:
        _dequantize_kernel[_grid(groups)](
            codes, scales, out, width, columns, groups, kind, tile_rows, GROUPS_PER_PROGRAM
        )
    return out


def dequantize_fp8_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K] and E8M0 [ceil(N/32), ceil(K/32)], one a tile -> bf16 [N, K] (numerics.md 2)."""
    return _dequantize(weight, scale, weight.shape[-1], "fp8", WEIGHT_TILE)


def dequantize_fp4_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [N, K/2] and E8M0 [N, K/32] -> bf16 [N, K] (numerics.md 2)."""
    return _dequantize(weight, scale, 2 * weight.shape[-1], "fp4", 1)
