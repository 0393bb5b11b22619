"""The vision tower and its aligner (numerics.md 11) on values with error bounds.

`grids` int64 [images, 2] counts the rows and columns of patches of each image; their patches follow one another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import (
    ELEMENTARY_ROUNDOFF,
    UNIT_ROUNDOFF,
    Bounded,
    Floats,
    accumulated,
    concatenate,
    dot,
    sum_roundoff,
)
from conformance.judge.components.hyper_connections import sigmoid
from conformance.judge.components.linear import Parameters
from conformance.judge.components.norm import rms_norm

Ints = npt.NDArray[np.int64]

NORM_EPS = 1e-6

LARGEST_SLOPE_OF_GELU = 1.13
"""The derivative of x Phi(x) is Phi(x) + x phi(x), largest at x = sqrt(2): 1.1290."""


def projected(x: Bounded, weights: Parameters, name: str) -> Bounded:
    """x [..., K] times a stored weight [N, K] plus its bias, before the one rounding.

    The bias may be the first or the last term of the fp32 sum: it is one more input whose weight is 1.
    """
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    ones = Bounded.exact(np.ones((*x.shape[:-1], 1)))
    extended = np.concatenate([weight, bias[:, None]], axis=1)
    return dot(concatenate([x, ones], -1), Bounded.exact(extended))


def patch_embedding(weights: Parameters, patches: Bounded) -> Bounded:
    """Patches [n,3,P,P] -> [n,vision_dim], before the rounding."""
    return projected(patches.reshape(patches.shape[0], -1), weights, "proj")


def frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """fp32 frequencies [d/4] of a head of width d, the same for rows and for columns."""
    quarter = config.vision_dim // config.vision_n_heads // 4
    exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
    power = np.power(config.vision_rope_theta, exponents.astype(np.float64)).astype(np.float32)
    return np.asarray(np.float32(1.0) / power, dtype=np.float32)


def angles(config: ModelConfig, grids: Ints) -> Bounded:
    """Angles [n,d/2] of every patch: by row, then by column.

    The power may be rounded, or inverted in another order, by a couple of fp32 ulps; the product rounds once.
    """
    parts = []
    for rows, columns in grids:
        place = np.indices((rows, columns)).reshape(2, -1).astype(np.float64)
        parts.append(
            (place[:, :, None] * frequencies(config).astype(np.float64))
            .swapaxes(0, 1)
            .reshape(-1, 2 * _quarter(config))
        )
    value = np.concatenate(parts)
    return Bounded(value, (ELEMENTARY_ROUNDOFF + UNIT_ROUNDOFF) * np.abs(value))


def _quarter(config: ModelConfig) -> int:
    return config.vision_dim // config.vision_n_heads // 4


def rotate(config: ModelConfig, x: Bounded, grids: Ints) -> Bounded:
    """Turn the halves of heads [n,H,d] as pairs (x[i], x[i + d/2]), before the rounding."""
    angle = angles(config, grids)
    # Sine and cosine move by at most the angle's own error, and are two ulps off by themselves.
    cos, sin = (
        Bounded(turn, angle.error + ELEMENTARY_ROUNDOFF * np.abs(turn))[:, None]
        for turn in (np.cos(angle.value), np.sin(angle.value))
    )
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: Bounded, k: Bounded, v: Bounded, scale: float) -> Bounded:
    """Softmax attention of [n,H,d] over all n, before the rounding; nothing is masked.

    Weights w_j = exp(s_j - s_max) enter numerator and denominator unrounded.  With a score off by e_j its weight is off
    by expm1(e_j) relative, in both: the result moves by sum p_j (v_j - o) e_j, which is what is accumulated here.
    """
    heads = [part.swapaxes(0, 1) for part in (q, k, v)]
    scores = dot(heads[0], heads[1]) * scale
    offset = scores.value - scores.value.max(-1, keepdims=True)
    weight = np.exp(offset)
    probability = weight / weight.sum(-1, keepdims=True)
    # The exponential as exp2 multiplies by log2 e first; a running maximum costs one more factor.
    relative = (
        np.expm1(np.minimum(scores.error, 700.0)) + UNIT_ROUNDOFF * (2 * np.abs(offset) + 3) + 2 * ELEMENTARY_ROUNDOFF
    )
    values = heads[2]
    result = probability @ values.value
    # |v_j - o| for each query, row and feature.
    lever = np.abs(values.value[:, None] - result[:, :, None])
    share = (probability * relative)[..., None]
    moved = accumulated((share * lever).sum(-2), ((share * lever) ** 2).sum(-2))
    second_order = (probability * relative).sum(-1, keepdims=True)
    inherited = accumulated(probability @ values.error, probability**2 @ values.error**2)
    sums = (2 * sum_roundoff(q.shape[0]) + ELEMENTARY_ROUNDOFF) * (probability @ values.magnitude)
    error = moved * (1 + 2 * second_order) + inherited + sums
    return Bounded(result, error).swapaxes(0, 1)


def attention(config: ModelConfig, weights: Parameters, x: Bounded, grids: Ints) -> Bounded:
    """x [n,vision_dim] already normed -> [n,vision_dim], before the last rounding."""
    heads, width = config.vision_n_heads, config.vision_dim // config.vision_n_heads
    stacked = projected(x, weights, "wqkv").rounded(BF16).reshape(-1, 3, heads, width)
    q = rotate(config, stacked[:, 0], grids).rounded(BF16)
    k = rotate(config, stacked[:, 1], grids).rounded(BF16)
    ends = np.cumsum(grids.prod(-1))
    out = [
        attend(q[first:end], k[first:end], stacked[first:end, 2], width**-0.5).rounded(BF16)
        for first, end in zip(ends - grids.prod(-1), ends, strict=True)
    ]
    return projected(concatenate(out, 0).reshape(x.shape[0], -1), weights, "wo")


def silu(x: Bounded) -> Bounded:
    """x sigma(x)."""
    return x * sigmoid(x)


def mlp(weights: Parameters, x: Bounded) -> Bounded:
    """x [n,vision_dim] already normed -> [n,vision_dim], before the last rounding."""
    both = dot(x, weights.exact("w1.weight")).rounded(BF16)
    half = both.shape[-1] // 2
    activated = silu(both[:, :half]).rounded(BF16)
    return dot((activated * both[:, half:]).rounded(BF16), weights.exact("w2.weight"))


def block(config: ModelConfig, weights: Parameters, x: Bounded, grids: Ints) -> Bounded:
    """One block on x [n,vision_dim], before the last rounding."""
    normed = rms_norm(x, weights["norm1.weight"], NORM_EPS).rounded(BF16)
    attended = attention(config, weights.within("attn."), normed, grids).rounded(BF16)
    x = (x + attended).rounded(BF16)
    normed = rms_norm(x, weights["norm2.weight"], NORM_EPS).rounded(BF16)
    return x + mlp(weights.within("mlp."), normed).rounded(BF16)


def tower(config: ModelConfig, weights: Parameters, patches: Bounded, grids: Ints) -> Bounded:
    """Patches [n,3,P,P] -> [n,vision_dim] after the final norm, before its rounding."""
    x = patch_embedding(weights.within("patch_embed."), patches).rounded(BF16)
    for number in range(config.vision_n_layers):
        x = block(config, weights.within(f"blocks.{number}."), x, grids).rounded(BF16)
    return rms_norm(x, weights["norm.weight"], NORM_EPS)


def cells(config: ModelConfig, x: Bounded, grids: Ints) -> Bounded:
    """What the aligner reads: [n,C] -> [m, C*r*r], each cell's features as (channel, dy, dx), zeros past the edges."""
    return concatenate(
        [
            Bounded(*(_cells(config, part, *grid) for part in (image.value, image.error)))
            for image, grid in zip(_by_image(x, grids), grids.tolist(), strict=True)
        ],
        0,
    )


def _by_image(x: Bounded, grids: Ints) -> list[Bounded]:
    ends = np.cumsum(grids.prod(-1))
    return [x[first:end] for first, end in zip(ends - grids.prod(-1), ends, strict=True)]


def _cells(config: ModelConfig, x: Floats, rows: int, columns: int) -> Floats:
    ratio, channels = config.vision_downsample_ratio, x.shape[-1]
    found = np.zeros((-(-rows // ratio), -(-columns // ratio), channels, ratio, ratio))
    for row in range(rows):
        for column in range(columns):
            found[row // ratio, column // ratio, :, row % ratio, column % ratio] = x[row * columns + column]
    return found.reshape(-1, channels * ratio * ratio)


def gelu(x: Bounded) -> Bounded:
    """x Phi(x) with the exact error function, which is good to two ulps; the two products round."""
    value = x.value * _phi(x.value)
    spread = LARGEST_SLOPE_OF_GELU * x.error
    # 1 + erf cancels for negative x: its error is one of 1, not of the sum.
    cancelled = ELEMENTARY_ROUNDOFF * np.abs(x.value)
    return Bounded(value, spread + cancelled + ELEMENTARY_ROUNDOFF * (np.abs(value) + spread))


def _phi(x: Floats) -> Floats:
    from math import erfc

    return np.asarray(np.vectorize(lambda v: 0.5 * erfc(-v / np.sqrt(2.0)), otypes=[np.float64])(x))


def aligner(config: ModelConfig, weights: Parameters, x: Bounded, grids: Ints) -> Bounded:
    """[n,vision_dim] -> [m,D], before the last rounding."""
    hidden = projected(cells(config, x, grids), weights, "w1").rounded(BF16)
    return projected(gelu(hidden).rounded(BF16), weights, "w2")
