"""Small mistakes in kernels, as text that replaces text, each with a case that must reject it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelFault:
    """`old` stands once in `optimized/{module}.py`."""

    name: str
    module: str
    old: str
    new: str
    case: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module under which the fault shows: tiles so small that the case has several."""


SEVERAL_PROGRAMS = {"TILE": 256, "LARGEST_SHARE": 512}
"""Under which the case below walks its rows by up to three programs of two tiles."""
SEVERAL_TILES = "indexer/select/released-top-k"

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
        "share-of-features-lost",
        "hyper_connections",
        "range(splits)",
        "range(splits - 1)",
        "hyper_connections/coefficients/attention",
    ),
    KernelFault(
        "mixing-weights-in-bf16",
        "hyper_connections",
        "total = tl.dot(values, tl.trans(middle), total)",
        "",
        "hyper_connections/coefficients/attention",
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
        "split-merged-without-rescale",
        "sparse_attention",
        "denominator += tl.load(part_denominator + part) * rescale",
        "denominator += tl.load(part_denominator + part)",
        "sparse_attention/running-maximum/in-last-block",
        {"LIST_SPLITS": 3},
    ),
    KernelFault(
        "carry-lost",
        "compressor",
        "range(1, kept + 1)",
        "range(1, kept)",
        "compressor/groups-ratio-2/steps-from-the-first-token",
    ),
    KernelFault(
        "carry-by-place-in-the-call",
        "compressor",
        "(first + token) % ring",
        "token % ring",
        "compressor/groups-ratio-2/continued-in-pieces",
    ),
    KernelFault(
        "carry-of-the-first-slot",
        "compressor",
        "slot = tl.load(slots + request)",
        "slot = tl.load(slots)",
        "compressor/groups-ratio-2/requests-at-different-positions",
    ),
    KernelFault(
        "shares-of-a-group-not-divided",
        "compressor",
        "(tl.exp(gate - largest) / total)",
        "tl.exp(gate - largest)",
        "compressor/groups-ratio-2/exactly-one-group",
    ),
    KernelFault(
        "ring-off-by-one",
        "rows",
        "(slot * ring + group % ring)",
        "(slot * ring + (group + 1) % ring)",
        "attention/window-only/prefill-2-tokens",
    ),
    KernelFault(
        "rows-to-the-first-slot",
        "rows",
        "slot = tl.load(slots + request, mask=present, other=0)",
        "slot = tl.load(slots)",
        "attention/batch/requests-at-different-positions",
    ),
    KernelFault(
        "scales-of-the-next-row",
        "rows",
        "rows + first + CODE_BYTES + group[None, :]",
        "rows + first + CODE_BYTES + SCALE_BYTES + CODE_BYTES + group[None, :]",
        "attention/window-only/prefill-2-tokens",
    ),
    KernelFault(
        "scale-of-a-row-for-all-its-groups",
        "rows",
        "scale[:, :, None]",
        "tl.max(scale, axis=1)[:, None, None]",
        "attention/token-in-window-and-rows/short-prompt",
    ),
    KernelFault(
        "row-turned-by-its-number",
        "rows",
        "table = (group * RATIO)[:, None]",
        "table = group[:, None]",
        "attention/own-index-keys/even-prompt-one-step",
    ),
    KernelFault(
        "call-not-causal",
        "packed_attention",
        "position_of_call <= position",
        "position_of_call < first + length",
        "attention/window-only/prefill-one-more-than-window",
    ),
    KernelFault(
        "packed-window-one-too-wide",
        "packed_attention",
        "position - window_size + 1",
        "position - window_size",
        "attention/window-only/prefill-one-more-than-window",
    ),
    KernelFault(
        "window-of-the-first-slot",
        "packed_attention",
        "slot = tl.load(slots + request)",
        "slot = tl.load(slots)",
        "attention/batch/requests-at-different-positions",
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
        "last-tile-of-an-expert-ends-at-once",
        "expert_tiles",
        "return start >= end,",
        "return start + ROWS >= end,",
        "experts/lattice-sum/two-experts-for-all-tokens",
    ),
    KernelFault(
        "last-row-of-a-tile-dropped",
        "expert_tiles",
        "present = row < end",
        "present = row < end - 1",
        "experts/lattice-sum/two-experts-for-all-tokens",
    ),
    KernelFault(
        "rows-beyond-whole-tiles-lost",
        "expert_tiles",
        "((counts + rows - 1) // rows).cumsum(0)",
        "(counts // rows).cumsum(0)",
        "experts/lattice-sum/two-experts-for-all-tokens",
    ),
    KernelFault(
        "cut-for-larger-tiles-than-launched",
        "experts",
        "RowTiles.of(place, w1.shape[0], tiles.rows)",
        "RowTiles.of(place, w1.shape[0], 4 * tiles.rows)",
        "experts/weighted-sum-and-clamps/trace",
    ),
    KernelFault(
        "fewer-programs-than-tiles",
        "expert_tiles",
        "chosen + (flat.numel() - chosen) // rows",
        "(flat.numel() + rows - 1) // rows",
        "experts/random-weights/every-expert-in-turn",
    ),
    KernelFault(
        "output-turned-forward",
        "output_projection",
        "turned(left, right, cosine, -sine)",
        "turned(left, right, cosine, sine)",
        "attention/output-turned-back/own-position",
    ),
    KernelFault(
        "first-pair-of-the-output-not-turned",
        "output_projection",
        "turns = (pair >= 0)",
        "turns = (pair > 0)",
        "attention/output-turned-back/own-position",
    ),
    KernelFault(
        "output-turned-by-the-first-position",
        "output_projection",
        "tl.load(places + row, mask=present_rows, other=0)",
        "tl.load(places + row * 0, mask=present_rows, other=0)",
        "attention/output-turned-back/own-position",
    ),
    KernelFault(
        "all-groups-by-the-first-matrix",
        "output_projection",
        "(group * columns + column)[:, None] * depth",
        "column[:, None] * depth",
        "attention/output-turned-back/own-position",
    ),
    KernelFault(
        "step-turns-back-to-the-start",
        "attention",
        "batch.positions, self.wo_a,",
        "batch.positions * 0, self.wo_a,",
        "attention/window-only/prefill-2-tokens",
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
    KernelFault(
        "last-tile-lost",
        "selection",
        "for start in range(split * share, limit, TILE):\n        place = start + tl.arange(0, TILE)\n        inside",
        "for start in range(split * share, limit - limit % TILE, TILE):\n"
        "        place = start + tl.arange(0, TILE)\n        inside",
        SEVERAL_TILES,
        SEVERAL_PROGRAMS,
    ),
    KernelFault(
        "ties-of-earlier-programs-not-counted",
        "selection",
        "taken += tl.minimum(equal_seen, ties)",
        "taken += 0",
        SEVERAL_TILES,
        SEVERAL_PROGRAMS,
    ),
    KernelFault(
        "last-tie-left-out",
        "selection",
        "rank = equal_seen + tl.cumsum(equal, axis=0) - equal",
        "rank = equal_seen + tl.cumsum(equal, axis=0)",
        "indexer/select/ties-at-the-last-place",
    ),
    KernelFault(
        "newest-key-not-scored",
        "scoring",
        "valid = (position >= 0) & (position < seen)",
        "valid = (position >= 0) & (position < seen - 1)",
        "attention/candidate-source-ratio-1/prefill-shorter-than-window",
    ),
    KernelFault(
        "candidates-ignored",
        "scoring",
        "if config.uses_candidates(layer_id) else None",
        "if False else None",
        "attention/re-indexing/prefill-shorter-than-window",
    ),
    KernelFault(
        "candidate-blocks-shifted",
        "scoring",
        "position = block * SIZE + place % SIZE",
        "position = block * SIZE + (place + 1) % SIZE",
        "attention/re-indexing/prefill-shorter-than-window",
    ),
    KernelFault(
        "rows-of-the-first-source",
        "config",
        "return int(max(earlier))",
        "return int(min(earlier))",
        "attention/reusing-ratio-2/prefill-shorter-than-window",
    ),
    KernelFault(
        "mixture-reads-with-its-own-mix",
        "block",
        "hyper_connection_read(h, attn_pre,",
        "hyper_connection_read(h, ffn_pre,",
        "block/mix-one-sublayer-late-window-only/prefill-single-token",
    ),
    KernelFault(
        "attention-reads-with-its-own-mix",
        "block",
        "hyper_connection_read(h, pre,",
        "hyper_connection_read(h, attn_pre,",
        "block/mix-one-sublayer-late-source-ratio-2/prefill-single-token",
    ),
    KernelFault(
        "mix-not-handed-on",
        "stack",
        "h, pre = block.step(",
        "h, _ = block.step(",
        "stack/source-before-reuse-layers-2-3/prefill-single-token",
    ),
)
