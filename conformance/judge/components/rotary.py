"""Rotary embedding with YaRN (numerics.md 4)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.judge.bounded import ELEMENTARY_ROUNDOFF, Bounded, Floats, concatenate

Float32s = npt.NDArray[np.float32]


def frequencies(config: ModelConfig, layer: int) -> Float32s:
    """fp32 frequencies [rope_head_dim / 2] of the layer, every operation in fp32 as the specification orders them.

    The power is correctly rounded: float64 of the fp32 exponent, rounded once.
    """
    dim = config.rope_head_dim
    compressed = config.ratio(layer) > 0
    base = config.compress_rope_theta if compressed else config.rope_theta
    exponents = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    plain = np.float32(1.0) / np.power(base, exponents).astype(np.float32)
    if not compressed:
        return plain
    low, high = ramp_bounds(config, base)
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(ramp, np.float32(0), np.float32(1))
    mixed = plain / np.float32(config.rope_factor) * ramp + plain * (np.float32(1) - ramp)
    return np.asarray(mixed, dtype=np.float32)


def ramp_bounds(config: ModelConfig, base: float) -> tuple[int, int]:
    """First and last pair of YaRN's ramp."""
    dim = config.rope_head_dim

    def pair(turns: float) -> float:
        return dim * math.log(config.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    return max(math.floor(pair(config.beta_fast)), 0), min(math.ceil(pair(config.beta_slow)), dim - 1)


def angles(config: ModelConfig, layer: int, positions: npt.NDArray[np.int64]) -> Floats:
    """The fp32 products of positions [...] and frequencies, as float64: [..., rope_head_dim / 2]."""
    product = positions.astype(np.float32)[..., None] * frequencies(config, layer)
    return np.asarray(product, dtype=np.float64)


def rotate(
    config: ModelConfig, layer: int, x: Bounded, positions: npt.NDArray[np.int64], inverse: bool = False
) -> Bounded:
    """Turn the last rope_head_dim features of x [B,T,d] or [B,T,H,d] by positions [B,T], before the output rounding.

    Cosine and sine carry two ulps.  Features before the rotary part pass through unchanged.
    """
    angle = angles(config, layer, positions)
    if len(x.shape) == 4:
        angle = angle[:, :, None, :]
    sign = -1.0 if inverse else 1.0
    cos = Bounded(np.cos(angle), ELEMENTARY_ROUNDOFF * np.abs(np.cos(angle)))
    sin = Bounded(sign * np.sin(angle), ELEMENTARY_ROUNDOFF * np.abs(np.sin(angle)))
    plain, turned = x[..., : -config.rope_head_dim], x[..., -config.rope_head_dim :]
    first, second = turned[..., 0::2], turned[..., 1::2]
    parts = (first * cos - second * sin, first * sin + second * cos)
    value = np.stack([part.value for part in parts], -1).reshape(turned.shape)
    error = np.stack([part.error for part in parts], -1).reshape(turned.shape)
    return concatenate([plain, Bounded(value, error)], -1)
