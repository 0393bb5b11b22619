"""How an engine serves requests must not show in their results: recorded requests put into other calls (numerics.md 0).

A request may be prefilled in chunks, share a batch with others that stand elsewhere, take the row of one that is
finished, or be resumed from a saved state.  Its results at every position stay those that were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.attention import needed_layers
from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, Step
from conformance.cases.traces import GoldenModel, Trace, int64
from conformance.judge.bounded import Bounded, concatenate as concatenate_bounds
from conformance.judge.components.teacher_forced import Call as TracedCall, TeacherForcedAttention
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor, concatenate

SPEC = "numerics.md 0 and 6"
AXES = ("request", "position", "feature")
PROMPT = 40
"""Tokens of the prompt that is cut: more than two windows of the tiny set, and its selection has to choose."""

CHUNK_FLAGS = (
    "chunk-window-short",
    "chunk-mid-group",
    "chunk-keys-lost",
    "chunk-own-rows-unseen",
    "chunk-position-restarts",
    "chunk-not-causal",
    "ring-chunk-at-slot-0",
)
SLOT_FLAGS = (
    "position-of-first-request",
    "requests-mixed",
    "selection-of-first-request",
    "ring-survives-request",
    "carry-survives-request",
)
SAVED_FLAGS = ("saved-state-shared", "saved-state-incomplete")


@dataclass(frozen=True)
class Request:
    """A recorded request of one row."""

    trace: Trace
    row: int = 0

    def part(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """Some positions of a tensor [B,P,...] that belongs to the trace, as [1,T,...]."""
        return tensor[self.row : self.row + 1, start : start + length]


@dataclass(frozen=True)
class ServedCall:
    """One call of a batch: for each row the request in it and its position; all rows bring `length` tokens."""

    length: int
    rows: tuple[tuple[Request, int], ...]

    @property
    def start_pos(self) -> Tensor:
        """Position of each row, int64 [B]."""
        return int64([start for _, start in self.rows])

    @property
    def words(self) -> str:
        """The call in words."""
        return ", ".join(f"{request.trace.name} at {start}" for request, start in self.rows)


def chunks(request: Request, lengths: Sequence[int]) -> list[ServedCall]:
    """One request by itself, in calls of these lengths."""
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    return [ServedCall(length, ((request, start),)) for length, start in zip(lengths, starts, strict=True)]


def side_by_side(*rows: Sequence[ServedCall]) -> list[ServedCall]:
    """Several rows in one batch: their calls must be of equal length; a row goes on as long as the shortest."""
    served = []
    for calls in zip(*rows, strict=False):
        (length,) = {call.length for call in calls}
        served.append(ServedCall(length, tuple(row for call in calls for row in call.rows)))
    return served


def equal_chunks(total: int, size: int) -> list[int]:
    """`total` in pieces of `size`, the last one shorter."""
    return [min(size, total - first) for first in range(0, total, size)]


def by_name(traces: Sequence[Trace]) -> dict[str, Request]:
    """The text requests of a set in the intended reading, by the name of their recording."""
    return {
        trace.name: Request(trace)
        for trace in traces
        if trace.image_mask is None and trace.scenario.reading == "intended" and trace.batch == 1
    }


def longest_prompt(requests: Mapping[str, Request]) -> Request | None:
    """The recording with the longest prompt, if that is long enough to be cut."""
    longest = max(requests.values(), key=lambda request: request.trace.lengths[0], default=None)
    return longest if longest is not None and longest.trace.lengths[0] >= PROMPT else None


def slots(requests: Mapping[str, Request]) -> list[ServedCall]:
    """A batch of two rows: one request runs on while others finish beside it and new ones take their row.

    The first row decodes its prompt and then token by token.  The second is given up in the middle of a group, then
    taken by a request that begins with one token and stops, and then by another that is prefilled token by token.
    Empty where the set has no such recordings.
    """
    stepped = [request for request in requests.values() if set(request.trace.lengths[1:]) == {1}]
    running = max(
        (request for request in stepped if request.trace.lengths[0] > 1), key=lambda r: r.trace.total, default=None
    )
    if running is None:
        return []
    prompt, steps = running.trace.lengths[0], len(running.trace.lengths) - 1
    others = [request for request in requests.values() if request is not running]
    given_up = next((r for r in others if r.trace.lengths[0] > prompt), None)
    single = max((r for r in stepped if r.trace.lengths[0] == 1), key=lambda r: r.trace.total, default=None)
    if given_up is None or single is None:
        return []
    first = min(steps // 2 + 1, single.trace.total)
    second = [*chunks(given_up, [prompt]), *chunks(single, [1] * first), *chunks(given_up, [1] * (steps - first))]
    return side_by_side(chunks(running, [prompt, *[1] * steps]), second)


def cases(model: GoldenModel, traces: Sequence[Trace]) -> Iterator[Case]:
    """Attention of every role; the whole model is in `serving_model`."""
    requests = by_name(traces)
    prompt = longest_prompt(requests)
    if prompt is not None:
        every = [[split, PROMPT - split] for split in range(1, PROMPT)]
        window = model.config.window_size
        edges = sorted({1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 1, PROMPT - 1})
        cuts = {
            "two-chunks-at-window-and-group-edges": [[split, PROMPT - split] for split in edges],
            "equal-chunks": [equal_chunks(PROMPT, size) for size in (3, 7, window)],
            "every-split": every,
        }
        for name, lengths in cuts.items():
            yield Case(
                f"attention/serving-chunked-prompt/{name}",
                "full" if name == "every-split" else "core",
                "composed",
                "Fails when a prompt in chunks differs from the prompt in one call.",
                SPEC,
                partial(_in_turn, model, [chunks(prompt, each) for each in lengths]),
                flags=CHUNK_FLAGS,
                source=prompt.trace.source,
                reading="intended",
            )
        half = PROMPT // 2
        for name, at in {"even-position": half, "odd-position": half + 1}.items():
            yield Case(
                f"attention/serving-saved-state/{name}",
                "core" if at % 2 else "full",
                "composed",
                "Fails when a request resumed from a saved state differs from the request itself.",
                SPEC,
                partial(_resumed, model, prompt, at),
                flags=SAVED_FLAGS,
                source=prompt.trace.source,
                reading="intended",
            )
    calls = slots(requests)
    if calls:
        yield Case(
            "attention/serving-slot-reused/beside-a-running-request",
            "core",
            "composed",
            "Fails when a request in a batch notices its neighbour, or the request that had its row before.",
            SPEC,
            partial(_in_turn, model, [calls]),
            flags=SLOT_FLAGS,
            source=calls[0].rows[0][0].trace.source,
            reading="intended",
        )


def one_layer_of_each_role(model: GoldenModel) -> list[int]:
    """The first layer of every role."""
    first: dict[str, int] = {}
    for layer in range(model.config.n_layers):
        first.setdefault(model.config.role(layer), layer)
    return sorted(first.values())


class _Bounds:
    """Bounds of every request over its whole recording: what a call returns at a position depends on no later one."""

    def __init__(self, model: GoldenModel, layers: Sequence[int]) -> None:
        self.model, self.layers = model, layers
        self._forced: dict[tuple[str, int], TeacherForcedAttention] = {}

    def output(self, request: Request, layer: int, start: int, length: int) -> Bounded:
        """What a layer answers at some positions of a request, [1,T,D]."""
        key = (request.trace.name, request.row)
        if key not in self._forced:
            inputs = {layer: self.given(request, layer, 0, request.trace.total).values() for layer in self.layers}
            weights = {layer: self.model.layer(layer).within("attn.") for layer in self.layers}
            whole = [TracedCall(0, request.trace.total)]
            self._forced[key] = TeacherForcedAttention(self.model.config, weights, inputs, whole, {}, literal=False)
        return self._forced[key].output(layer, 0)[:, start : start + length]

    def given(self, request: Request, layer: int, start: int, length: int) -> Tensor:
        """The recorded input of a layer at some positions of a request, bf16 [1,T,D]."""
        return request.part(request.trace.joined("attn_in", layer), start, length)


def _open(model: GoldenModel, layers: Sequence[int], batch: int, name: str) -> Iterator[Step]:
    shared = {"config": model.mapping, "batch_size": batch}
    yield Step(Open(f"runtime of {name}", "runtime", {**shared, "reading": "intended"}))
    for layer in layers:
        weights = model.layer(layer).within("attn.").mapping()
        arguments = {**shared, "layer_id": layer, "weights": weights, "runtime": Handle(f"runtime of {name}")}
        yield Step(Open(f"layer {layer} of {name}", "attention", arguments), place=Place(layer))


def _served(bounds: _Bounds, judged: Sequence[int], call: ServedCall, name: str) -> Iterator[Step]:
    """One call through all layers."""
    for layer in bounds.layers:
        parts = [bounds.given(request, layer, start, call.length) for request, start in call.rows]
        inputs = {"x": concatenate(parts, axis=0), "start_pos": call.start_pos}
        place = Place(layer, [f"of {name} ({call.words})"])
        advance = Advance(f"layer {layer} of {name}", inputs)
        yield Step(advance, partial(_rules, bounds, layer, call), place) if layer in judged else Step(advance)


def _rules(bounds: _Bounds, layer: int, call: ServedCall) -> Sequence[Expectation]:
    parts = [bounds.output(request, layer, start, call.length) for request, start in call.rows]
    return [Within("attn_out", concatenate_bounds(parts, 0), "BF16", AXES)]


def _in_turn(model: GoldenModel, conversations: Sequence[Sequence[ServedCall]]) -> Iterator[Step]:
    """Conversations one after another, each with objects of its own."""
    judged = one_layer_of_each_role(model)
    bounds = _Bounds(model, needed_layers(model, judged, "intended"))
    for number, calls in enumerate(conversations):
        name = f"conversation {number}"
        yield from _open(model, bounds.layers, len(calls[0].rows), name)
        for call in calls:
            yield from _served(bounds, judged, call, name)


def _resumed(model: GoldenModel, prompt: Request, at: int) -> Iterator[Step]:
    """Save, go on, go back to what was saved in the same objects, go on again; then the same in other objects."""
    judged = one_layer_of_each_role(model)
    bounds = _Bounds(model, needed_layers(model, judged, "intended"))
    window = model.config.window_size
    yield from _open(model, bounds.layers, 1, "first")
    yield from _served(bounds, judged, ServedCall(at, ((prompt, 0),)), "first")
    for layer in bounds.layers:
        arguments = {"target": Handle(f"layer {layer} of first")}
        yield Step(Open(f"layer {layer} saved", "save_state", arguments), place=Place(layer))
    # Enough steps that every slot of the ring is written to: a state that is not a copy is lost by then.
    onward = [ServedCall(1, ((prompt, position),)) for position in range(at, min(at + window, prompt.trace.total))]
    for call in onward:
        yield from _served(bounds, judged, call, "first")
    yield from _open(model, bounds.layers, 1, "second")
    for name in ("first", "second"):
        for layer in bounds.layers:
            arguments = {"target": Handle(f"layer {layer} of {name}"), "saved": Handle(f"layer {layer} saved")}
            yield Step(Call("restore_state", arguments), place=Place(layer))
        for call in onward[:4]:
            yield from _served(bounds, judged, call, name)
