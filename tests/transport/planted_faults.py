"""Mistakes planted in the numpy example, each with what a report ought to call it.

As a program it is the example's harness with one of them: `cmd:python tests/transport/planted_faults.py relu-missing`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PORT = Path(__file__).resolve().parents[2] / "ci" / "examples" / "numpy_port"


@dataclass(frozen=True)
class PlantedFault:
    """One mistake."""

    changed: str
    """What the author of the port did."""
    module: str
    edits: tuple[tuple[str, str], ...]
    """Passages of the module's source, each there once, and what stands in their place."""
    case: str
    """A case that must reject it."""
    names: tuple[str, ...]
    """What it may be called: faults of `conformance/faults/catalogue`, or declared deviations."""


PLANTED: Mapping[str, PlantedFault] = {
    "relu-missing": PlantedFault(
        "Index scores add up heads without cutting off negative ones.",
        "indexer",
        (("np.maximum(dots, 0) * head_weights", "dots * head_weights"),),
        "indexer/scores/relu-per-head",
        ("indexer/relu-missing",),
    ),
    "rope-half-split": PlantedFault(
        "Feature i is paired with feature i + half, as in other models.",
        "rotary",
        (
            ("even, odd = x[..., 0::2], x[..., 1::2]", "even, odd = np.split(x, 2, axis=-1)"),
            (
                "return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)",
                "return np.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)",
            ),
        ),
        "rotary/pairs-adjacent/one-hot-at-position-1",
        ("rotary/half-split-pairs",),
    ),
    "comb-transposed": PlantedFault(
        "The write sums over the second index of the mix.",
        "hyper_connections",
        (
            (
                "(comb[..., None] * h[..., :, None, :]).sum(axis=-3)",
                "(comb[..., None] * h[..., None, :, :]).sum(axis=-2)",
            ),
        ),
        "hyper_connections/lattice-write/two-by-three-tokens",
        ("hyper_connections/write-transposed",),
    ),
    "nibbles-swapped": PlantedFault(
        "The even element goes to the high nibble.",
        "quantize",
        (("codes[..., 0::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., 0::2] << 4)"),),
        "quantize/fp4-e4m3-nibbles/all-codes",
        ("quantize/packed-high-nibble-first",),
    ),
    "weight-nibbles-swapped": PlantedFault(
        "The even element of a weight is read from the high nibble.",
        "quantize",
        (("np.stack([packed & 15, packed >> 4], axis=-1)", "np.stack([packed >> 4, packed & 15], axis=-1)"),),
        "quantize/fp4-weight-every-code-and-scale/normal-range",
        ("quantize/unpacked-high-nibble-first",),
    ),
    "activation-quantiser-skipped": PlantedFault(
        "The input of FP8 and FP4 linears stays in bf16.",
        "linear",
        (
            (
                "activations, activation_scales = E4M3_VALUES[codes], E8M0_VALUES[scales]",
                "activations, activation_scales = x.reshape(codes.shape), np.ones(scales.shape, np.float32)",
            ),
        ),
        "linear/lattice-fp8/three-tokens",
        ("no-activation-quantiser", "linear/fp8-input-not-quantised", "linear/fp4-input-not-quantised"),
    ),
    "scale-rounded-down": PlantedFault(
        "The power-of-two scale is the one below instead of the one above.",
        "quantize",
        ((" + ((bits & 0x7FFFFF) != 0)", ""),),
        "quantize/fp8-scale-rounds-up/amax-1.9-times-448",
        ("quantize/e8m0-floor",),
    ),
    "reciprocal-for-division": PlantedFault(
        "The codes of compressed rows are made with the reciprocal of their scale.",
        "quantize",
        (("encode_e2m1(groups / E4M3_VALUES[scales]", "encode_e2m1(groups * (1 / E4M3_VALUES[scales])"),),
        "quantize/fp4-e4m3-true-division/tie-under-scale-15-over-512",
        ("quantize/fp4-e4m3-by-reciprocal",),
    ),
    "norm-weight-plus-one": PlantedFault(
        "The norm's weight is taken as an offset from one.",
        "linear",
        (("np.float32(eps))) * weight)", "np.float32(eps))) * (1 + weight))"),),
        "norm/rms-vectors/fp32-weight",
        ("norm/weight-plus-one",),
    ),
    "yarn-missing": PlantedFault(
        "Layers with compressed rows have their base, but no YaRN.",
        "rotary",
        (("if not compressed:", "if True:"),),
        "rotary/yarn-ramp/small",
        ("rotary/yarn-missing",),
    ),
    "sink-ignored": PlantedFault(
        "The sink is not part of the denominator.",
        "attention",
        (("total = total + np.exp(sink - largest)", "total = np.where(total > 0, total, np.float32(1))"),),
        "sparse_attention/sink/own-value-per-head",
        ("sparse_attention/sink-ignored",),
    ),
    "output-not-turned-back": PlantedFault(
        "The output keeps the rotation of its rows.",
        "attention",
        (("o = rotary.rotate(config, layer_id, o, positions, inverse=True)", "o = o.copy()"),),
        "attention/output-turned-back/own-position",
        ("attention/output-not-turned-back",),
    ),
    "mean-of-group": PlantedFault(
        "A group is its mean: the gates are not read.",
        "attention",
        (("(weights / weights.sum(axis=2, keepdims=True) * kv).sum(axis=2)", "kv.mean(axis=2)"),),
        "compressor/pooling/one-gate-dominates",
        ("compressor/mean-of-group",),
    ),
    "selection-not-sorted": PlantedFault(
        "Selected rows come best first.",
        "indexer",
        (
            (
                'np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :count], axis=-1)',
                'np.argsort(-scores, axis=-1, kind="stable")[..., :count]',
            ),
        ),
        "indexer/select/ascending-by-position",
        ("indexer/selection-not-sorted",),
    ),
    "newest-block-not-pinned": PlantedFault(
        "The block of the newest row must earn its place.",
        "indexer",
        (("np.where(newest, np.float32(np.inf), block_scores)", "block_scores"),),
        "candidates/newest-block/worst-score",
        ("candidates/newest-not-pinned",),
    ),
    "bias-in-weights": PlantedFault(
        "Routing weights are made of the biased scores.",
        "experts",
        (("np.take_along_axis(scores, chosen", "np.take_along_axis(biased, chosen"),),
        "gate/vectors/bias-of-10-on-one-expert",
        ("gate/bias-in-weights",),
    ),
    "gate-and-up-swapped": PlantedFault(
        "w1 and w3 are taken for each other.",
        "experts",
        (('project("w1", x)', 'project("w3", x)'), ('np.clip(project("w3", x)', 'np.clip(project("w1", x)')),
        "experts/gate-and-up-clamps/routed",
        ("experts/gate-and-up-swapped",),
    ),
    "sum-for-xor": PlantedFault(
        "The hash adds up the products of ids and multipliers.",
        "engram",
        (("hashed = hashed ^ (", "hashed = hashed + ("),),
        "engram/hash/text",
        ("engram/sum-for-xor",),
    ),
    "engram-gate-sign-missing": PlantedFault(
        "The root of the dot product loses its sign.",
        "engram",
        (("np.sign(dot) * np.sqrt", "np.sqrt"),),
        "engram/write/keys-then-value",
        ("engram/gate-without-sign",),
    ),
}


def plant(fault: PlantedFault) -> None:
    """Load the module with the mistake, so that the rest of the port finds it under the module's name."""
    source = (PORT / f"{fault.module}.py").read_text(encoding="utf-8")
    for passage, replacement in fault.edits:
        if source.count(passage) != 1:
            raise ValueError(f"{fault.module}.py: {passage!r} is there {source.count(passage)} times")
        source = source.replace(passage, replacement)
    sys.path.insert(0, str(PORT))
    module = sys.modules[fault.module] = ModuleType(fault.module)
    exec(compile(source, f"{fault.module}.py", "exec"), module.__dict__)


if __name__ == "__main__":
    plant(PLANTED[sys.argv[1]])
    import harness

    harness.main()
