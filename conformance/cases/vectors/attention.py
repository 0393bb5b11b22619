"""Hand-made vectors of `attention`: layers of one runtime stepped through schedules that tell states apart (6, 6.1).

Every layer gets an input of its own, so each output is bounded from inputs alone, whatever the others answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG, MODEL, RATIO_ONE, RATIO_TWO, WINDOW_ONLY
from conformance.config import ModelConfig
from conformance.interface import Reading
from conformance.judge.bounded import concatenate
from conformance.judge.components import attention as rules_of
from conformance.judge.components.linear import Parameters
from conformance.judge.components.teacher_forced import Call as ForcedCall, TeacherForcedAttention
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

AXES = ("request", "position", "feature")
EVERY_LAYER = tuple(range(MODEL.n_layers))

Calls = Sequence[tuple[Sequence[int], int]]
"""Calls as (start position of each request, length); a request that stands at 0 begins anew."""


@dataclass(frozen=True)
class Schedule:
    """Layers of one runtime, the calls they are stepped through, and the layers that are judged."""

    calls: Calls
    layers: Sequence[int] = EVERY_LAYER
    judged: Sequence[int] = EVERY_LAYER
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters that differ from the small configuration."""
    reading: Reading = "intended"
    seed: str = ""


@dataclass(frozen=True)
class Vector:
    """A schedule, or several that are put to one session in turn, layer by layer."""

    name: str
    why: str
    flags: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    spec: str = "numerics.md 6"


def cases() -> Iterator[Case]:
    """All vectors of the component."""
    for vector in VECTORS:
        yield Case(
            f"attention/{vector.name}",
            "core",
            "composed",
            vector.why,
            vector.spec,
            partial(_stepped, vector.schedules),
            flags=vector.flags,
            source="hand-made",
            reading=vector.schedules[0].reading if any(_readings_differ(s) for s in vector.schedules) else None,
        )
    yield Case(
        "attention/output-turned-back/own-position",
        "core",
        "composed",
        "Fails when the output is not turned back, by another position or base, or wo_a's groups or input are changed.",
        "numerics.md 6, item 6",
        _turned_back,
        flags=(
            "inverse-rotation-missing",
            "inverse-rotation-forward",
            "one-rotary-base",
            "wo-a-groups-mixed",
            "wo-a-input-quantised",
            "wo-a-not-rounded",
            "bf16-truncated",
        ),
        source="hand-made",
    )


def _readings_differ(schedule: Schedule) -> bool:
    """Only a source with a ratio above one can end a call without a complete group."""
    return len(schedule.calls) > 1 and any(MODEL.ratio(layer) > 1 for layer in schedule.layers)


@dataclass
class _Request:
    """One request from its first call on: the calls it takes part in, and their numbers in the schedule."""

    calls: list[ForcedCall]
    numbers: list[int]


class _Bounds:
    """Inputs and bounds of a schedule: each request of each row of the batch by itself."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mapping: Mapping[str, Any] = {**CONFIG, **schedule.changes}
        self.config = ModelConfig.from_mapping(self.mapping, "conformance/cases/vectors/attention.py")
        self.batch = len(schedule.calls[0][0])
        self.weights: dict[int, Parameters] = {
            layer: made.parameters(made.attention(self.config, layer)).within("") for layer in schedule.layers
        }
        self.requests: list[list[_Request]] = [[] for _ in range(self.batch)]
        for number, (starts, length) in enumerate(schedule.calls):
            for row, start in enumerate(starts):
                if start == 0:
                    self.requests[row].append(_Request([], []))
                self.requests[row][-1].calls.append(ForcedCall(start, length))
                self.requests[row][-1].numbers.append(number)

    @cached_property
    def inputs(self) -> dict[tuple[int, int, int], Tensor]:
        """bf16 input [1,P,D] by layer, row, and request of the row."""
        return {
            (layer, row, k): made.bf16(
                f"attention.{self.schedule.seed}.{layer}.{row}.{k}", 1, request.calls[-1].end, self.config.dim
            )
            for layer in self.schedule.layers
            for row, requests in enumerate(self.requests)
            for k, request in enumerate(requests)
        }

    @cached_property
    def forced(self) -> dict[tuple[int, int], TeacherForcedAttention]:
        """Bounds by row and request of the row."""
        return {
            (row, k): TeacherForcedAttention(
                self.config,
                self.weights,
                {layer: self.inputs[layer, row, k].values() for layer in self.schedule.layers},
                request.calls,
                {},
                self.schedule.reading == "literal",
            )
            for row, requests in enumerate(self.requests)
            for k, request in enumerate(requests)
        }

    def _find(self, row: int, number: int) -> tuple[int, int]:
        """The request of a row that a call belongs to, and the number of that call within it."""
        for k, request in enumerate(self.requests[row]):
            if number in request.numbers:
                return k, request.numbers.index(number)
        raise ValueError(f"row {row} has no call {number}")

    def given(self, layer: int, number: int) -> Tensor:
        """The input of a layer in a call, [B,T,D]."""
        starts, length = self.schedule.calls[number]
        parts = [
            self.inputs[layer, row, self._find(row, number)[0]].data[:, start : start + length]
            for row, start in enumerate(starts)
        ]
        return Tensor("BF16", np.concatenate(parts))

    def rules(self, layer: int, number: int) -> list[Expectation]:
        """The output of a layer in a call, request by request."""
        rows = []
        for row in range(self.batch):
            k, call = self._find(row, number)
            rows.append(self.forced[row, k].output(layer, call))
        return [Within("attn_out", concatenate(rows, 0), "BF16", AXES)]


def _stepped(schedules: Sequence[Schedule]) -> Iterator[Step]:
    """Open everything, then step the schedules in turn: each layer of call 0 in all of them, then call 1, and so on.

    Layers of one runtime still ascend within a call, but what they publish must not reach the other runtimes.
    """
    bounds = [_Bounds(schedule) for schedule in schedules]
    for which, bound in enumerate(bounds):
        shared = {"config": bound.mapping, "batch_size": bound.batch}
        yield Step(Open(f"runtime {which}", "runtime", {**shared, "reading": bound.schedule.reading}))
        for layer in bound.schedule.layers:
            arguments = {
                **shared,
                "layer_id": layer,
                "weights": bound.weights[layer].mapping(),
                "runtime": Handle(f"runtime {which}"),
            }
            yield Step(Open(f"layer {layer} of {which}", "attention", arguments), place=Place(layer))
    for number in range(max(len(schedule.calls) for schedule in schedules)):
        for layer in EVERY_LAYER:
            for which, bound in enumerate(bounds):
                if number < len(bound.schedule.calls) and layer in bound.schedule.layers:
                    yield _call(which, bound, layer, number)


def _call(which: int, bound: _Bounds, layer: int, number: int) -> Step:
    starts, length = bound.schedule.calls[number]
    inputs = {"x": bound.given(layer, number), "start_pos": int64(starts)}
    span = range(starts[0], starts[0] + length) if len(starts) == 1 else ()
    place = Place(layer, [f"{number} of schedule {which}"], span)
    request = Advance(f"layer {layer} of {which}", inputs)
    if layer not in bound.schedule.judged:
        return Step(request, place=place)
    return Step(request, partial(bound.rules, layer, number), place)


def _single(*calls: tuple[int, int]) -> Calls:
    return [([start], length) for start, length in calls]


def _steps(start: int, end: int) -> list[tuple[int, int]]:
    return [(position, 1) for position in range(start, end)]


SPLIT_PROMPT = 13
KEYS_LAYERS = (RATIO_TWO, RATIO_TWO + 1, RATIO_ONE)
"""A ratio-2 source, a layer that reuses it, and the ratio-1 source whose keys are published after them."""


def _stale_keys(reading: Reading) -> tuple[Schedule, ...]:
    """An even prompt and one step: the ratio-2 group stays open.  More rows are visible than are selected."""
    return (
        Schedule(
            _single((0, 8), (8, 1), (9, 1), (10, 1)),
            KEYS_LAYERS,
            KEYS_LAYERS[:2],
            {"index_topk": 2},
            reading,
            "stale",
        ),
    )


VECTORS = (
    Vector(
        "sources-and-reuse/prompt-and-steps",
        "Fails when a layer reads rows, selections or candidates of another source, of an earlier call, or its own.",
        (
            "selection-of-earlier-source",
            "candidates-not-applied",
            "candidates-of-earlier-call",
            "candidates-applied-to-source",
            "row-turned-by-group-number",
            "row-turned-by-last-token",
            "compressed-rows-of-other-source",
            "one-rotary-base",
            "index-keys-from-rotated",
            "minus-one-read-as-row",
        ),
        (Schedule(_single((0, 19), *_steps(19, 26)), seed="sources"),),
        "numerics.md 6.1",
    ),
    Vector(
        "own-index-keys/even-prompt-one-step",
        "Fails when a source that completes no group scores the keys that another layer published last.",
        (
            "stale-index-keys",
            "selection-of-earlier-call",
            "leftover-lost",
        ),
        _stale_keys("intended"),
        "numerics.md 6.4",
    ),
    Vector(
        "stale-index-keys/even-prompt-one-step",
        "Fails when a source that completes no group scores its own keys: the literal reading does not.",
        ("fresh-index-keys",),
        _stale_keys("literal"),
        "numerics.md 6.4",
    ),
    Vector(
        "runtimes-interleaved/two-requests",
        "Fails when rows, keys, selections or candidates are kept in one place for all requests of a process.",
        ("global-runtime", "state-shared-by-requests"),
        (
            Schedule(_single((0, 18), *_steps(18, 21)), seed="first"),
            Schedule(_single((0, 17), *_steps(17, 20)), seed="second"),
        ),
        "numerics.md 6.1",
    ),
    Vector(
        "batch/requests-at-different-positions",
        "Fails when one request's position or number of rows decides for the whole batch.",
        ("position-of-first-request", "requests-mixed", "selection-of-first-request"),
        (
            Schedule(
                [([0, 0, 0], 6), ([6, 6, 0], 1), ([7, 0, 1], 1), *[([8 + n, 1 + n, 2 + n], 1) for n in range(6)]],
                seed="batch",
            ),
        ),
    ),
    Vector(
        "second-request/shorter-than-the-first",
        "Fails when a new request sees the ring, rows, carry or selection of the one before it.",
        (
            "compressed-row-index",
            "leftover-lost",
            "ring-survives-request",
        ),
        (Schedule(_single((0, 19), (19, 1), (0, 1), *_steps(1, 6)), seed="again"),),
    ),
    Vector(
        "token-in-window-and-rows/short-prompt",
        "Fails when a token of the window is left out of the compressed rows of a ratio-1 layer.",
        (
            "same-rows-removed",
            "selection-shift",
            "selection-not-read",
            "window-not-read",
        ),
        (Schedule(_single((0, 4), (4, 1)), (RATIO_ONE,), (RATIO_ONE,), seed="twice"),),
    ),
    Vector(
        "no-compressed-row/single-token",
        "Fails when a ratio-2 layer cannot work without any compressed row, or attends to an empty one.",
        ("empty-row-attended",),
        (Schedule(_single((0, 1), (1, 1), (2, 1)), KEYS_LAYERS, KEYS_LAYERS, seed="short"),),
    ),
    Vector(
        "window-only/ring-wraps-twice",
        "Fails when a step reads the ring before it writes, or rows of the lap before stay in the list.",
        (
            "ring-read-before-write",
            "ring-slot-off",
            "window-one-too-narrow",
            "unwritten-slots-listed",
            "query-norm",
            "query-heads-normed",
            "query-rotation",
            "heads-transposed",
            "scale-wrong",
        ),
        (
            Schedule(_single((0, 3), *_steps(3, 19)), (WINDOW_ONLY,), (WINDOW_ONLY,), seed="ring"),
            Schedule(_single((0, 13), *_steps(13, 18)), (WINDOW_ONLY,), (WINDOW_ONLY,), seed="long"),
        ),
    ),
    Vector(
        "continued-prompt/every-split",
        "Fails when a prompt in two pieces differs from the prompt in one: at the window, inside a group, in a block.",
        ("chunk-window-short", "chunk-mid-group", "chunk-keys-lost", "ring-chunk-at-slot-0"),
        tuple(
            Schedule(_single((0, split), (split, SPLIT_PROMPT - split)), (0, 2, 4, 6), (0, 2, 4, 6), seed="split")
            for split in range(1, SPLIT_PROMPT)
        ),
    ),
)


def _turned_back() -> Iterator[Step]:
    """Outputs of two requests at far positions, in a layer of either rotary base."""
    o = made.bf16("attention.o", 2, 3, MODEL.n_heads, MODEL.head_dim)
    positions = np.stack([np.arange(3) + 7, np.arange(3) + 4094])
    for layer in (WINDOW_ONLY, RATIO_TWO):
        weights = made.parameters(made.attention(MODEL, layer))
        arguments = {
            "config": CONFIG,
            "layer_id": layer,
            "weights": weights.mapping(),
            "o": o,
            "positions": int64(positions),
        }

        def rules(layer: int = layer, weights: Parameters = weights) -> list[Expectation]:
            expected = rules_of.output(MODEL, layer, weights, exact(o), positions)
            return [Within("attn_out", expected, "BF16", AXES)]

        yield Step(Call("attention_output", arguments), rules, Place(layer))
