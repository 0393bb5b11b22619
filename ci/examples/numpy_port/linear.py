"""Linear layers and RMSNorm (numerics.md 3)."""

import numpy as np

import quantize
from quantize import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, bf16


def blockwise(x, weight, weight_scales):
    """Quantise x with Q8, then add up blocks of 32 inputs in float32.

    weight holds the values of the codes [N, K], weight_scales one number per row and block [N, K / 32].
    """
    codes, scales = quantize.quantize_fp8(x.reshape(-1, x.shape[-1]))
    activations, activation_scales = E4M3_VALUES[codes], E8M0_VALUES[scales]
    out = np.zeros((len(activations), len(weight)), np.float32)
    for block in range(weight_scales.shape[1]):
        inputs = slice(32 * block, 32 * block + 32)
        products = activations[:, inputs] @ weight[:, inputs].T
        out += products * activation_scales[:, block, None] * weight_scales[:, block]
    return bf16(out).reshape(*x.shape[:-1], -1)


def linear_fp8(x, weight, scale):
    """FP8 weight, one scale per tile of 32 x 32."""
    return blockwise(x, E4M3_VALUES[weight], np.repeat(E8M0_VALUES[scale], 32, axis=0)[: len(weight)])


def linear_fp4(x, weight, scale):
    """Packed FP4 weight, one scale per row and 32 inputs."""
    return blockwise(x, E2M1_VALUES[quantize.unpack(weight)], E8M0_VALUES[scale])


def linear_bf16(x, weight):
    """bf16 weight: sums in float32, the result in bf16."""
    return bf16(x @ weight.T)


def linear_fp32(x, weight):
    """fp32 weight: the result stays float32."""
    return x @ weight.T


def rms_norm(x, weight, eps):
    """RMSNorm in float32, rounded once at the end."""
    mean_square = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
    return bf16(x * (1 / np.sqrt(mean_square + np.float32(eps))) * weight)
