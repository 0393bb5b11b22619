"""The power-of-two scale of the quantisers."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_F32_MANTISSA_BITS = 23
_LARGEST_CODE = 254
_NAN_CODE = 255


def power_of_two_scale(amax: ArrayLike, largest: float) -> NDArray[np.uint8]:
    """Return `pow2ceil(amax, largest)` of numerics.md section 1 as E8M0 codes.

    The float32 product `p = f32(amax · f32(1/largest))` is taken with the *rounded* reciprocal, and
    `2^⌈log2 p⌉` is read off its bits: exponent, plus one if any mantissa bit is set. No logarithm is
    involved, so an exact power of two is its own scale. A `p` outside the range of E8M0 takes the
    nearest scale, 2^-127 or 2^127; that includes `amax = 0`, which the quantisers exclude by a floor.

    Args:
        amax: largest magnitudes of the groups, any shape; read as float32.
        largest: largest finite value of the element format, 448 or 6.

    Returns:
        uint8 of the shape of `amax`: codes 0..254, or 255 (NaN) where `amax` is NaN or infinite.

    Raises:
        ValueError: `largest` is not positive and finite, or an `amax` is negative.
    """
    if not (math.isfinite(largest) and largest > 0):
        raise ValueError(f"largest must be positive and finite, got {largest}")
    maxima = np.asarray(amax, dtype=np.float32)
    if (maxima < 0).any():
        raise ValueError(f"amax is a magnitude, got {maxima[maxima < 0][0]}")

    product = np.asarray(maxima * (np.float32(1) / np.float32(largest)), dtype=np.float32)
    bits = product.view(np.uint32).astype(np.int64)
    exponent = (bits >> _F32_MANTISSA_BITS) & 0xFF
    mantissa = bits & (2**_F32_MANTISSA_BITS - 1)
    # E8M0 has float32's bias, so a normal product's exponent field already is the code. A subnormal
    # one is mantissa · 2^-149: above 2^-127 (half the mantissa range) the next power is 2^-126.
    normal = exponent + (mantissa != 0)
    subnormal = mantissa > 2 ** (_F32_MANTISSA_BITS - 1)
    codes = np.minimum(np.where(exponent > 0, normal, subnormal), _LARGEST_CODE)
    return np.where(np.isfinite(maxima), codes, _NAN_CODE).astype(np.uint8)
