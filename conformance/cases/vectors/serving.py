"""Hand-made vectors of serving: what Engram looks back to belongs to one request (numerics.md 8 and 10.2).

A block with an Engram and silent sublayers: what comes out is the residual with Engram's rows written into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.block import (
    ALL_EXPERTS,
    MODEL,
    PER_STREAM,
    SILENT_ATTENTION,
    SILENT_MIXTURE,
    STREAM_AXES,
    WITH_ENGRAM,
    Inputs,
    block_bounds,
    token_map,
)
from conformance.judge.bounded import Bounded
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

SPEC = "numerics.md 8 and 10.2"
LENGTH = 9
SAVED_AT = 5


def cases() -> Iterator[Case]:
    """A row that is used again, and a request that is resumed."""
    yield Case(
        "block/serving-slot-reused/text-after-an-image",
        "core",
        "composed",
        "Fails when a new request looks back to the one that had its row, or stops where that had its image.",
        SPEC,
        _slot_reused,
        flags=("look-back-survives-request", "image-remembered"),
        source="hand-made",
    )
    yield Case(
        "block/serving-saved-state/look-back",
        "core",
        "composed",
        "Fails when the tokens that Engram looks back to are not saved, or not restored.",
        SPEC,
        _resumed,
        flags=("saved-state-incomplete", "saved-state-shared"),
        source="hand-made",
    )


class _Request:
    """A request through the block and its bounds."""

    def __init__(self, name: str, weights: Parameters, images: Sequence[int] = ()) -> None:
        mix = np.asarray([0.75, 0.125, -0.5, 0.25]) + made.normal(f"serving.{name}", 1, LENGTH, MODEL.hc_mult) / 8
        self.name, self.weights = name, weights
        self.h = made.bf16(f"serving.{name}.h", 1, LENGTH, MODEL.hc_mult, MODEL.dim)
        self.pre = Tensor.from_values(mix, "F32")
        self.ids = ((np.arange(LENGTH) * 37 + len(name)) % MODEL.vocab_size)[None]
        self.images = np.isin(np.arange(LENGTH), images)[None] if images else None
        self._bounds: tuple[Bounded, Bounded] | None = None

    def step(self, target: str, start: int, length: int) -> Step:
        """Some positions of the request."""
        span = slice(start, start + length)
        arguments = {
            "h": self.h[:, span],
            "pre": self.pre[:, span],
            "input_ids": Tensor("I32", self.ids[:, span].astype(np.int32)),
            "start_pos": int64([start]),
            "image_mask": None if self.images is None else Tensor("BOOL", self.images[:, span].copy()),
        }
        place = Place(WITH_ENGRAM, [f"of {self.name} at {start}"], range(start, start + length))
        return Step(Advance(target, arguments), partial(self._rules, span), place)

    def _rules(self, span: slice) -> list[Expectation]:
        if self._bounds is None:
            inputs = Inputs(exact(self.h), exact(self.pre), self.ids, self.images, [(0, LENGTH)])
            self._bounds = block_bounds(MODEL, WITH_ENGRAM, self.weights, inputs)
        h, pre = self._bounds
        return [Within("h_out", h[:, span], "BF16", STREAM_AXES), Within("pre_out", pre[:, span], "F32", PER_STREAM)]


def _weights() -> Parameters:
    tensors = made.with_zeros(made.block(MODEL, WITH_ENGRAM), *SILENT_ATTENTION, *SILENT_MIXTURE)
    return made.parameters(tensors)


def _open(name: str, weights: Parameters) -> Iterator[Step]:
    shared = {"config": ALL_EXPERTS, "batch_size": 1}
    yield Step(Open(f"runtime of {name}", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "layer_id": WITH_ENGRAM,
        "weights": weights.mapping(),
        "runtime": Handle(f"runtime of {name}"),
        "token_map": Tensor("I32", token_map().astype(np.int32)),
    }
    yield Step(Open(name, "block", arguments), place=Place(WITH_ENGRAM))


def _slot_reused() -> Iterator[Step]:
    """A request with an image and text behind it; the next brings no mask and begins with two tokens."""
    weights = _weights()
    image, text = _Request("an image", weights, images=(1,)), _Request("text", weights)
    yield from _open("block", weights)
    yield image.step("block", 0, 4)
    yield text.step("block", 0, 2)
    for position in range(2, LENGTH):
        yield text.step("block", position, 1)


def _resumed() -> Iterator[Step]:
    """Resumed in the same object after it went on, and in another one after it served another request."""
    weights = _weights()
    resumed, other = _Request("resumed", weights), _Request("another", weights)
    yield from _open("first", weights)
    yield resumed.step("first", 0, SAVED_AT)
    yield Step(Open("saved", "save_state", {"target": Handle("first")}))
    for position in range(SAVED_AT, LENGTH):
        yield resumed.step("first", position, 1)
    yield from _open("second", weights)
    yield other.step("second", 0, LENGTH)
    for name in ("first", "second"):
        yield Step(Call("restore_state", {"target": Handle(name), "saved": Handle("saved")}))
        for position in range(SAVED_AT, LENGTH):
            yield resumed.step(name, position, 1)
