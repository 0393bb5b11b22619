"""Hand-made vectors of `candidates`: which blocks of positions a query keeps (numerics.md 6.3, level one)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors.configuration import CONFIG, MODEL, RATIO_ONE
from conformance.judge.choices import CandidateBlocks
from conformance.judge.components.indexer import visible_counts
from conformance.judge.expectations import Expectation
from conformance.tensors import Tensor

Floats = npt.NDArray[np.float64]
HIDDEN = -np.inf
BLOCK, KEPT = MODEL.candidate_block_size, MODEL.candidate_topk_blocks
RELEASED_BLOCK, RELEASED_KEPT = 8, 2048


@dataclass(frozen=True)
class Vector:
    """Scores of one or more queries [T][C] and the queries' positions; the layer's ratio is one."""

    name: str
    why: str
    flags: tuple[str, ...]
    scores: list[list[float]]
    positions: list[int]


def cases() -> Iterator[Case]:
    """All vectors of the component, then the released number of blocks."""
    for vector in VECTORS:
        yield Case(
            f"candidates/{vector.name}",
            "core",
            "choice",
            vector.why,
            "numerics.md 6.3",
            partial(_mask, CONFIG, BLOCK, KEPT, np.asarray([vector.scores]), np.asarray([vector.positions])),
            flags=vector.flags,
            source="hand-made",
        )
    yield Case(
        "candidates/one-block-more-than-kept/released-sizes",
        "core",
        "choice",
        "Fails when the 2,049th block is not dropped, the newest is not pinned, or a list of blocks is cut short.",
        "numerics.md 6.3",
        _released,
        flags=("newest-block-not-pinned", "pinned-in-addition", "candidates-not-applied"),
        source="hand-made",
    )


def _mask(mapping: Mapping[str, Any], size: int, kept: int, scores: Floats, positions: Floats) -> Iterator[Step]:
    tensor = Tensor.from_values(scores, "BF16")
    arguments = {"config": mapping, "layer_id": RATIO_ONE, "scores": tensor, "positions": int64(positions)}
    yield Step(Call("candidate_mask", arguments), partial(_rules, size, kept, tensor, int64(positions)))


def _rules(size: int, kept: int, scores: Tensor, positions: Tensor) -> list[Expectation]:
    visible = visible_counts(MODEL, RATIO_ONE, positions.data)
    return [CandidateBlocks("candidates", exact(scores), visible, size, kept, ("request", "position"))]


def _released() -> Iterator[Step]:
    """2,050 blocks of 8: falling scores with a last block that is worst, and rising ones."""
    mapping = {**CONFIG, "candidate_block_size": RELEASED_BLOCK, "candidate_topk_blocks": RELEASED_KEPT}
    count = (RELEASED_KEPT + 1) * RELEASED_BLOCK + 3
    # One distinct bf16 number a block: the codes of positive numbers in ascending order, from 2^-10.
    codes = np.arange(-(-count // RELEASED_BLOCK))[::-1] + ((127 - 10) << 7)
    falling = Tensor("BF16", np.repeat(codes.astype(np.uint16), RELEASED_BLOCK)[:count]).values()
    for scores in (falling, falling[::-1], -falling):
        yield from _mask(mapping, RELEASED_BLOCK, RELEASED_KEPT, scores[None, None], np.asarray([[count - 1]]))


def _row(*blocks: tuple[float, ...] | float) -> list[float]:
    """Scores of consecutive blocks: a number stands for a whole block, a tuple for its positions."""
    return [score for block in blocks for score in (block if isinstance(block, tuple) else (block,) * BLOCK)]


VECTORS = (
    Vector(
        "newest-block/worst-score",
        "Fails when the block of the newest visible position has to win its place by score.",
        ("newest-block-not-pinned", "pinned-in-addition"),
        [_row(5.0, 4.0, 3.0, 2.0, (-9.0, -9.0, -9.0)), _row(5.0, 4.0, 3.0, -2.0, (HIDDEN,) * 3)],
        [18, 15],
    ),
    Vector(
        "newest-block/position-at-block-end",
        "Fails when the block of the next position is pinned while the newest one is full.",
        ("pinned-block-of-next-position", "newest-block-not-pinned"),
        [
            _row(5.0, 4.0, 3.0, -2.0, HIDDEN),
            _row(5.0, 4.0, (3.0, 3.0, 3.0, HIDDEN), HIDDEN, HIDDEN),
            _row((1.0, HIDDEN, HIDDEN, HIDDEN), HIDDEN, HIDDEN, HIDDEN, HIDDEN),
        ],
        [15, 10, 0],
    ),
    Vector(
        "last-block/partly-filled-and-negative",
        "Fails when the last block is filled up with 0, which beats negative scores, instead of minus infinity.",
        ("block-padded-with-zero", "block-mean"),
        [
            _row(-1.0, -2.0, -3.0, -4.0, (-5.0, -5.0)),
            _row(-1.0, -2.0, -3.0, -4.0, (HIDDEN, HIDDEN)),
            _row(-4.0, -3.0, (-9.0, HIDDEN, HIDDEN, HIDDEN), HIDDEN, (HIDDEN, HIDDEN)),
        ],
        [17, 15, 8],
    ),
    Vector(
        "hidden-blocks/never-kept",
        "Fails when blocks that hold nothing visible fill the places that are left.",
        ("hidden-blocks-kept",),
        [
            _row(-1.0, HIDDEN, HIDDEN, HIDDEN),
            _row(-1.0, (-2.0, -1.0, HIDDEN, HIDDEN), HIDDEN, HIDDEN),
            _row((-3.0, HIDDEN, HIDDEN, HIDDEN), HIDDEN, HIDDEN, HIDDEN),
        ],
        [3, 5, 0],
    ),
    Vector(
        "whole-blocks/one-good-position",
        "Fails when a block is judged by its mean or first position, or only its best positions enter the mask.",
        (
            "block-mean",
            "mask-of-positions",
            "candidate-block-score",
        ),
        [
            _row((-9.0, -9.0, 6.0, -9.0), (-9.0, -9.0, -9.0, 5.0), 4.0, 3.0, 2.0, 1.0),
            _row(1.0, 2.0, 3.0, (-9.0, 4.0, -9.0, -9.0), (-9.0, -9.0, 5.0, -9.0), (-20.0, *(HIDDEN,) * 3)),
        ],
        [23, 20],
    ),
    Vector(
        "equal-blocks/any-choice",
        "Fails when, among blocks with equal maxima, too many are kept; which of them is left open.",
        ("pinned-in-addition", "ties-all-kept"),
        [_row(2.0, 2.0, 2.0, 2.0, 2.0, 2.0), _row(0.0, -0.0, 0.0, -0.0, 0.0, -1.0)],
        [23, 23],
    ),
    Vector(
        "block-count/around-the-number-kept",
        "Fails when exactly as many blocks as are kept lose one, or one more loses none.",
        (
            "pinned-in-addition",
            "newest-block-not-pinned",
            "candidate-count",
        ),
        [_row(3.0, 2.0, 1.0, HIDDEN), _row(4.0, 3.0, 2.0, 1.0)],
        [11, 15],
    ),
)
