"""Rotary position embedding with YaRN (numerics.md 4)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from reference.config import Config
from reference.precision import to_bf16


def base_frequencies(rope_head_dim: int, base: float) -> torch.Tensor:
    """f_i = 1 / base^(2i / rope_head_dim): fp32 [rope_head_dim / 2] (numerics.md 4).

    The power is rounded to fp32 and then inverted in fp32.  It is taken in float64 first because the definition asks
    for the correctly rounded fp32 power.
    """
    exponent = torch.arange(0, rope_head_dim, 2, dtype=torch.float32) / rope_head_dim
    power = torch.pow(torch.tensor(base, dtype=torch.float64), exponent.double()).float()
    return 1.0 / power


def yarn_range(config: Config, base: float) -> tuple[int, int]:
    """First and last index of the YaRN ramp (numerics.md 4); 15 and 25 at the released sizes."""

    def dim(rotations: float) -> float:
        turns = config.original_seq_len / (rotations * 2 * math.pi)
        return config.rope_head_dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(dim(config.beta_fast)), 0)
    high = min(math.ceil(dim(config.beta_slow)), config.rope_head_dim - 1)
    return low, high


@lru_cache(maxsize=256)
def _frequencies(config: Config, compressed: bool) -> torch.Tensor:
    if not compressed:
        return base_frequencies(config.rope_head_dim, config.rope_theta)
    frequencies = base_frequencies(config.rope_head_dim, config.compress_rope_theta)
    low, high = yarn_range(config, config.compress_rope_theta)
    index = torch.arange(config.rope_head_dim // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies / config.rope_factor * ramp + frequencies * (1.0 - ramp)


def rotary_frequencies(config: Config, layer_id: int) -> torch.Tensor:
    """Frequencies of a layer: fp32 [rope_head_dim / 2] (numerics.md 4).

    A layer without compression uses `rope_theta` as it is; any other `compress_rope_theta` with YaRN, for its queries,
    window keys and compressed rows alike.
    """
    return _frequencies(config, config.ratio(layer_id) > 0).clone()


def rotary_tables(
    config: Config, layer_id: int, positions: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles pos · f_i: int64 [...] -> fp32 [..., rope_head_dim / 2] each (numerics.md 4).

    The angle is an fp32 product whatever `compute` is: its rounding is part of the definition.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(config, layer_id)
    turn = torch.polar(torch.ones_like(angles, dtype=compute), angles.to(compute))
    return turn.real, turn.imag


def rotate(
    config: Config,
    layer_id: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    inverse: bool = False,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Turn the last rope_head_dim features: bf16 [B,T,d] or [B,T,H,d], int64 [B,T] -> bf16, same shape (numerics.md 4).

    Adjacent features form the complex number x[2i] + i·x[2i+1], which is multiplied by exp(i · pos · f_i), or by its
    conjugate when `inverse`.
    """
    cos, sin = rotary_tables(config, layer_id, positions, compute=compute)
    if inverse:
        sin = -sin
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    still, turning = torch.split(x, [x.shape[-1] - config.rope_head_dim, config.rope_head_dim], dim=-1)
    real, imaginary = torch.unflatten(turning.to(compute), -1, (-1, 2)).unbind(-1)
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)
    return torch.cat((still, to_bf16(turned)), dim=-1)
