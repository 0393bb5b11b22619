"""Hand-made vectors of `model`, `block` and `stack`: the ends of the model, and the mix between layers (5 and 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import block, weights as made
from conformance.cases.vectors.configuration import CONFIG, MODEL
from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.linear import Parameters
from conformance.judge.components.model import head
from conformance.judge.expectations import Exact, Expectation, OwnArgmax, Within
from conformance.tensors import Tensor

ROW_AXES = ("request", "position", "feature")

ONE_LAYER: Mapping[str, Any] = {
    **block.ALL_EXPERTS,
    "n_layers": 1,
    "compress_ratios": [1],
    "kv_source_layers": [0],
    "index_source_layers": [0],
    "candidate_source_layer": 0,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
}
"""The smallest model: one layer, a ratio-1 source without Engram."""
SMALLEST = ModelConfig.from_mapping(ONE_LAYER, "conformance/cases/vectors/model.py")


def cases() -> Iterator[Case]:
    """Both ends of the model, a model of one layer, then blocks and stacks."""
    yield Case(
        "model/embed/first-and-last-rows",
        "core",
        "exact",
        "Fails when rows are read one off, cut to 16 bits of token id, scaled, or a repeated id is read once.",
        "numerics.md 9",
        _embed,
        flags=("embedding-scaled", "embedding-row-off"),
        source="hand-made",
    )
    yield Case(
        "model/head/one-stream-at-a-time",
        "core",
        "composed",
        "Fails when the streams are averaged or added, the first one is always read, or logits are rounded to bf16.",
        "numerics.md 9",
        _head,
        flags=("streams-averaged", "logits-in-bf16", "final-norm-missing"),
        source="hand-made",
    )
    yield Case(
        "model/one-layer/silent-sublayers",
        "core",
        "composed",
        "Fails when only one stream begins with the embedding, an image is not placed, or another position is read.",
        "numerics.md 5 and 9",
        _one_layer,
        flags=(
            "streams-averaged",
            "image-not-placed",
            "logits-position",
        ),
        source="hand-made",
    )
    yield from block.cases()


def _embed() -> Iterator[Step]:
    rows = 70_000
    codes = (np.arange(rows) % 251 + 0x3F00).astype(np.uint16)[:, None]
    weight = Tensor("BF16", np.concatenate([codes, (np.arange(rows) // 251 + 0x3F00).astype(np.uint16)[:, None]], 1))
    ids = np.asarray([[0, 1, rows - 1, 65_536, 65_535, 1, 1], [5, 4, 3, 2, 1, 0, rows - 1]], np.int32)
    expected = Exact("embed", weight[ids], ROW_AXES)
    yield Step(Call("embed", {"weight": weight, "input_ids": Tensor("I32", ids)}), lambda: [expected])


def _ends(config: ModelConfig) -> dict[str, Tensor]:
    return {
        "embed.weight": made.bf16("embed.weight", config.vocab_size, config.dim),
        **made.norm("norm", config.dim),
        **made.matrix("head", config.vocab_size, config.dim, "F32"),
    }


def _head() -> Iterator[Step]:
    """Mixes that read one stream, none equally, and two against each other."""
    weights = made.parameters(_ends(MODEL))
    mixes = np.asarray([[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 0.5], [1.0, -1.0, 0, 0], [0.25] * 4])
    h = made.bf16("head.h", 1, len(mixes), MODEL.hc_mult, MODEL.dim)
    pre = Tensor.from_values(mixes[None], "F32")
    arguments = {"config": CONFIG, "weights": weights.mapping(), "h": h, "pre": pre}

    def rules() -> list[Expectation]:
        final_norm, logits = head(MODEL, weights, exact(h), exact(pre))
        return [
            Within("final_norm", final_norm, "BF16", ROW_AXES),
            Within("logits", logits, "F32", ("request", "position", "token id"), "dot"),
        ]

    yield Step(Call("head", arguments), rules)


def _one_layer() -> Iterator[Step]:
    """A prompt of three that ends with an image token, and one step; no sublayer answers anything but zeros."""
    silent = (*block.SILENT_ATTENTION, *block.SILENT_MIXTURE)
    silenced = made.with_zeros(made.block(SMALLEST, 0), *silent)
    tensors = {**_ends(SMALLEST), **{f"layers.0.{name}": tensor for name, tensor in silenced.items()}}
    weights = made.parameters(tensors)
    ids, calls = np.asarray([[9, 60, 9, 31]]), [(0, 3), (3, 1)]
    images = np.asarray([[False, False, True, False]])
    features = made.bf16("model.image", 1, ids.shape[1], SMALLEST.dim)
    placed = np.where(images[..., None], features.values(), weights["embed.weight"][ids])
    shared = {"config": ONE_LAYER, "batch_size": 1}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    arguments = {**shared, "weights": weights.mapping(), "runtime": Handle("runtime"), "token_map": None}
    yield Step(Open("model", "model", arguments))
    for number, (start, length) in enumerate(calls):
        span = slice(start, start + length)
        inputs = {
            "input_ids": Tensor("I32", ids[:, span].astype(np.int32)),
            "start_pos": int64([start]),
            "image_mask": Tensor("BOOL", images[:, span].copy()),
            "image_features": features[:, span],
        }
        rules = partial(_one_layer_rules, weights, placed, calls, start + length - 1)
        yield Step(Advance("model", inputs), rules, Place(None, [number], range(start, start + length)))


def _one_layer_rules(weights: Parameters, placed: Floats, calls: list[tuple[int, int]], last: int) -> list[Expectation]:
    streams = np.repeat(placed[:, :, None], SMALLEST.hc_mult, 2)
    first = np.zeros(streams.shape[:3])
    first[..., 0] = 1.0
    inputs = block.Inputs(Bounded.exact(streams), Bounded.exact(first), np.zeros(placed.shape[:2], int), None, calls)
    h, pre = block.block_bounds(SMALLEST, 0, weights.within("layers.0."), inputs)
    _, logits = head(SMALLEST, weights, h.rounded(BF16), pre)
    return [Within("logits", logits[:, last], "F32", ("request", "token id")), OwnArgmax("output_ids", "logits")]
