"""Rotary embedding with YaRN (numerics.md 4)."""

import math

import numpy as np

from quantize import bf16


def rotary_frequencies(config, layer_id):
    """One frequency a pair of features; layers with compressed rows have another base, and YaRN."""
    compressed = config["compress_ratios"][layer_id] > 0
    base = config["compress_rope_theta"] if compressed else config["rope_theta"]
    size = config["rope_head_dim"]
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    # A float32 power, correctly rounded, and then a float32 reciprocal.
    powers = np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if not compressed:
        return frequencies

    def dimension(rotations):
        return size * math.log(config["original_seq_len"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(config["beta_fast"])), 0)
    high = min(math.ceil(dimension(config["beta_slow"])), size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(ramp, np.float32(0), np.float32(1))
    return frequencies / np.float32(config["rope_factor"]) * ramp + frequencies * (1 - ramp)


def rotary_tables(config, layer_id, positions):
    """Cosine and sine of the float32 angle."""
    angles = positions[..., None].astype(np.float32) * rotary_frequencies(config, layer_id)
    return np.cos(angles.astype(np.float64)).astype(np.float32), np.sin(angles.astype(np.float64)).astype(np.float32)


def turn_pairs(x, cos, sin):
    """Adjacent features are a complex number each."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def rotate(config, layer_id, x, positions, inverse=False):
    """Turn the last rope_head_dim features of [B, T, d] or [B, T, H, d]; `inverse` turns them back."""
    size = config["rope_head_dim"]
    cos, sin = rotary_tables(config, layer_id, positions)
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    turned = turn_pairs(x[..., -size:], cos, -sin if inverse else sin)
    return np.concatenate([x[..., :-size], bf16(turned)], axis=-1)
