"""Rotary position embedding as a kernel, alone or with the quantiser that follows it (numerics.md 4).

Cosines and sines come from tables, made once a configuration: the angle is an fp32 product, its functions are taken in
float64 and rounded, so that no device's approximation of them enters.
"""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED

# ruff: isort: split
import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16
from optimized.config import Config
from optimized.quantize import (
    fake_quantize_fp4_e4m3,
    fake_quantize_fp4_e8m0,
    fake_quantize_fp8,
    fake_quantize_groups,
)

ROWS_PER_PROGRAM = 256 if INTERPRETED else 8


def _yarn_ramp(config: Config, base: float) -> torch.Tensor:
    """How much of each frequency is stretched, 0...1: fp32 [rope_head_dim / 2] (numerics.md 4)."""

    def index(rotations: float) -> float:
        wavelength = config.original_seq_len / (rotations * 2 * math.pi)
        return config.rope_head_dim * math.log(wavelength) / (2 * math.log(base))

    first = max(math.floor(index(config.beta_fast)), 0)
    last = min(math.ceil(index(config.beta_slow)), config.rope_head_dim - 1)
    place = torch.arange(config.rope_head_dim // 2, dtype=torch.float32)
    return ((place - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)


@lru_cache(maxsize=64)
def _frequencies(config: Config, compressed: bool) -> torch.Tensor:
    base = config.compress_rope_theta if compressed else config.rope_theta
    exponent = torch.arange(0, config.rope_head_dim, 2, dtype=torch.float32) / config.rope_head_dim
    # The fp32 power is correctly rounded, then inverted in fp32.
    frequencies = 1.0 / (torch.tensor(base, dtype=torch.float64) ** exponent.double()).float()
    if not compressed:
        return frequencies
    ramp = _yarn_ramp(config, base)
    return frequencies / config.rope_factor * ramp + frequencies * (1.0 - ramp)


def rotary_frequencies(config: Config, layer_id: int) -> torch.Tensor:
    """Frequencies of a layer, YaRN where it compresses: fp32 [rope_head_dim / 2] (numerics.md 4)."""
    return _frequencies(config, config.ratio(layer_id) > 0).to(DEVICE)


def rotary_tables(config: Config, layer_id: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine at int64 positions [...]: fp32 [..., rope_head_dim / 2] each (numerics.md 4)."""
    angles = (positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(config, layer_id)).double()
    return angles.cos().float(), angles.sin().float()


@triton.jit
def turned(left, right, cos, sin):
    """(left + i·right) · (cos + i·sin): two fp32 tensors."""
    return left * cos - right * sin, left * sin + right * cos


@triton.jit
def _rotate_kernel(
    x,
    cos,
    sin,
    places,
    out,
    rows,
    heads,
    sign,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    STILL: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Rows of WIDTH features, the last TURNING of which turn by the table row at the place of their token.

    STILL and HALF are the extents of both parts padded to powers of two.  With a FORMAT every group of the result is
    quantised and dequantised before it is stored.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    start = row[:, None] * WIDTH
    column = tl.arange(0, STILL)
    inside = present & (column < WIDTH - TURNING)[None, :]
    still = tl.load(x + start + column[None, :], mask=inside, other=0.0)
    if FORMAT != "none":
        groups = tl.reshape(still.to(tl.float32), (ROWS * STILL // GROUP, GROUP))
        still = tl.reshape(fake_quantize_groups(groups, FORMAT), (ROWS, STILL)).to(tl.bfloat16)
    tl.store(out + start + column[None, :], still, mask=inside)

    pair = tl.arange(0, HALF)
    token_place = tl.load(places + row // heads, mask=row < rows, other=0)
    present = present & (pair < TURNING // 2)[None, :]
    table = token_place[:, None] * (TURNING // 2) + pair[None, :]
    offsets = start + (WIDTH - TURNING) + 2 * pair[None, :]
    left = tl.load(x + offsets, mask=present, other=0.0).to(tl.float32)
    right = tl.load(x + offsets + 1, mask=present, other=0.0).to(tl.float32)
    cosine = tl.load(cos + table, mask=present, other=0.0)
    sine = tl.load(sin + table, mask=present, other=0.0) * sign
    left, right = turned(left, right, cosine, sine)
    left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    if FORMAT != "none":
        both = tl.interleave(left.to(tl.float32), right.to(tl.float32))
        kept = fake_quantize_groups(tl.reshape(both, (ROWS * 2 * HALF // GROUP, GROUP)), FORMAT).to(tl.bfloat16)
        left, right = tl.split(tl.reshape(kept, (ROWS, HALF, 2)))
    tl.store(out + offsets, left, mask=present)
    tl.store(out + offsets + 1, right, mask=present)


GROUPS = {"none": 32, "fp8": 32, "fp4_e8m0": 32, "fp4_e4m3": 16}
"""Group of each quantiser that may follow a rotation."""
FAKE_QUANTISERS = {
    "fp8": fake_quantize_fp8,
    "fp4_e8m0": fake_quantize_fp4_e8m0,
    "fp4_e4m3": fake_quantize_fp4_e4m3,
}


def rotate_at(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    inverse: bool = False,
    form: str = "none",
) -> torch.Tensor:
    """Turn the last features of bf16 [B,T,d] or [B,T,H,d] by the rows `places` of tables, then fake-quantise.

    fp32 tables [n, R/2], int64 places [B,T] below n, which is not checked -> bf16, same shape.  `form` is the
    quantiser: "fp8", "fp4_e8m0", "fp4_e4m3", or "none".
    """
    x = require_bf16("x", x)
    if (
        x.dim() not in (3, 4)
        or places.shape != x.shape[:2]
        or cos.dim() != 2
        or cos.shape != sin.shape
        or 2 * cos.shape[-1] > x.shape[-1]
    ):
        raise ValueError(
            f"x {list(x.shape)} does not go with tables {list(cos.shape)} and {list(sin.shape)} at places "
            f"{list(places.shape)}"
        )
    if form not in GROUPS:
        raise ValueError(f"form: expected one of {', '.join(GROUPS)}, got {form!r}")
    turning, width, group = 2 * cos.shape[-1], x.shape[-1], GROUPS[form]
    if form != "none" and ((width - turning) % group or turning % group):
        # A group across both parts: they are not in one program's registers side by side.
        return FAKE_QUANTISERS[form](rotate_at(x, cos, sin, places, inverse))
    out = torch.empty_like(x)
    rows = x.shape[:-1].numel()
    if not out.numel():
        return out
    _rotate_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        places.contiguous(),
        out,
        rows,
        x.shape[2] if x.dim() == 4 else 1,
        -1.0 if inverse else 1.0,
        WIDTH=width,
        TURNING=turning,
        STILL=max(group, triton.next_power_of_2(width - turning)),
        HALF=max(group // 2, triton.next_power_of_2(turning // 2)),
        ROWS=ROWS_PER_PROGRAM,
        FORMAT=form,
        GROUP=group,
    )
    return out


def tables_at(
    config: Config, layer_id: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables of the positions alone and the place of each in them: int64 [...] -> fp32 [n, R/2] twice, int64 [...]."""
    cos, sin = rotary_tables(config, layer_id, positions.flatten())
    return cos, sin, torch.arange(positions.numel(), device=positions.device).view(positions.shape)


def rotate(
    config: Config,
    layer_id: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
    form: str = "none",
) -> torch.Tensor:
    """Turn the last rope_head_dim features: bf16 [B,T,d] or [B,T,H,d], int64 [B,T] -> bf16, same shape (numerics.md 4).

    `form` names a quantiser whose fake quantisation follows in the same kernel.
    """
    return rotate_at(x, *tables_at(config, layer_id, positions), inverse, form)
