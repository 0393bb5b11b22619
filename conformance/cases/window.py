"""Window rows, the ring and the list of attended rows (numerics.md 6, items 2 and 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Ints, Joined, exact, int64
from conformance.judge.choices import RowSets
from conformance.judge.components.window import ring_positions, window_rows, window_sets
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

ROW_AXES = ("request", "position", "feature")


FLAGS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("prefill-list", "shorter-than-window"): ("window-not-causal", "padding-not-minus-one"),
    ("prefill-list", "equal-to-window"): ("window-not-causal", "window-one-too-narrow"),
    ("prefill-list", "one-more-than-window"): ("window-one-too-wide", "window-one-too-narrow", "window-not-applied"),
    ("prefill-list", "several-windows"): ("window-one-too-wide", "window-one-too-narrow", "window-not-applied"),
    ("prefill-ring", "shorter-than-window"): ("ring-slot-off",),
    ("prefill-ring", "equal-to-window"): ("ring-slot-off",),
    ("prefill-ring", "one-more-than-window"): ("ring-slot-off", "ring-keeps-oldest", "requests-mixed"),
    ("prefill-ring", "several-windows"): ("ring-slot-off", "ring-keeps-oldest", "requests-mixed"),
    ("decode-list", "first-step"): ("unwritten-slots-listed",),
    ("decode-list", "last-slot"): ("window-one-too-narrow",),
    ("decode-list", "wrap"): ("window-one-too-narrow",),
    ("decode-list", "after-wrap"): ("window-one-too-narrow",),
    ("decode-list", "second-wrap"): ("window-one-too-narrow",),
}
"""The mistakes that each length or position reveals."""


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """Rows of recorded inputs, then the ring's slots and lists at every interesting length."""
    window = model.config.window_size
    yield Case(
        "window/rows-quantised-after-rotation/trace",
        "smoke",
        "composed",
        "Fails when only part of the row is quantised, or the rotary part is turned after quantisation.",
        "numerics.md 6, item 2",
        partial(_rows, model, joined),
        flags=(
            "quantised-before-rotation",
            "rotary-part-not-quantised",
            "window-norm",
            "window-rotation",
            "window-not-quantised",
        ),
        source=joined.source,
    )
    lengths = {
        "shorter-than-window": max(1, window - 1),
        "equal-to-window": window,
        "one-more-than-window": window + 1,
        "several-windows": max(window + 2, 3 * window - 3),
    }
    for name, length in lengths.items():
        yield Case(
            f"window/prefill-list/{name}",
            "smoke",
            "exact",
            "Fails when a query sees one position too many or too few: the window holds the query and W - 1 before it.",
            "numerics.md 6, item 3",
            partial(_list, model, 0, length),
            flags=FLAGS["prefill-list", name],
            source=f"{model.name}/configuration",
        )
        yield Case(
            f"window/prefill-ring/{name}",
            "core",
            "exact",
            "Fails when positions do not end up at slot p mod W, or the oldest rows survive instead of the newest.",
            "numerics.md 6, item 3",
            partial(_ring, model, [(0, length)]),
            flags=FLAGS["prefill-ring", name],
            source=f"{model.name}/configuration",
        )
    yield Case(
        "window/prefill-list/as-recorded",
        "core",
        "exact",
        "Fails when a prompt's queries list other rows than the published code does.",
        "numerics.md 6, item 3",
        partial(_recorded_lists, model, joined),
        flags=("window-not-causal", "window-one-too-wide", "window-one-too-narrow", "window-not-applied"),
        source=joined.source,
    )
    for name, position in {
        "first-step": 1,
        "last-slot": window - 1,
        "wrap": window,
        "after-wrap": window + 1,
        "second-wrap": 2 * window,
    }.items():
        if position < 1:
            # A window of one row: its only slot is written by the prefill, position 0.
            continue
        yield Case(
            f"window/decode-list/{name}",
            "smoke",
            "exact",
            "Fails when slots that were never written are listed, or slots are lost at the wrap.",
            "numerics.md 6, item 3",
            partial(_list, model, position, 1),
            flags=FLAGS["decode-list", name],
            source=f"{model.name}/configuration",
        )
        yield Case(
            f"window/decode-ring/{name}",
            "core",
            "exact",
            "Fails when the step's row is written to another slot than s mod W.",
            "numerics.md 6, item 3",
            partial(_ring, model, [(0, position), (position, 1)]),
            flags=("ring-slot-off", "ring-chunk-at-slot-0"),
            source=f"{model.name}/configuration",
        )


def _rows(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        x = joined.tap("attn_in", layer)
        weights = model.layer(layer).within("attn.")
        arguments = {
            "config": model.mapping,
            "layer_id": layer,
            "weights": weights.mapping(),
            "x": x,
            "positions": int64(joined.positions),
        }

        def rules(layer: int = layer, x: Tensor = x) -> list[Within]:
            weights = model.layer(layer).within("attn.")
            expected = window_rows(model.config, layer, weights, exact(x), joined.positions)
            return [Within("window_rows", expected, "BF16", ROW_AXES, recorded=joined.tap("window_rows", layer))]

        yield Step(Call("window_rows", arguments), rules, joined.place(layer))


def _list(model: GoldenModel, start: int, length: int) -> Iterator[Step]:
    window = model.config.window_size
    arguments = {"config": model.mapping, "start_pos": start, "length": length}
    yield Step(
        Call("window_indices", arguments),
        lambda: [RowSets("indices", window_sets(start, length, window), min(length, window) if start == 0 else window)],
        Place(None, [], range(start, start + length)),
    )


def _recorded_lists(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    window = model.config.window_size
    for trace in joined.traces:
        for layer in trace.scenario.layers():
            if not trace.scenario.has(0, "window_slots", layer):
                continue
            recorded = trace.scenario.tap(0, "window_slots", layer).data[0]
            arguments = {"config": model.mapping, "start_pos": 0, "length": trace.lengths[0]}

            def rules(recorded: Ints = recorded) -> list[RowSets]:
                sets = [{int(row) for row in rows if row >= 0} for rows in recorded]
                return [RowSets("indices", sets, min(len(sets), window))]

            yield Step(Call("window_indices", arguments), rules, trace.place(layer, 0))


def _ring(model: GoldenModel, calls: list[tuple[int, int]]) -> Iterator[Step]:
    """Rows that hold their own position number in every feature, so that a wrong slot reads as the row it came from."""
    config = model.config
    total = sum(length for _, length in calls)
    numbers = np.broadcast_to(np.arange(1, total + 1, dtype=np.float64)[None, :, None], (2, total, config.head_dim))
    rows = Tensor.from_values(numbers, "BF16")
    blank = np.zeros((2, config.window_size, config.head_dim))
    for start, length in calls:
        held = ring_positions(start, config.window_size) if start else np.full(config.window_size, -1)
        before = np.where(held[None, :, None] >= 0, numbers[:, np.maximum(held, 0)], blank)
        after_positions = ring_positions(start + length, config.window_size)
        after = np.where(after_positions[None, :, None] >= 0, numbers[:, np.maximum(after_positions, 0)], blank)
        expected = Tensor.from_values(after, "BF16")
        arguments = {
            "config": model.mapping,
            "ring": Tensor.from_values(before, "BF16"),
            "rows": rows[:, start : start + length],
            "start_pos": start,
        }
        yield Step(
            Call("window_update", arguments),
            lambda expected=expected: [Exact("window", expected, ("request", "slot", "feature"))],  # type: ignore[misc]
            Place(None, [f"rows {start}..{start + length - 1}"]),
        )
