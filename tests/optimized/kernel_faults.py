"""Small mistakes in kernels, as text that replaces text, each with a case that must reject it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelFault:
    """`old` stands once in `optimized/{module}.py`."""

    name: str
    module: str
    old: str
    new: str
    case: str


FAULTS = (
    KernelFault(
        "e4m3-ties-away",
        "codecs",
        "0x7FFFF + ((magnitude >> 20) & 1)",
        "0x80000",
        "quantize/fp8-codes/saturation-subnormals-and-signs",
    ),
    KernelFault(
        "e4m3-subnormals-flushed",
        "codecs",
        "shifted - 0x46800000, normal",
        "0, normal",
        "quantize/fp8-codes/saturation-subnormals-and-signs",
    ),
    KernelFault(
        "e2m1-ties-away",
        "codecs",
        "0x1FFFFF + ((magnitude >> 22) & 1)",
        "0x200000",
        "quantize/fp4-e8m0-ties/seven-midpoints",
    ),
    KernelFault(
        "nibbles-swapped", "codecs", "(low | (high << 4))", "(high | (low << 4))", "quantize/fp4-e8m0-nibbles/all-codes"
    ),
    KernelFault(
        "scale-rounded-down",
        "codecs",
        "(bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)",
        "bits >> 23",
        "quantize/fp8-scale-rounds-up/amax-1.2-times-448",
    ),
    KernelFault(
        "weight-scale-of-nan",
        "codecs",
        "tl.where(code == 255, 0x7FC00000, bits)",
        "bits",
        "quantize/fp8-weight-every-code-and-scale/nan-scale",
    ),
    KernelFault(
        "reciprocal-for-division",
        "quantize",
        "tl.div_rn(values, scale[:, None])",
        "values * tl.div_rn(1.0, scale)[:, None]",
        "quantize/fp4-e4m3-true-division/tie-under-scale-15-over-512",
    ),
    KernelFault(
        "weight-tile-by-row",
        "linear",
        "(column // 32)[:, None] * in_row",
        "(column // 64)[:, None] * in_row",
        "linear/lattice-fp8/three-tokens",
    ),
    KernelFault(
        "product-in-bf16",
        "linear",
        "left.to(tl.float32), right.to(tl.float32)",
        "left.to(tl.bfloat16).to(tl.float32), right.to(tl.float32)",
        "linear/lattice-fp32/fp32-input",
    ),
    KernelFault(
        "mean-over-padding",
        "norm",
        "axis=1) / width",
        "axis=1) / values.shape[1]",
        "norm/rms-vectors/rows-of-different-size",
    ),
    KernelFault(
        "inverse-turns-forward", "rotary", "-1.0 if inverse else 1.0", "1.0", "rotary/inverse/one-hot-at-position-3"
    ),
    KernelFault(
        "combination-transposed",
        "hyper_connections",
        "(token * STREAMS + summed) * STREAMS + written",
        "(token * STREAMS + written) * STREAMS + summed",
        "hyper_connections/lattice-write/one-hot-comb",
    ),
    KernelFault(
        "one-sinkhorn-round-less",
        "hyper_connections",
        "range(ROUNDS - 1)",
        "range(ROUNDS - 2)",
        "hyper_connections/coefficient-vectors/slow-sinkhorn-triangle",
    ),
    KernelFault(
        "sink-left-out",
        "sparse_attention",
        "denominator += tl.exp(tl.load(sink + head, mask=head < heads, other=0.0) - maximum)",
        "denominator += 0.0",
        "sparse_attention/sink/own-value-per-head",
    ),
    KernelFault(
        "maximum-not-carried",
        "sparse_attention",
        "numerator * rescale[:, None])",
        "numerator)",
        "sparse_attention/running-maximum/in-last-block",
    ),
    KernelFault(
        "last-row-for-none",
        "sparse_attention",
        "valid = row >= 0",
        "valid = row >= -1",
        "sparse_attention/minus-one/front-middle-end",
    ),
    KernelFault(
        "heads-without-relu",
        "indexer",
        "tl.where(products < 0.0, 0.0, products)",
        "products",
        "indexer/scores/relu-per-head",
    ),
    KernelFault(
        "products-not-rounded",
        "indexer",
        "tl.dot(q, tl.trans(k)).to(tl.bfloat16)",
        "tl.dot(q, tl.trans(k))",
        "indexer/scores/dot-product-rounded",
    ),
    KernelFault(
        "key-order-of-negatives",
        "selection",
        "tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)",
        "tl.where(bits >= 0x8000, bits - 0x8000, bits + 0x8000)",
        "indexer/select/all-scores-negative",
    ),
    KernelFault(
        "newest-block-not-pinned",
        "candidates",
        'tl.where(pinned, float("inf"), largest)',
        "largest",
        "candidates/newest-block/worst-score",
    ),
    KernelFault(
        "bias-in-the-weight",
        "gate",
        "tl.where(at, score, 0.0)",
        "tl.where(at, biased, 0.0)",
        "gate/bias-selects-but-does-not-weigh/trace",
    ),
    KernelFault(
        "image-bias-ignored",
        "gate",
        "tl.where(seen[:, None], other, offset)",
        "offset",
        "gate/vectors/image-tokens-between-text",
    ),
    KernelFault(
        "gate-clamped-below",
        "experts",
        "gate = tl.where(gate > limit, limit, gate)",
        "gate = tl.where(gate > limit, limit, tl.where(gate < -limit, -limit, gate))",
        "experts/gate-and-up-clamps/routed",
    ),
    KernelFault(
        "weighted-after-the-quantiser",
        "experts",
        "values = values * tl.load(routing + slot, mask=present, other=0.0)[:, None]",
        "values = values",
        "experts/routing-weight-before-quantiser/uneven-weights",
    ),
    KernelFault(
        "barrier-forgotten",
        "engram",
        "blocked = blocked | tl.load(",
        "blocked = tl.load(",
        "engram/look-back/image-token-stops-for-good",
    ),
    KernelFault(
        "hash-in-32-bits",
        "engram",
        "(compressed * tl.load(multipliers + distance))",
        "(compressed * tl.load(multipliers + distance)).to(tl.int32)",
        "engram/look-back/products-beyond-32-bits",
    ),
)
