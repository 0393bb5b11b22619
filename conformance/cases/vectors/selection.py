"""Hand-made vectors of the indexer's selection: ties, short rows, and positions outside the candidates (6.3, 6.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import int64
from conformance.cases.vectors.configuration import CONFIG, MODEL, RATIO_ONE, RATIO_TWO
from conformance.judge.bounded import Floats
from conformance.judge.choices import Selection
from conformance.judge.components.indexer import visibility
from conformance.judge.expectations import Exact, Expectation
from conformance.tensors import Tensor

HIDDEN = -np.inf
LARGEST = float(Tensor("BF16", np.asarray([0x7F7F], np.uint16)).values()[0])
TOPK = MODEL.index_topk
RE_INDEXING = 6
RELEASED_TOPK = 512


@dataclass(frozen=True)
class Vector:
    """Scores of queries [T][C] at positions [T]; hidden where not visible, or outside the candidates."""

    name: str
    why: str
    flags: tuple[str, ...]
    scores: list[list[float]]
    positions: list[int]
    layer: int = RATIO_ONE


def cases() -> Iterator[Case]:
    """Small vectors, the empty list, and the released number of positions."""
    for vector in VECTORS:
        yield Case(
            f"indexer/select/{vector.name}",
            "core",
            "choice",
            vector.why,
            "numerics.md 6.4" if "shortfall" in vector.name else "numerics.md 6.3",
            partial(_selected, CONFIG, TOPK, vector.layer, np.asarray([vector.scores]), [vector.positions]),
            flags=vector.flags,
            source="hand-made",
        )
    yield Case(
        "indexer/select/no-compressed-position",
        "core",
        "exact",
        "Fails when a layer without any compressed position answers with an entry, or cannot answer at all.",
        "numerics.md 6.3",
        _empty,
        flags=("empty-selection-crashes",),
        source="hand-made",
    )
    yield Case(
        "indexer/select/released-top-k",
        "core",
        "choice",
        "Fails when one position too few or too many is kept, around 512 of them and with most scores equal.",
        "numerics.md 6.3",
        _released,
        flags=("topk-off-by-one", "not-sorted", "best-not-selected"),
        source="hand-made",
    )


def _selected(
    mapping: Mapping[str, Any], topk: int, layer: int, scores: Floats, positions: list[list[int]]
) -> Iterator[Step]:
    tensor = Tensor.from_values(scores, "BF16")
    arguments = {"config": mapping, "layer_id": layer, "scores": tensor, "positions": int64(positions)}
    yield Step(Call("select_positions", arguments), partial(_rules, topk, layer, tensor, int64(positions)))


def _rules(topk: int, layer: int, scores: Tensor, positions: Tensor) -> list[Expectation]:
    values = scores.values()
    visible = visibility(MODEL, layer, positions.data, values.shape[-1])
    return [Selection("selected", values, values, visible, topk, ("request", "position"))]


def _empty() -> Iterator[Step]:
    """Position 0 of a ratio-2 layer: no group is complete."""
    for length in (1, 3):
        arguments = {
            "config": CONFIG,
            "layer_id": RATIO_TWO,
            "scores": Tensor.from_values(np.zeros((1, length, 0)), "BF16"),
            "positions": int64(np.zeros((1, length))),
        }
        nothing = Tensor("I32", np.zeros((1, length, 0), np.int32))
        yield Step(Call("select_positions", arguments), partial(_exactly, nothing))


def _exactly(expected: Tensor) -> list[Expectation]:
    return [Exact("selected", expected, ("request", "position", "entry"))]


def _released() -> Iterator[Step]:
    """511 to 1,030 positions; every third has one of few scores, as bf16 scores have."""
    mapping = {**CONFIG, "index_topk": RELEASED_TOPK}
    for count in (RELEASED_TOPK - 1, RELEASED_TOPK, RELEASED_TOPK + 1, 2 * RELEASED_TOPK + 6):
        order = np.arange(count) * 7919 % count
        for scores in (order / 1.0, np.floor(order / 90.0), -np.floor(order / 3.0) - 1.0, np.zeros(count)):
            yield from _selected(mapping, RELEASED_TOPK, RATIO_ONE, scores[None, None], [[count - 1]])


VECTORS = (
    Vector(
        "ties-at-the-last-place",
        "Fails when a better position is left out for a tied one, or a tie is counted twice; any of the ties will do.",
        (
            "best-not-selected",
            "not-sorted",
        ),
        [
            [5.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 9.0],
            [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0],
            [1.0, 3.0, 1.0, 3.0, 1.0, 5.0, 1.0, 5.0],
            [0.0, -0.0, 0.0, -0.0, 0.0, -0.0, -1.0, -0.0],
        ],
        [7, 7, 7, 7],
    ),
    Vector(
        "all-scores-negative",
        "Fails when empty places are filled up with zeros that beat negative scores.",
        ("best-not-selected",),
        [[-5.0, -1.0, -2.0, -9.0, -3.0, -4.0, -8.0], [-LARGEST, -LARGEST, -1.0, -2.0, -3.0, HIDDEN, HIDDEN]],
        [6, 4],
    ),
    Vector(
        "extreme-scores",
        "Fails when scores pass through a narrower type on their way to the top-k.",
        ("best-not-selected", "scores-narrowed"),
        [
            [LARGEST, -LARGEST, 1e30, 70000.0, 65520.0, 1e-30, 1e5, 3e38],
            [1.0, 1.0078125, 1.015625, 1.0234375, 1.03125, 1.0390625, 1.046875, 1.0546875],
            [1e-40, 2e-40, -1e-40, 0.0, 4e-40, 8e-40, -8e-40, 1e-39],
        ],
        [7, 7, 7],
    ),
    Vector(
        "short-rows-padded",
        "Fails when unused places hold 0, a position that is not visible, or stand before valid ones.",
        ("padding-not-minus-one", "invisible-selected", "not-sorted"),
        [
            [1.0, *[HIDDEN] * 7],
            [1.0, 2.0, *[HIDDEN] * 6],
            [3.0, 2.0, 1.0, *[HIDDEN] * 5],
            [0.0, 1.0, 2.0, 3.0, *[HIDDEN] * 4],
            [0.0, 1.0, 2.0, 3.0, 4.0, *[HIDDEN] * 3],
        ],
        [0, 1, 2, 3, 4],
    ),
    Vector(
        "fewer-positions-than-top-k",
        "Fails when the list is wider than the number of compressed positions, or nothing visible gives an entry.",
        (
            "padding-not-minus-one",
            "invisible-selected",
        ),
        [[HIDDEN, HIDDEN], [-7.0, HIDDEN], [-7.0, HIDDEN], [-7.0, -8.0]],
        [0, 1, 2, 3],
        RATIO_TWO,
    ),
    Vector(
        "ascending-by-position",
        "Fails when positions are listed by score.",
        ("not-sorted", "ascending-scores-selected"),
        [[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [5.0, 1.0, 7.0, 2.0, 6.0, 3.0, 4.0]],
        [6, 6, 6],
    ),
    Vector(
        "candidate-shortfall",
        "Fails when places that the candidates cannot fill hold anything else than -1 or a visible position.",
        (
            "padding-not-minus-one",
            "invisible-selected",
            "best-not-selected",
        ),
        [
            [HIDDEN, 2.0, HIDDEN, HIDDEN, 1.0, HIDDEN, HIDDEN, HIDDEN],
            [HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, 1.0, HIDDEN],
        ],
        [7, 6],
        RE_INDEXING,
    ),
)
