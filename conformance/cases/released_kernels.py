"""Single steps of attention at the released widths, on recipe inputs: bounds that the whole layer cannot have.

Nothing is recorded for these; the judge's own equations say what may come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.attention import HEAD_AXES, ROW_AXES
from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.released_set import Released
from conformance.cases.traces import exact, int64
from conformance.judge import deviations
from conformance.judge.bounded import Bounded
from conformance.judge.components import attention, indexer, sparse_attention, window
from conformance.judge.expectations import Within
from conformance.judge.own_scores import SCORE_AXES
from conformance.tensors import Tensor

LAYER = 20
"""Compresses with ratio 1, indexes, publishes candidates: it has every weight that an attention can have."""

POSITIONS = np.asarray([[0, 129, 1_048_575]])
LISTED = 272
"""Rows that one query attends to: more than four blocks of 64, the last one short."""

Make = Callable[[Released], Step]


def cases(released: Released) -> Iterator[Case]:
    """Each step on its own."""
    table: Mapping[str, tuple[str, str, Make]] = {
        "attention/query-latent/released-width": (
            "numerics.md 6, item 1",
            "Fails when a sum over 5120 inputs is kept in less than fp32.",
            _latent,
        ),
        "attention/queries-rotated-by-layer-kind/released-width": (
            "numerics.md 6, item 1",
            "Fails when head and feature are exchanged for 64 heads of 512, or positions are taken modulo the window.",
            _queries,
        ),
        "window/rows/released-width": (
            "numerics.md 6, item 2",
            "Fails when the rotary part is left out of the quantiser, or its groups are not 32 wide.",
            _window,
        ),
        "indexer/scores-relu-and-three-roundings/released-width": (
            "numerics.md 6.3",
            "Fails when the sum over 32 heads is rounded on the way, or ReLU comes after it.",
            _scores,
        ),
        "sparse_attention/lists-longer-than-a-block/released-width": (
            "numerics.md 6, item 5",
            "Fails when a block of the list is lost, -1 is attended to, or the sink is scaled.",
            _sparse,
        ),
        "attention/output-turned-back-and-grouped/released-width": (
            "numerics.md 6, item 6",
            "Fails when heads are assigned to other groups of the output projection, or the output is not turned back.",
            _output,
        ),
    }
    for case_id, (spec, why, make) in table.items():
        yield Case(
            case_id, "full", "composed", why, spec, partial(_one, released, make), source=f"{released.name} recipe"
        )


def _one(released: Released, make: Make) -> Iterator[Step]:
    yield make(released)


def _step(
    released: Released,
    method: str,
    tap: str,
    axes: tuple[str, ...],
    arguments: Mapping[str, Any],
    expected: Callable[[], Bounded],
) -> Step:
    weights = released.parameters.within(f"layers.{LAYER}.attn.").mapping()
    shared = {"config": released.mapping, "layer_id": LAYER, "weights": weights}
    return Step(Call(method, {**shared, **arguments}), lambda: [Within(tap, expected(), "BF16", axes)], Place(LAYER))


def _input(released: Released, name: str, *shape: int) -> Tensor:
    return released.input(f"x/kernels/{name}", shape)


def _latent(released: Released) -> Step:
    x = _input(released, "x", 1, 3, released.config.dim)
    weights = released.parameters.within(f"layers.{LAYER}.attn.")
    return _step(
        released,
        "query_latent",
        "q_latent",
        ROW_AXES,
        {"x": x},
        lambda: attention.query_latent(released.config, weights, exact(x)),
    )


def _queries(released: Released) -> Step:
    latent = _input(released, "q_latent", 1, 3, released.config.q_lora_rank)
    weights = released.parameters.within(f"layers.{LAYER}.attn.")
    return _step(
        released,
        "attention_queries",
        "attn_q",
        HEAD_AXES,
        {"q_latent": latent, "positions": int64(POSITIONS)},
        lambda: attention.queries(released.config, LAYER, weights, exact(latent), POSITIONS),
    )


def _window(released: Released) -> Step:
    x = _input(released, "x", 1, 3, released.config.dim)
    weights = released.parameters.within(f"layers.{LAYER}.attn.")
    return _step(
        released,
        "window_rows",
        "window_rows",
        ROW_AXES,
        {"x": x, "positions": int64(POSITIONS)},
        lambda: window.window_rows(released.config, LAYER, weights, exact(x), POSITIONS),
    )


def _output(released: Released) -> Step:
    o = _input(released, "o", 1, 3, released.config.n_heads, released.config.head_dim)
    weights = released.parameters.within(f"layers.{LAYER}.attn.")
    return _step(
        released,
        "attention_output",
        "attn_out",
        ROW_AXES,
        {"o": o, "positions": int64(POSITIONS)},
        lambda: attention.output(released.config, LAYER, weights, exact(o), POSITIONS),
    )


def _scores(released: Released) -> Step:
    config, positions = released.config, np.asarray([[0, 100, LISTED - 1]])
    queries = _input(released, "index_q", 1, 3, config.index_n_heads, config.index_head_dim)
    head_weights = _input(released, "index_weights", 1, 3, config.index_n_heads)
    keys = _input(released, "index_keys", 1, LISTED, config.index_head_dim)
    arguments = {
        "config": released.mapping,
        "layer_id": LAYER,
        "queries": queries,
        "head_weights": head_weights,
        "keys": keys,
        "positions": int64(positions),
        "candidates": None,
    }

    def rules() -> list[Within]:
        visible = indexer.visibility(config, LAYER, positions, LISTED)
        expected = indexer.index_scores(exact(queries), exact(head_weights), exact(keys), visible)
        return [Within("index_score", expected, deviations.score_format().name, SCORE_AXES)]

    return Step(Call("index_scores", arguments), rules, Place(LAYER))


def _sparse(released: Released) -> Step:
    config = released.config
    q = _input(released, "q", 1, 3, config.n_heads, config.head_dim)
    kv = _input(released, "kv", 1, LISTED, config.head_dim)
    sink = released.weights[f"layers.{LAYER}.attn.attn_sink"]
    indices = np.full((1, 3, LISTED), -1)
    indices[0, 0, :1] = LISTED - 1
    indices[0, 1, 64:] = np.arange(64, LISTED)
    indices[0, 2] = np.arange(LISTED)[::-1]
    scale = config.head_dim**-0.5
    arguments = {"q": q, "kv": kv, "indices": Tensor("I32", indices.astype(np.int32)), "sink": sink, "scale": scale}

    def rules() -> list[Within]:
        counts = sparse_attention.counts_of(indices, LISTED)
        expected = sparse_attention.attend(exact(q), exact(kv), counts, None, sink.values(), scale)
        return [Within("attn_o", expected, "BF16", HEAD_AXES)]

    return Step(Call("sparse_attention", arguments), rules, Place(LAYER))
