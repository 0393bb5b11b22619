"""Number formats inside kernels: encoders and decoders by integer operations (numerics.md 1).

The same bits on every target and in the interpreter, whatever it does with subnormals and ties.
"""

from __future__ import annotations

from optimized.device import INTERPRETED  # noqa: F401  (decides how Triton is imported)

# ruff: isort: split
import triton
import triton.language as tl

E4M3_LARGEST = tl.constexpr(448.0)
E2M1_LARGEST = tl.constexpr(6.0)


@triton.jit
def power_of_two_scale(amax, reciprocal: tl.constexpr):
    """2^ceil(log2(amax · reciprocal)) of positive finite fp32: its E8M0 code as int32, and its inverse in fp32.

    The exponent is read off the bits: log2 is wrong just above powers of two.
    """
    bits = (amax * reciprocal).to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(code):
    """uint8 E8M0 -> fp32 2^(code - 127); 255 is NaN."""
    code = code.to(tl.int32)
    # 2^-127 is subnormal in fp32.
    bits = tl.where(code == 0, 0x00400000, code << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """fp32 -> uint8 E4M3 code, to nearest even, saturating at 448, NaN kept."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal: 20 of 23 fraction bits are rounded off, and the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves just those in the sum's last bits, rounded to even.
    shifted = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, shifted - 0x46800000, normal)
    code = tl.where(magnitude >= 0x43E00000, 0x7E, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """uint8 E4M3 code -> fp32; the two NaN codes are NaN."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """fp32 -> int32 E2M1 code 0...15, to nearest with ties to the even code, saturating at 6; -0 keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 28) & 8
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - (126 << 1)
    # Below 1 codes are multiples of 1/2: adding 2^22 leaves just those in the sum's last bits, rounded to even.
    shifted = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0x3F800000, shifted - 0x4A800000, normal)
    return tl.where(magnitude > 0x40C00000, 7, code) | sign


@triton.jit
def decode_e2m1(code):
    """E2M1 code 0...15 of any integer type -> fp32."""
    code = code.to(tl.int32)
    magnitude = code & 7
    # 0 and 1/2 are subnormal codes; from 1 on, the bits are an exponent and half a fraction.
    bits = tl.where(magnitude >= 2, 0x3F000000 + (magnitude << 22), magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def pack_pairs(codes, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """int32 codes [ROWS, 2·PAIRS] -> uint8 [ROWS, PAIRS], the even element in the low nibble."""
    low, high = tl.split(tl.reshape(codes, (ROWS, PAIRS, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack_pairs(packed):
    """uint8 [ROWS, PAIRS] -> fp32 E2M1 numbers [ROWS, 2·PAIRS], the low nibble first."""
    packed = packed.to(tl.int32)
    return tl.interleave(decode_e2m1(packed & 15), decode_e2m1(packed >> 4))
