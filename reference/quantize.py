"""Number formats, quantisers and dequantisation (numerics.md 1 and 2).

The quantisers are defined in fp32 and must match bit for bit, so they take no `compute`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

FP8_GROUP = 32
FP4_E8M0_GROUP = 32
FP4_E4M3_GROUP = 16
WEIGHT_TILE = 32

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit E2M1 code; the fourth bit is the sign."""

FP32_INFINITY = 0x7F800000
FP32_MANTISSA = 0x007FFFFF
"""Bits of fp32's infinity and of its mantissa."""

FP8_AMAX_FLOOR = 1e-4
FP4_E8M0_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_E4M3_AMAX_FLOOR = 6.0 * 2.0**-9


def split_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] -> [..., ceil(K/group), group]; a short last group is filled with zeros."""
    missing = -x.shape[-1] % group
    return torch.unflatten(functional.pad(x, (0, missing)) if missing else x, -1, (-1, group))


def join_groups(groups: torch.Tensor, width: int) -> torch.Tensor:
    """[..., G, group] -> [..., width], the inverse of `split_groups`."""
    return groups.flatten(-2)[..., :width]


def group_amax(groups: torch.Tensor, floor: float) -> torch.Tensor:
    """Largest magnitude of each group, not below `floor`: fp32 [..., G, group] -> fp32 [..., G, 1] (numerics.md 2)."""
    return groups.abs().amax(dim=-1, keepdim=True).clamp(min=floor)


def pow2ceil(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The power-of-two scale of numerics.md 1, 2**ceil(log2(amax / largest)): fp32 [...] -> E8M0 [...].

    The exponent is read off the bits of the fp32 product with the rounded reciprocal, never through a logarithm.
    """
    bits = (amax * (1.0 / largest)).view(torch.int32)
    # Any mantissa but 0 carries one into the exponent; infinity and NaN keep theirs, which is E8M0's NaN.
    biased = (bits.clamp(max=FP32_INFINITY) + FP32_MANTISSA) >> 23
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 number, ties to the even code, sign of zero kept: fp32 [...] in ±6 -> fp32 [...] (numerics.md 1).

    The grid is three stretches of equal spacing, and inside each the even codes are the even multiples.
    """
    magnitude = x.abs()
    spacing = torch.full_like(x, 2.0).masked_fill(magnitude < 4.0, 1.0).masked_fill(magnitude < 2.0, 0.5)
    return torch.copysign(torch.round(magnitude / spacing) * spacing, x)


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The number of each code: [codes], uint8 [...] -> [...]."""
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """E2M1 numbers [..., K] -> codes, two a byte, the even element in the low nibble: uint8 [..., K/2]."""
    grid = torch.tensor(E2M1_GRID, dtype=values.dtype)
    magnitude = torch.searchsorted(grid, values.abs().contiguous()).to(torch.uint8)
    codes = magnitude | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@cache
def _numbers_of_byte() -> torch.Tensor:
    """Both E2M1 numbers that a byte packs, the low nibble first: [256] (numerics.md 1).

    As the parts of a complex number, since one number is looked up in a third of the time that two take.
    """
    grid = torch.tensor((*E2M1_GRID, *(-magnitude for magnitude in E2M1_GRID)))
    byte = torch.arange(256)
    return torch.complex(grid[byte & 0xF], grid[byte >> 4])


@cache
def _numbers_of_e4m3() -> torch.Tensor:
    """The number of each E4M3 code: fp32 [256]."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> E2M1 numbers fp32 [..., K], the low nibble first (numerics.md 1)."""
    return torch.view_as_real(look_up(_numbers_of_byte(), packed)).flatten(-2)


def unpack_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 [...] -> the same numbers in fp32 [...], read from a table: several times quicker than a conversion."""
    return look_up(_numbers_of_e4m3(), codes.view(torch.uint8))


def _scale_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8: [..., K] -> E4M3 [..., G, 32], E8M0 [..., G, 1]."""
    groups = split_groups(x.float(), FP8_GROUP)
    scale = pow2ceil(group_amax(groups, FP8_AMAX_FLOOR), E4M3_MAX)
    return (groups / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _scale_fp4_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E8M0: [..., K] -> E2M1 numbers fp32 [..., G, 32], E8M0 [..., G, 1]."""
    groups = split_groups(x.float(), FP4_E8M0_GROUP)
    scale = pow2ceil(group_amax(groups, FP4_E8M0_AMAX_FLOOR), E2M1_MAX)
    return round_e2m1((groups / scale.float()).clamp(-E2M1_MAX, E2M1_MAX)), scale


def _scale_fp4_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E4M3: [..., K] -> E2M1 numbers fp32 [..., G, 16], E4M3 [..., G, 1].

    Both divisions are true divisions: a product with a reciprocal would move exact ties.
    """
    groups = split_groups(x.float(), FP4_E4M3_GROUP)
    amax = group_amax(groups, FP4_E4M3_AMAX_FLOOR)
    scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return round_e2m1((groups / scale.float()).clamp(-E2M1_MAX, E2M1_MAX)), scale


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q8: bf16 [..., K] -> codes E4M3 [..., K], scales E8M0 [..., K/32] (numerics.md 2)."""
    codes, scale = _scale_fp8(x)
    return join_groups(codes, x.shape[-1]), scale.squeeze(-1)


def quantize_fp4_e8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E8M0: bf16 [..., K] -> packed uint8 [..., K/2], scales E8M0 [..., K/32] (numerics.md 2)."""
    values, scale = _scale_fp4_e8m0(x)
    return pack_fp4(join_groups(values, x.shape[-1])), scale.squeeze(-1)


def quantize_fp4_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4-E4M3: bf16 [..., K] -> packed uint8 [..., K/2], scales E4M3 [..., K/16] (numerics.md 2)."""
    values, scale = _scale_fp4_e4m3(x)
    return pack_fp4(join_groups(values, x.shape[-1])), scale.squeeze(-1)


def quantized_fp8(x: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """Q8, as the numbers that its codes and scales stand for, exactly: bf16 [..., K] -> [..., K]."""
    codes, scale = _scale_fp8(x)
    return join_groups(codes.to(compute) * scale.to(compute), x.shape[-1])


def fake_quantize_fp8(x: torch.Tensor) -> torch.Tensor:
    """Q8 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    return quantized_fp8(x).bfloat16()


def fake_quantize_fp4_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Q4-E8M0 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    values, scale = _scale_fp4_e8m0(x)
    return join_groups(values * scale.float(), x.shape[-1]).bfloat16()


def fake_quantize_fp4_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Q4-E4M3 and back: bf16 [..., K] -> bf16 [..., K] (numerics.md 2)."""
    values, scale = _scale_fp4_e4m3(x)
    return join_groups(values * scale.float(), x.shape[-1]).bfloat16()


def scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each 32 elements times their scale: [..., K], [..., ceil(K/32)] of one type -> [..., K].

    Exact for codes and their power-of-two scales.  The result may take the place of `values`: at the released widths
    a weight's numbers are large.
    """
    return join_groups(split_groups(values, FP8_GROUP).mul_(scale.unsqueeze(-1)), values.shape[-1])


def fp8_weight(weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight's numbers, exactly: E4M3 [N, K] and E8M0 [ceil(N/32), ceil(K/32)], one a tile -> [N, K]."""
    scale_by_row = scale.to(compute).repeat_interleave(WEIGHT_TILE, dim=0)[: weight.shape[0]]
    return scaled(unpack_e4m3(weight).to(compute), scale_by_row)


def fp4_weight(weight: torch.Tensor, scale: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight's numbers, exactly: packed uint8 [N, K/2] and E8M0 [N, K/32] -> [N, K]."""
    return scaled(unpack_fp4(weight).to(compute), scale.to(compute))


def dequantize_fp8_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K] and E8M0 [ceil(N/32), ceil(K/32)], one a tile -> bf16 [N, K] (numerics.md 2)."""
    return fp8_weight(weight, scale).bfloat16()


def dequantize_fp8_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 [..., K] and E8M0 [..., ceil(K/32)], as in an Engram table -> bf16 [..., K] (numerics.md 2 and 8)."""
    return scaled(rows.float(), scale.float()).bfloat16()


def dequantize_fp4_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [N, K/2] and E8M0 [N, K/32] -> bf16 [N, K] (numerics.md 2)."""
    return fp4_weight(weight, scale).bfloat16()
