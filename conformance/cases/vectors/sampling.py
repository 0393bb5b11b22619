"""Hand-made vectors of `sampling`: where the largest logit stands, and what counts as one (numerics.md 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.judge.expectations import Exact, Expectation, Mode, OwnArgmax, Verdict
from conformance.tensors import Tensor

VOCABULARY = 129_280
TILE = 128
"""Kernels walk the vocabulary in tiles of a power of two; the end of a larger tile is the end of one of 128."""

LANES = (0, 1, TILE - 1, TILE, 113_280, 113_306, VOCABULARY // 2 - 1, VOCABULARY - TILE, VOCABULARY - 2, VOCABULARY - 1)
LARGEST = float(np.finfo(np.float32).max)


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    yield Case(
        "sampling/greedy/released-vocabulary",
        "core",
        "exact",
        "Fails when a tiled arg max answers with the start of a tile, or a lane's number passes through 16 bits.",
        "numerics.md 9",
        partial(_winners, _one_winner(LANES)),
        flags=("argmax-tile-start", "argmax-last-tile-lost"),
        source="hand-made",
    )
    yield Case(
        "sampling/greedy/extreme-logits",
        "core",
        "exact",
        "Fails when an arg max starts from zero, from a small negative number, or compares in bf16.",
        "numerics.md 9",
        _extremes,
        flags=("argmax-starts-at-zero", "argmax-in-bf16"),
        source="hand-made",
    )
    yield Case(
        "sampling/greedy/equal-largest-logits",
        "core",
        "choice",
        "Fails when an arg max among equal largest logits answers with neither of them; which one is left open.",
        "numerics.md 9",
        _ties,
        flags=(
            "argmax-tile-start",
            "argmax-sums-ties",
            "argmax-wrong",
        ),
        source="hand-made",
    )


def _one_winner(lanes: tuple[int, ...]) -> dict[str, tuple[npt.NDArray[np.float32], int]]:
    rows = {}
    for lane in lanes:
        logits = np.full(VOCABULARY, -1.0, np.float32)
        logits[lane] = np.nextafter(np.float32(-1.0), np.float32(0.0))
        rows[f"winner {lane}"] = (logits, lane)
    return rows


def _winners(rows: dict[str, tuple[npt.NDArray[np.float32], int]]) -> Iterator[Step]:
    for name, (logits, winner) in rows.items():
        expected = Tensor("I32", np.asarray([winner], np.int32))
        yield Step(
            Call("greedy", {"logits": Tensor("F32", logits[None])}),
            partial(_exact, expected),
            Place(None, [name]),
        )


def _exact(expected: Tensor) -> list[Expectation]:
    return [Exact("output_ids", expected, ("request",))]


def _extremes() -> Iterator[Step]:
    rows = {
        "all negative": ([-3.0, -2.0, -5.0, -2.5], 1),
        "largest finite numbers": ([-LARGEST, LARGEST, np.nextafter(np.float32(LARGEST), np.float32(0)), 0.0], 1),
        "smallest finite numbers": ([-LARGEST, -LARGEST, -LARGEST, np.nextafter(np.float32(-LARGEST), 0)], 3),
        "one fp32 ulp": ([1.0, 1.0 + 2.0**-23, 1.0, 1.0], 1),
        "minus infinity elsewhere": ([-np.inf, -np.inf, -1e30, -np.inf], 2),
        "subnormal": ([0.0, 0.0, 2.0**-126, -1.0], 2),
    }
    yield from _winners({name: (np.asarray(row, np.float32), winner) for name, (row, winner) in rows.items()})


def _ties() -> Iterator[Step]:
    """numerics.md 9 asks for the arg max and does not say which: any of the equal logits is one."""
    for first, second in ((0, VOCABULARY - 1), (TILE - 1, TILE), (5, 6), (TILE, 2 * TILE)):
        logits = np.full(VOCABULARY, -1.0, np.float32)
        logits[[first, second]] = 3.0
        tensor = Tensor("F32", logits[None])
        rules = partial(_either, tensor)
        yield Step(Call("greedy", {"logits": tensor}), rules, Place(None, [f"equal at {first} and {second}"]))


def _either(logits: Tensor) -> list[Expectation]:
    return [_ArgmaxOf(logits)]


@dataclass(frozen=True)
class _ArgmaxOf:
    """`OwnArgmax` for logits that were given instead of answered."""

    logits: Tensor

    mode: Mode = "choice"

    @property
    def taps(self) -> tuple[str, ...]:
        """The one tap judged."""
        return ("output_ids",)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Nothing recorded is needed."""
        return {}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Each id in range, and no logit larger than its own."""
        return OwnArgmax("output_ids", "logits").judge({**results, "logits": self.logits})
