"""The whole model served as engines do: chunks, batches, reused rows, saved states, requests in turn (numerics.md 0).

Judged by the recorded results of the same requests run by themselves.  Each request of a batch is judged by itself: its
noise is larger than that of the batch as a whole, so that these cases have floors of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, Step
from conformance.cases.serving import (
    CHUNK_FLAGS,
    SAVED_FLAGS,
    SLOT_FLAGS,
    Request,
    ServedCall,
    by_name,
    chunks,
    longest_prompt,
    side_by_side,
    slots,
)
from conformance.cases.traces import GoldenModel, Trace
from conformance.judge.expectations import Expectation, OwnArgmax
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRequest
from conformance.tensors import Tensor, concatenate

SPEC = "numerics.md 0 and 9"
STEPS = 5
"""Tokens after a prompt: a group is completed twice, and what Engram looks back to has been renewed."""
DEEPER = (
    "batch-staggered/same-request-three-times",
    "interleaved/two-requests-in-turn",
    "slot-reused/text-after-an-image",
)
"""Left to level `full`: a whole model shows less than its parts by themselves, whose bounds are derived."""


@dataclass(frozen=True)
class Judge:
    """Where the recorded logits of a request are, and how far from them is noise."""

    case_id: str
    floors: Floors

    def rules(self, call: ServedCall) -> Sequence[Expectation]:
        """The logits of every row whose call ends where a recorded one ended."""
        rules: list[Expectation] = [OwnArgmax("output_ids", "logits")]
        for row, (request, start) in enumerate(call.rows):
            recorded = self._recorded(request, start + call.length)
            if recorded is not None:
                allowance = self.floors.allowance(self.case_id, "logits")
                rule = Propagated("logits", recorded, allowance, self.floors.describe(), ("request", "token id"))
                rules.append(OfRequest(rule, row, len(call.rows)))
        return rules

    @staticmethod
    def _recorded(request: Request, end: int) -> Tensor | None:
        trace = request.trace
        for call, (start, length) in enumerate(zip(trace.starts, trace.lengths, strict=True)):
            if start + length == end:
                return trace.scenario.tap(call, "logits")[request.row : request.row + 1]
        return None


def cases(model: GoldenModel, traces: Sequence[Trace], floors: Floors) -> Iterator[Case]:
    """One case a way of serving; each names the mistakes that show in it."""
    requests = by_name(traces)
    conversations = [*_chunked(model, requests), *_batches(traces, requests)]
    for name, why, flags, served in conversations:
        case_id = f"model/serving-{name}"
        yield Case(
            case_id,
            "full" if name in DEEPER else "core",
            "propagated",
            why,
            SPEC,
            partial(_in_turn, model, served, Judge(case_id, floors)),
            flags=flags,
            source=served[0][0].rows[0][0].trace.source,
            reading="intended",
        )
    yield from _saved(model, requests, floors)


Conversation = tuple[str, str, tuple[str, ...], list[list[ServedCall]]]
"""Name, why, flags, and the conversations that are put to the model call by call in turn."""


def _decoding(requests: Mapping[str, Request]) -> list[Request]:
    """Requests of a prompt and at least four steps of one token, the most steps first."""
    found = [r for r in requests.values() if r.trace.lengths[0] > 1 and len(r.trace.lengths) > 4]
    return sorted(found, key=lambda request: -len(request.trace.lengths))


def _steps_of(request: Request, prompt: Sequence[int]) -> list[ServedCall]:
    """The prompt in these pieces, then the first of the recorded steps."""
    return chunks(request, [*prompt, *request.trace.lengths[1 : 1 + STEPS]])


def _chunked(model: GoldenModel, requests: Mapping[str, Request]) -> Iterator[Conversation]:
    window = model.config.window_size
    for request in _decoding(requests)[:1]:
        prompt = request.trace.lengths[0]
        half = prompt // 2 + 1 - prompt // 2 % 2
        yield (
            "chunked-prompt/split-inside-a-group",
            "Fails when a prompt in two pieces leaves another state than in one call: rows, carry, look-back.",
            CHUNK_FLAGS,
            [_steps_of(request, [half, prompt - half])],
        )
    longest = longest_prompt(requests)
    if longest is not None:
        total = longest.trace.lengths[0]
        yield (
            "chunked-prompt/split-behind-the-window",
            "Fails when a prompt in two pieces, the first one token longer than the window, differs from one call.",
            CHUNK_FLAGS,
            [chunks(longest, [window + 1, total - window - 1])],
        )


def _batches(traces: Sequence[Trace], requests: Mapping[str, Request]) -> Iterator[Conversation]:
    for trace in traces:
        if trace.batch > 1 and trace.scenario.reading == "intended":
            yield (
                "batch-one-by-one/recorded-batch",
                "Fails when requests of a batch differ from the same requests by themselves.",
                ("requests-mixed", "global-runtime"),
                [chunks(Request(trace, row), trace.lengths) for row in range(trace.batch)],
            )
    single = [r for r in requests.values() if set(r.trace.lengths) == {1} and len(r.trace.lengths) > 4]
    for request in single[:1]:
        # One token a call from the first on: the row of the batch is taken by the same request three times.
        yield (
            "batch-staggered/same-request-three-times",
            "Fails when requests of a batch that stand at different positions disturb one another.",
            SLOT_FLAGS,
            [side_by_side(*[_staggered(request, delay) for delay in range(3)])],
        )
    calls = slots(requests)
    if calls:
        yield (
            "slot-reused/beside-a-running-request",
            "Fails when a request notices its neighbour in the batch, or the request that had its row before.",
            SLOT_FLAGS,
            [calls],
        )
    for first, second in zip(_decoding(requests)[:1], _decoding(requests)[1:2], strict=False):
        yield (
            "interleaved/two-requests-in-turn",
            "Fails when two requests that are served in turn share anything.",
            ("global-runtime", "state-shared-by-requests"),
            [_steps_of(r, r.trace.lengths[:1]) for r in (first, second)],
        )
    images = [t for t in traces if t.image_mask is not None and t.scenario.reading == "intended" and t.batch == 1]
    after = min(_decoding(requests), key=lambda request: request.trace.lengths[0], default=None)
    for trace in images[:1]:
        if after is not None:
            yield (
                "slot-reused/text-after-an-image",
                "Fails when a request without images is read as if the image of the one before stood in it.",
                ("image-remembered", "ring-survives-request"),
                [[*chunks(Request(trace), trace.lengths), *_steps_of(after, after.trace.lengths[:1])]],
            )


def _staggered(request: Request, delay: int) -> list[ServedCall]:
    """The request from its first token, begun and given up `delay` tokens later, and begun again."""
    return [*chunks(request, [1] * delay), *chunks(request, request.trace.lengths[: 1 + STEPS])]


def _open(model: GoldenModel, batch: int, name: str) -> Iterator[Step]:
    shared = {"config": model.mapping, "batch_size": batch}
    yield Step(Open(f"runtime of {name}", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "weights": model.parameters.mapping(),
        "runtime": Handle(f"runtime of {name}"),
        "token_map": model.token_map,
    }
    yield Step(Open(name, "model", arguments))


def _served(call: ServedCall, name: str, judge: Judge) -> Step:
    ids = [request.part(request.trace.input_ids, start, call.length) for request, start in call.rows]
    inputs = {
        "input_ids": concatenate(ids, axis=0),
        "start_pos": call.start_pos,
        "image_mask": _image_mask(call),
        "image_features": _image_features(call),
    }
    return Step(Advance(name, inputs), partial(judge.rules, call), Place(None, [f"of {name} ({call.words})"]))


def _image_mask(call: ServedCall) -> Tensor | None:
    ((request, start), *others) = call.rows
    if others or request.trace.image_mask is None:
        return None
    mask = request.trace.image_mask[request.row : request.row + 1, start : start + call.length]
    return Tensor("BOOL", np.ascontiguousarray(mask))


def _image_features(call: ServedCall) -> Tensor | None:
    """The placed features of a prompt, as the first block received them."""
    ((request, start), *others) = call.rows
    scenario = request.trace.scenario
    if others or start or request.trace.image_mask is None or not scenario.has(0, "h_in", 0):
        return None
    return Tensor("BF16", np.ascontiguousarray(scenario.tap(0, "h_in", 0).data[:, :, 0]))


def _in_turn(model: GoldenModel, conversations: Sequence[Sequence[ServedCall]], judge: Judge) -> Iterator[Step]:
    """Call 0 of every conversation, then call 1, each with a model of its own."""
    for number in range(max(map(len, conversations))):
        for which, calls in enumerate(conversations):
            name = f"conversation {which}"
            if not number:
                yield from _open(model, len(calls[0].rows), name)
            if number < len(calls):
                yield _served(calls[number], name, judge)


def _saved(model: GoldenModel, requests: Mapping[str, Request], floors: Floors) -> Iterator[Case]:
    for request in _decoding(requests)[:1]:
        prompt = request.trace.lengths[0]
        for name, parity in {"even-position": 0, "odd-position": 1}.items():
            at = prompt + 1 + (prompt + 1 + parity) % 2
            case_id = f"model/serving-saved-state/{name}"
            yield Case(
                case_id,
                "full",
                "propagated",
                "Fails when a request resumed from a saved state, in the same model or another, goes on differently.",
                SPEC,
                partial(_resumed, model, request, at, Judge(case_id, floors)),
                flags=SAVED_FLAGS,
                source=request.trace.source,
                reading="intended",
            )


def _resumed(model: GoldenModel, request: Request, at: int, judge: Judge) -> Iterator[Step]:
    """Save, go on, go back to what was saved in the same model, then in another one that has seen another text."""
    calls = _steps_of(request, request.trace.lengths[:1])
    before = [call for call in calls if call.rows[0][1] < at]
    after = calls[len(before) :]
    yield from _open(model, 1, "first")
    for call in before:
        yield _served(call, "first", judge)
    yield Step(Open("saved", "save_state", {"target": Handle("first")}))
    for call in after:
        yield _served(call, "first", judge)
    yield from _open(model, 1, "second")
    yield _served(chunks(request, [3])[0], "second", judge)
    for name in ("first", "second"):
        yield Step(Call("restore_state", {"target": Handle(name), "saved": Handle("saved")}))
        for call in after:
            yield _served(call, name, judge)
