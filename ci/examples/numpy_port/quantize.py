"""Number formats and quantisers (numerics.md 1 and 2).

numpy has neither bf16 nor 8- and 4-bit floats: a bf16 tensor is a float32 array whose values are all bf16 numbers, and
8- and 4-bit tensors are their codes in uint8.
"""

import numpy as np

E4M3_MAGNITUDES = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127], np.float32
)
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3_VALUES = np.concatenate([E4M3_MAGNITUDES, [np.nan], -E4M3_MAGNITUDES, [np.nan]]).astype(np.float32)
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
E8M0_VALUES = np.concatenate([np.ldexp(np.float32(1), np.arange(255) - 127), [np.nan]]).astype(np.float32)
E4M3_MAX, E2M1_MAX = np.float32(448), np.float32(6)


def bf16(x):
    """Round float32 to the nearest bf16, a tie to the even one; the result stays a float32 array."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def nearest_code(x, magnitudes, sign_bit):
    """Code of the nearest number of the format; a tie goes to the even code, and zero keeps its sign."""
    ties = (magnitudes[:-1] + magnitudes[1:]) / 2
    code = np.searchsorted(ties, np.abs(x))
    tied = ties[np.minimum(code, ties.size - 1)] == np.abs(x)
    code = code + (tied & (code % 2 == 1))
    return (code | np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def encode_e4m3(x):
    """E4M3 codes of float32, clamped to the largest number."""
    codes = nearest_code(np.clip(x, -E4M3_MAX, E4M3_MAX), E4M3_MAGNITUDES, 0x80)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def encode_e2m1(x):
    """E2M1 codes of float32, one a byte, clamped to the largest number."""
    return nearest_code(np.clip(x, -E2M1_MAX, E2M1_MAX), E2M1_MAGNITUDES, 8)


def pack(codes):
    """Two FP4 codes a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed):
    """FP4 codes, one a byte, of a packed tensor."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def power_of_two_scale(amax, largest):
    """E8M0 code of the power of two at or above amax / largest: the exponent, plus one when anything follows it."""
    bits = (amax * np.float32(1 / largest)).astype(np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)


def groups_of(x, size, floor):
    """Groups along the last axis and the largest magnitude of each, at least `floor`."""
    groups = x.reshape(*x.shape[:-1], -1, size)
    return groups, np.maximum(np.abs(groups).max(axis=-1), np.float32(floor))


def codes_fp4_e8m0(x):
    """E2M1 codes, one a byte, and E8M0 scales of groups of 32."""
    groups, amax = groups_of(x, 32, 6 * 2.0**-126)
    scales = power_of_two_scale(amax, E2M1_MAX)
    return encode_e2m1(groups / E8M0_VALUES[scales][..., None]).reshape(x.shape), scales


def codes_fp4_e4m3(x):
    """E2M1 codes, one a byte, and E4M3 scales of groups of 16; here scale and code come from true divisions."""
    groups, amax = groups_of(x, 16, 6 * 2.0**-9)
    scales = encode_e4m3(amax / E2M1_MAX)
    return encode_e2m1(groups / E4M3_VALUES[scales][..., None]).reshape(x.shape), scales


def quantize_fp8(x):
    """Q8."""
    groups, amax = groups_of(x, 32, 1e-4)
    scales = power_of_two_scale(amax, E4M3_MAX)
    return encode_e4m3(groups / E8M0_VALUES[scales][..., None]).reshape(x.shape), scales


def quantize_fp4_e8m0(x):
    """Q4-E8M0."""
    codes, scales = codes_fp4_e8m0(x)
    return pack(codes), scales


def quantize_fp4_e4m3(x):
    """Q4-E4M3."""
    codes, scales = codes_fp4_e4m3(x)
    return pack(codes), scales


def times_scales(values, scales):
    """Values times the scale of the group that each belongs to, rounded to bf16."""
    groups = values.reshape(*scales.shape, -1)
    return bf16(groups * scales[..., None]).reshape(values.shape)


def fake_quantize_fp8(x):
    """Q8 and back."""
    codes, scales = quantize_fp8(x)
    return times_scales(E4M3_VALUES[codes], E8M0_VALUES[scales])


def fake_quantize_fp4_e8m0(x):
    """Q4-E8M0 and back."""
    codes, scales = codes_fp4_e8m0(x)
    return times_scales(E2M1_VALUES[codes], E8M0_VALUES[scales])


def fake_quantize_fp4_e4m3(x):
    """Q4-E4M3 and back."""
    codes, scales = codes_fp4_e4m3(x)
    return times_scales(E2M1_VALUES[codes], E4M3_VALUES[scales])


def dequantize_fp8_weight(weight, scale):
    """A matrix with one scale per tile of 32 x 32; the last tiles may be cut."""
    tiles = np.repeat(np.repeat(E8M0_VALUES[scale], 32, axis=0), 32, axis=1)
    return bf16(E4M3_VALUES[weight] * tiles[: weight.shape[0], : weight.shape[1]])


def dequantize_fp4_weight(weight, scale):
    """A packed matrix with one scale per row and 32 inputs."""
    return times_scales(E2M1_VALUES[unpack(weight)], E8M0_VALUES[scale])
