"""Hand-made vectors of `window`: lists and rings at the released window, around each place where it wraps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG, MODEL, RATIO_TWO, WINDOW_ONLY
from conformance.judge.choices import RowSets
from conformance.judge.components.window import ring_positions, window_rows, window_sets
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

WINDOW = 128
HEAD_DIM = 32
RELEASED_WINDOW: Mapping[str, Any] = {**CONFIG, "window_size": WINDOW, "head_dim": HEAD_DIM}
POSITIONS = (1, 63, 126, 127, 128, 129, 255, 256, 257)
"""Around the last slot, the wrap and the second wrap."""

FILLS: Mapping[str, Sequence[Sequence[tuple[int, int]]]] = {
    "prefill-then-step": [[(0, p), (p, 1)] for p in POSITIONS],
    "steps-across-wraps": [[(0, 126), *[(p, 1) for p in range(126, 131)]], [(0, 1), *[(p, 1) for p in range(1, 4)]]],
    "continued-calls": [
        [(0, 100), (100, 60)],
        [(0, 3), (3, 128), (131, 126), (257, 130)],
        [(0, 127), (127, 2), (129, 300)],
    ],
}
"""Calls (start, length) that fill a ring, one after the other."""


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    yield Case(
        "window/prefill-list/released-window",
        "core",
        "exact",
        "Fails when a query sees p - 128 as well, loses p - 127, or the window is not applied at all.",
        "numerics.md 6, item 3",
        partial(_lists, [(0, length) for length in POSITIONS]),
        flags=(
            "window-one-too-wide",
            "window-one-too-narrow",
            "window-not-applied",
            "window-not-causal",
            "padding-not-minus-one",
        ),
        source="hand-made",
    )
    yield Case(
        "window/decode-list/released-window",
        "core",
        "exact",
        "Fails when slots never written are listed while the ring fills, or a slot is lost once it wrapped.",
        "numerics.md 6, item 3",
        partial(_lists, [(position, 1) for position in POSITIONS]),
        flags=("unwritten-slots-listed", "window-one-too-narrow"),
        source="hand-made",
    )
    why = {
        "prefill-then-step": "Fails when a prompt longer than the window leaves its oldest rows, or in other slots.",
        "steps-across-wraps": "Fails when a step writes to another slot than p mod 128.",
        "continued-calls": "Fails when a call of several tokens starts again at slot 0 or is not cut to its last 128.",
    }
    for name, schedules in FILLS.items():
        yield Case(
            f"window/ring/{name}",
            "core",
            "exact",
            why[name],
            "numerics.md 6, item 3",
            partial(_rings, schedules),
            flags=("ring-slot-off", "ring-chunk-at-slot-0", "requests-mixed")
            # Only these leave more rows than the ring holds in one call.
            + (("ring-keeps-oldest",) if name != "steps-across-wraps" else ()),
            source="hand-made",
        )
    yield Case(
        "window/rows-quantised-after-rotation/far-positions",
        "core",
        "composed",
        "Fails when rotation follows quantisation, the rotary part stays unquantised, or positions start again at 0.",
        "numerics.md 6, item 2",
        _rows,
        flags=(
            "quantised-before-rotation",
            "rotary-part-not-quantised",
            "window-not-quantised",
            "window-norm",
            "window-rotation",
        ),
        source="hand-made",
    )


def _lists(calls: list[tuple[int, int]]) -> Iterator[Step]:
    for start, length in calls:
        arguments = {"config": RELEASED_WINDOW, "start_pos": start, "length": length}
        yield Step(
            Call("window_indices", arguments),
            partial(_list_rules, start, length),
            Place(None, [f"rows {start}..{start + length - 1}"], range(start, start + length)),
        )


def _list_rules(start: int, length: int) -> list[Expectation]:
    width = WINDOW if start else min(length, WINDOW)
    return [RowSets("indices", window_sets(start, length, WINDOW), width)]


def _numbered(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Rows [2, n, d] that spell their position in bf16: slot + 1 in even features, lap + 1 in odd ones; by request."""
    rows = np.zeros((2, len(positions), HEAD_DIM))
    rows[..., 0::2] = (positions % WINDOW + 1)[None, :, None]
    rows[..., 1::2] = (positions // WINDOW + 1)[None, :, None]
    rows[1] *= -1.0
    rows[:, positions < 0] = 0.0
    return rows


def _rings(schedules: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Step]:
    for calls in schedules:
        for start, length in calls:
            before = ring_positions(start, WINDOW) if start else np.full(WINDOW, -1)
            after = Tensor.from_values(_numbered(ring_positions(start + length, WINDOW)), "BF16")
            arguments = {
                "config": RELEASED_WINDOW,
                "ring": Tensor.from_values(_numbered(before), "BF16"),
                "rows": Tensor.from_values(_numbered(np.arange(start, start + length)), "BF16"),
                "start_pos": start,
            }
            yield Step(
                Call("window_update", arguments),
                partial(_ring_rules, after),
                Place(None, [f"rows {start}..{start + length - 1}"]),
            )


def _ring_rules(after: Tensor) -> list[Expectation]:
    return [Exact("window", after, ("request", "slot", "feature"))]


def _rows() -> Iterator[Step]:
    """Two requests at different positions, in a layer of either rotary base."""
    x = made.bf16("window.x", 2, 5, MODEL.dim)
    positions = np.stack([np.arange(5) + 1019, np.arange(5) + 65_530])
    for layer in (WINDOW_ONLY, RATIO_TWO):
        weights = made.parameters(made.attention(MODEL, layer))
        arguments = {
            "config": CONFIG,
            "layer_id": layer,
            "weights": weights.mapping(),
            "x": x,
            "positions": int64(positions),
        }

        def rules(layer: int = layer) -> list[Expectation]:
            weights = made.parameters(made.attention(MODEL, layer))
            expected = window_rows(MODEL, layer, weights, exact(x), positions)
            return [Within("window_rows", expected, "BF16", ("request", "position", "feature"))]

        yield Step(Call("window_rows", arguments), rules, Place(layer))
