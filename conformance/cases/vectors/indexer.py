"""Hand-made vectors of `indexer`: keys, queries, head weights and scores (numerics.md 6.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import selection, weights as made
from conformance.cases.vectors.configuration import CONFIG, MODEL, RATIO_ONE, RATIO_TWO
from conformance.config import ModelConfig
from conformance.formats import BF16, E8M0
from conformance.judge import deviations
from conformance.judge.components import indexer as rules_of
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SCORE_AXES = ("request", "position", "compressed position")
RE_INDEXING = 6
KEY_AXES = ("request", "group", "feature")


def cases() -> Iterator[Case]:
    """Scores by hand, then what they are made of, then selections."""
    for vector in SCORES:
        yield Case(
            f"indexer/scores/{vector.name}",
            "core",
            "exact",
            vector.why,
            "numerics.md 6.3",
            partial(_scored, vector),
            flags=vector.flags,
            source="hand-made",
        )
    yield Case(
        "indexer/scores/visibility-at-group-ends",
        "core",
        "exact",
        "Fails when a query at 2k sees the group it is in, or one at 2k + 1 does not see the group it completes.",
        "numerics.md 6.3",
        _visibility,
        flags=(
            "visible-too-early",
            "visible-too-late",
            "index-mask-value",
        ),
        source="hand-made",
    )
    yield Case(
        "indexer/scores/candidates-and-visibility",
        "core",
        "exact",
        "Fails when candidates are ignored, or the mask makes a position visible that is not.",
        "numerics.md 6.3",
        _masked,
        flags=("candidates-not-applied", "candidates-show-invisible"),
        source="hand-made",
    )
    yield Case(
        "indexer/scores/two-requests",
        "core",
        "exact",
        "Fails when a request is scored against the keys, or cut at the position, of another.",
        "numerics.md 6.3",
        _two_requests,
        flags=("requests-mixed",),
        source="hand-made",
    )
    yield Case(
        "indexer/scores/more-than-2048-keys",
        "core",
        "exact",
        "Fails when keys beyond a fixed number are dropped, or their scores are those of other keys.",
        "numerics.md 6.3",
        _many_keys,
        flags=("keys-beyond-2048-lost",),
        source="hand-made",
    )
    yield Case(
        "indexer/queries/one-feature-set",
        "core",
        "exact",
        "Fails when a Hadamard transform of an earlier model spreads one feature over all.",
        "numerics.md 6.3",
        _one_hot_query,
        flags=("hadamard-kept",),
        source="hand-made",
    )
    yield Case(
        "indexer/queries/rotated-then-quantised",
        "core",
        "composed",
        "Fails when queries are not turned by their own position, stay unquantised, or have their heads transposed.",
        "numerics.md 6.3",
        _queries,
        flags=(
            "index-rotation",
            "index-not-quantised",
            "heads-transposed",
            "hadamard-kept",
        ),
        source="hand-made",
    )
    yield Case(
        "indexer/keys/three-roundings",
        "core",
        "composed",
        "Fails when the rounding after the norm or after the rotation is fused away before the FP4 codes.",
        "numerics.md 6.3",
        _keys,
        flags=(
            "key-roundings-fused",
            "fp4-formats-swapped",
            "index-key-norm",
            "index-rotation",
            "index-not-quantised",
        ),
        source="hand-made",
    )
    yield Case(
        "indexer/head-weights/rounded-before-scaling",
        "core",
        "exact",
        "Fails when the head weights are scaled in fp32 and rounded once, or the scale lacks the number of heads.",
        "numerics.md 6.3",
        _head_weights,
        flags=("head-weights-rounded-once", "head-weights-scale"),
        source="hand-made",
    )
    yield from selection.cases()


@dataclass(frozen=True)
class Score:
    """Dot products [H] of a query with one key, the head weights [H], and the score, all by hand."""

    dots: tuple[float, ...]
    weights: tuple[float, ...]
    score: float


@dataclass(frozen=True)
class ScoreVector:
    """Several scores that together reveal a mistake.  All sums are of whole numbers: any order is exact."""

    name: str
    why: str
    flags: tuple[str, ...]
    scores: tuple[Score, ...]


SCORES = (
    ScoreVector(
        "relu-per-head",
        "Fails when ReLU is missing, or taken of the sum over heads instead of each head's product.",
        (
            "relu-missing",
            "relu-after-sum",
            "relu-after-weight",
            "index-head-weights",
        ),
        (
            Score((2.0, -1.0), (1.0, 1.0), 2.0),
            Score((-3.0, -1.0), (1.0, 1.0), 0.0),
            Score((2.0, -1.0), (1.0, -1.0), 2.0),
            Score((2.0, 1.0), (-1.0, 1.0), -1.0),
            Score((-2.0, 3.0), (-2.0, -1.0), -3.0),
        ),
    ),
    ScoreVector(
        "dot-product-rounded",
        "Fails when the product of query and key is not rounded to bf16 before it is weighted.",
        ("dot-not-rounded",),
        (
            # 257 lies between 256 and 258 and goes to the even code; 1.5 keeps the next rounding from hiding it.
            Score((257.0, 384.0), (1.5, -1.0), 0.0),
            Score((259.0, 390.0), (1.5, -1.0), 0.0),
            Score((1028.0, 1536.0), (1.5, -1.0), 0.0),
        ),
    ),
    ScoreVector(
        "weighted-product-rounded",
        "Fails when the product with the head's weight is not rounded to bf16 before heads are added.",
        ("weighted-not-rounded",),
        (
            # 129 x 129/128 = 130.0078 becomes 130; 129 x 1.5 = 193.5 becomes 194.
            Score((129.0, 130.0), (1.0078125, -1.0), 0.0),
            Score((129.0, 194.0), (1.5, -1.0), 0.0),
        ),
    ),
    ScoreVector(
        "heads-added-in-fp32",
        "Fails when the running sum over heads is kept in bf16, or the final sum is not rounded.",
        (
            "heads-added-in-bf16",
            "bf16-truncated",
        ),
        (
            Score((256.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), 260.0),
            Score((1.0, 1.0, 256.0, 1.0), (1.0, 1.0, 1.0, 1.0), 260.0),
            Score((256.0, 1.0, 256.0, 0.0), (1.0, 1.0, -1.0, 1.0), 1.0),
        ),
    ),
)


def _mapping(heads: int, **changes: Any) -> Mapping[str, Any]:
    return {**CONFIG, "index_n_heads": heads, **changes}


def _ask(
    layer: int,
    queries: Floats,
    head_weights: Floats,
    keys: Floats,
    positions: list[list[int]],
    candidates: npt.NDArray[np.bool_] | None,
    expected: Floats,
    place: Place,
) -> Step:
    """Scores of queries [B,T,H,d] over keys [B,C,d]."""
    arguments = {
        "config": _mapping(queries.shape[2]),
        "layer_id": layer,
        "queries": Tensor.from_values(queries, "BF16"),
        "head_weights": Tensor.from_values(head_weights, "BF16"),
        "keys": Tensor.from_values(keys, "BF16"),
        "positions": int64(positions),
        "candidates": None if candidates is None else Tensor("BOOL", candidates),
    }

    def rules() -> list[Expectation]:
        if deviations.score_format() is not BF16:
            return [_bounded_scores(arguments)]
        return [Exact("index_score", Tensor.from_values(expected, "BF16"), SCORE_AXES)]

    return Step(Call("index_scores", arguments), rules, place)


def _bounded_scores(arguments: Mapping[str, Any]) -> Within:
    """Scores by hand hold the roundings; a declared deviation without them is judged by the equations."""
    queries, head_weights, keys = (exact(arguments[name]) for name in ("queries", "head_weights", "keys"))
    positions: Ints = arguments["positions"].data
    allowed = rules_of.visibility(MODEL, arguments["layer_id"], positions, keys.shape[1])
    if arguments["candidates"] is not None:
        allowed = allowed & arguments["candidates"].data
    expected = rules_of.index_scores(queries, head_weights, keys, allowed)
    return Within("index_score", expected, deviations.score_format().name, SCORE_AXES)


def _scored(vector: ScoreVector) -> Iterator[Step]:
    """Each dot product is split over two features; the key is the same for all heads."""
    width = MODEL.index_head_dim
    for score in vector.scores:
        heads = len(score.dots)
        queries, keys = np.zeros((1, 1, heads, width)), np.zeros((1, 1, width))
        keys[..., 0], keys[..., 1] = 1.0, 1.0
        # Both parts are bf16 numbers: the part above, in steps of 8, and the rest.
        whole = np.trunc(np.asarray(score.dots) / 8) * 8
        queries[0, 0, :, 0], queries[0, 0, :, 1] = whole, np.asarray(score.dots) - whole
        place = Place(RATIO_ONE, [f"dots {score.dots} weights {score.weights}"])
        yield _ask(
            RATIO_ONE,
            queries,
            np.asarray([[score.weights]]),
            keys,
            [[0]],
            None,
            np.asarray([[[score.score]]]),
            place,
        )


def _ramp(count: int) -> tuple[Floats, Floats, Floats]:
    """One head; key j scores j + 1 for a query of ones in two features, up to 2^15 keys."""
    width = MODEL.index_head_dim
    keys = np.zeros((1, count, width))
    keys[0, :, 0], keys[0, :, 1] = np.arange(1, count + 1) // 128 * 128, np.arange(1, count + 1) % 128
    queries = np.zeros((1, 1, 1, width))
    queries[..., :2] = 1.0
    return queries, keys, BF16.round(np.arange(1, count + 1, dtype=np.float64))


def _visibility() -> Iterator[Step]:
    """Queries in one call and one by one, in layers of either ratio; keys beyond the last visible one exist."""
    queries, keys, ramp = _ramp(6)
    for layer in (RATIO_TWO, RATIO_ONE):
        ratio = MODEL.ratio(layer)
        for positions in ([0, 1, 2, 3, 4, 5], [0], [1], [4], [5], [7], [8], [100]):
            visible = np.arange(6) < (np.asarray(positions)[:, None] + 1) // ratio
            expected = np.where(visible, ramp, -np.inf)[None]
            count = len(positions)
            place = Place(layer, [f"queries at {positions}"], positions)
            yield _ask(
                layer,
                np.repeat(queries, count, 1),
                np.ones((1, count, 1)),
                keys,
                [positions],
                None,
                expected,
                place,
            )


def _two_requests() -> Iterator[Step]:
    """The second request has the keys of the first in reverse, and stands at other positions."""
    queries, keys, ramp = _ramp(6)
    both = np.concatenate([keys, keys[:, ::-1]])
    positions = np.asarray([[2, 3], [4, 5]])
    visible = np.arange(6) <= positions[..., None]
    expected = np.where(visible, np.stack([ramp, ramp[::-1]])[:, None], -np.inf)
    place = Place(RATIO_ONE, ["two requests"])
    repeated = np.broadcast_to(queries, (2, 2, *queries.shape[2:]))
    yield _ask(RATIO_ONE, repeated, np.ones((2, 2, 1)), both, positions.tolist(), None, expected, place)


def _masked() -> Iterator[Step]:
    queries, keys, ramp = _ramp(6)
    mask = np.asarray([[[True, False, True, True, False, True]]])
    for position in (2, 5):
        visible = mask & (np.arange(6) <= position)
        expected = np.where(visible, ramp, -np.inf)
        place = Place(RE_INDEXING, [f"query at {position}"], [position])
        yield _ask(RE_INDEXING, queries, np.ones((1, 1, 1)), keys, [[position]], mask, expected, place)


def _many_keys() -> Iterator[Step]:
    for count in (2047, 2048, 2049, 4100):
        queries, keys, ramp = _ramp(count)
        place = Place(RATIO_ONE, [f"{count} keys"], [count - 1])
        yield _ask(RATIO_ONE, queries, np.ones((1, 1, 1)), keys, [[count - 1]], None, ramp[None, None], place)


def _one_hot_query() -> Iterator[Step]:
    """The projection copies the latent into every head: one feature set stays one feature set."""
    heads, width = MODEL.index_n_heads, MODEL.index_head_dim
    copies = np.zeros((heads * width, MODEL.q_lora_rank))
    copies[np.arange(heads * width), np.arange(heads * width) % width] = 1.0
    tiles = (heads * width // 32, MODEL.q_lora_rank // 32)
    tensors = {
        **made.attention(MODEL, RATIO_ONE),
        "indexer.wq_b.weight": Tensor.from_values(copies, "F8_E4M3"),
        "indexer.wq_b.scale": Tensor("F8_E8M0", E8M0.encode(np.ones(tiles)).astype(np.uint8)),
    }
    weights = made.parameters(tensors)
    for feature in (0, 5, width - 1):
        latent = np.zeros((1, 1, MODEL.q_lora_rank))
        latent[..., feature] = 6.0
        expected = np.zeros((1, 1, heads, width))
        expected[..., feature] = 6.0
        arguments = {
            "config": CONFIG,
            "layer_id": RATIO_ONE,
            "weights": weights.mapping(),
            "q_latent": Tensor.from_values(latent, "BF16"),
            "positions": int64([[0]]),
        }
        rule = Exact("index_q", Tensor.from_values(expected, "BF16"), ("request", "position", "index head", "feature"))
        yield Step(Call("index_queries", arguments), partial(_one, rule), Place(RATIO_ONE, [f"feature {feature}"]))


def _queries() -> Iterator[Step]:
    """Two requests at far positions, in a layer of either ratio."""
    latent = made.bf16("indexer.q_latent", 2, 5, MODEL.q_lora_rank)
    positions = np.stack([np.arange(5) + 333, np.arange(5) + 4000])
    for layer in (RATIO_TWO, RATIO_ONE):
        weights = made.parameters(made.attention(MODEL, layer))
        arguments = {
            "config": CONFIG,
            "layer_id": layer,
            "weights": weights.mapping(),
            "q_latent": latent,
            "positions": int64(positions),
        }

        def rules(layer: int = layer, weights: Parameters = weights) -> list[Expectation]:
            expected = rules_of.index_queries(MODEL, layer, weights, exact(latent), positions)
            return [Within("index_q", expected, "BF16", ("request", "position", "index head", "feature"))]

        yield Step(Call("index_queries", arguments), rules, Place(layer))


def _one(rule: Expectation) -> list[Expectation]:
    return [rule]


def _keys() -> Iterator[Step]:
    """Enough groups that fusing a rounding away changes some code."""
    latent = made.bf16("indexer.latent", 1, 400, MODEL.head_dim)
    for layer in (RATIO_TWO, RATIO_ONE):
        positions = np.arange(400)[None] * MODEL.ratio(layer) + 1024
        weights = made.parameters(made.attention(MODEL, layer))
        arguments = {
            "config": CONFIG,
            "layer_id": layer,
            "weights": weights.mapping(),
            "latent": latent,
            "positions": int64(positions),
        }
        rules = partial(_key_rules, MODEL, layer, weights, latent, positions)
        yield Step(Call("index_keys", arguments), rules, Place(layer))


def _key_rules(
    model: ModelConfig, layer: int, weights: Parameters, latent: Tensor, positions: Ints
) -> list[Expectation]:
    expected = rules_of.index_keys(model, layer, weights, exact(latent), positions)
    return [Within("index_keys", expected, "BF16", KEY_AXES)]


def _head_weights() -> Iterator[Step]:
    """Projections of 257, 259 and 1,026 are no bf16 numbers; the scale of this size is no power of two."""
    heads = MODEL.index_n_heads
    pick = np.zeros((heads, MODEL.dim))
    pick[:, 0] = 1.0
    pick[:, 1] = [1.0, 3.0, 0.0, -1.0]
    weights = made.parameters(
        {**made.attention(MODEL, RATIO_ONE), "indexer.weights_proj.weight": Tensor.from_values(pick, "BF16")}
    )
    x = np.zeros((1, 2, MODEL.dim))
    x[0, :, 0], x[0, :, 1] = [256.0, 1024.0], [1.0, 2.0]
    scale = float(np.float32(MODEL.index_head_dim**-0.5 * heads**-0.5))
    expected = BF16.round(BF16.round(x @ pick.T) * scale)
    arguments = {
        "config": CONFIG,
        "layer_id": RATIO_ONE,
        "weights": weights.mapping(),
        "x": Tensor.from_values(x, "BF16"),
    }
    rule = Exact("index_weights", Tensor.from_values(expected, "BF16"), ("request", "position", "index head"))
    yield Step(Call("index_weights", arguments), partial(_one, rule), Place(RATIO_ONE))
