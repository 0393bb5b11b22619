"""Rejected drafts must leave no trace: recorded prompts decoded with drafts of which none, some or all are accepted.

Each call brings the tokens that were recorded next, as many as are accepted, and after them drafts that are wrong.
These are taken back, and the next call goes on from there.  What comes out must be what came out when nobody drafted:
the recorded results, judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import numpy as np

from conformance.cases.attention import needed_layers, state_rules
from conformance.cases.block import PER_STREAM, STREAM_AXES
from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, ReadState, Rules, Step, no_rules
from conformance.cases.draft_view import Drafts
from conformance.cases.dspark import draft_rules, head_arguments, head_state_rules
from conformance.cases.traces import GoldenModel, Trace, int64
from conformance.judge.bounded import Bounded
from conformance.judge.components.teacher_forced import Call as TracedCall, TeacherForcedAttention
from conformance.judge.expectations import Exact, Expectation, OwnArgmax, Within
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated
from conformance.judge.rows import OfRows
from conformance.tensors import Tensor, concatenate

SPEC = "numerics.md 10.1"
PATTERNS: Mapping[str, tuple[int, ...]] = {"none-accepted": (0,), "some-accepted": (2, 0, 1, 3), "all-accepted": (4,)}
"""How many drafts of each call are accepted, over and over."""
DRAFTS = 4
ROUNDS = 2
"""Verifications of a model that runs freely: after a few more tokens its own noise hides what is left of a draft."""
TOGETHER = "accepted-unlike-in-a-batch"
"""Two requests of which one accepts nothing and the other everything."""

RING = ("draft-left-in-ring", "verification-not-causal")
ROWS = ("draft-left-in-rows", "draft-left-in-index-keys")
ROLE_FLAGS: Mapping[str, tuple[str, ...]] = {
    "window-only": RING,
    "source": (*RING, *ROWS, "draft-left-in-carry"),
    "candidate-source": (*RING, *ROWS),
}


@dataclass(frozen=True)
class Verified:
    """One call that verifies drafts: its first position, and how many tokens are kept of each request."""

    start: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """Where each request goes on."""
        return tuple(start + kept for start, kept in zip(self.start, self.kept, strict=True))


def cases(model: GoldenModel, traces: Sequence[Trace], drafts: Sequence[Drafts], floors: Floors) -> Iterator[Case]:
    """Attention by role, Engram's history, the whole model, and the rings of the draft head."""
    trace = _longest_decode(traces)
    if trace is not None:
        yield from _of_attention(model, trace)
        yield from _of_engram(model, trace, floors)
        yield from _of_model(model, trace, floors)
    for of in drafts:
        if len(of.calls) > DRAFTS:
            yield from _of_draft_head(model, of, floors)


def _longest_decode(traces: Sequence[Trace]) -> Trace | None:
    """The text of one request, token by token after its prompt, for the largest number of steps."""
    suited = [
        trace
        for trace in traces
        if trace.batch == 1
        and trace.image_mask is None
        and trace.scenario.reading == "intended"
        and len(trace.starts) > DRAFTS + 1
        and set(trace.lengths[1:]) == {1}
    ]
    return max(suited, key=lambda trace: len(trace.starts), default=None)


def schedule(trace: Trace, accepted: Sequence[int]) -> list[Verified]:
    """Calls after the prompt that keep one token and as many drafts as accepted, up to the end of the recording."""
    calls: list[Verified] = []
    position = trace.lengths[0]
    for count in cycle(accepted):
        if position >= trace.total:
            return calls
        kept = min(1 + count, trace.total - position)
        calls.append(Verified((position,), (kept,)))
        position += kept
    raise AssertionError("a cycle has no end")


def _side_by_side(first: Sequence[Verified], second: Sequence[Verified]) -> list[Verified]:
    """Two requests in one batch, as long as both go on."""
    return [Verified(a.start + b.start, a.kept + b.kept) for a, b in zip(first, second, strict=False)]


def _schedules(trace: Trace) -> Iterator[tuple[str, list[Verified]]]:
    made = {name: schedule(trace, accepted) for name, accepted in PATTERNS.items()}
    yield from made.items()
    yield TOGETHER, _side_by_side(made["none-accepted"], made["all-accepted"])


def _with_drafts(recorded: Tensor, call: Verified, vocabulary: int = 0) -> Tensor:
    """The recorded tokens that a call keeps, and wrong ones for its rejected drafts: [B,1+n,...] of [1,P,...].

    A wrong one is the input with its sign turned, or another token id: as large as a right one, and unlike it.
    """
    parts = []
    for start, kept in zip(call.start, call.kept, strict=True):
        wanted = np.minimum(start + np.arange(1 + DRAFTS), recorded.shape[1] - 1)
        data = recorded.data[:, wanted].copy()
        if recorded.dtype == "BF16":
            data[:, kept:] ^= 0x8000
        elif recorded.dtype == "I32":
            data[:, kept:] = (data[:, kept:] + vocabulary // 2) % vocabulary
        parts.append(Tensor(recorded.dtype, data))
    return concatenate(parts, axis=0)


def _take_back(names: Sequence[str], call: Verified, place: Place) -> Iterator[Step]:
    for name in names:
        arguments = {"target": Handle(name), "end": int64(call.end)}
        yield Step(Call("roll_back", arguments), no_rules, place)


def _place(layer: int | None, number: int, call: Verified) -> Place:
    positions = range(call.start[0], call.start[0] + 1 + DRAFTS) if len(call.start) == 1 else ()
    return Place(layer, [f"verification {number}"], positions)


# attention ----------------------------------------------------------------------------------------------------------


def _of_attention(model: GoldenModel, trace: Trace) -> Iterator[Case]:
    roles: dict[str, list[int]] = {}
    for layer in range(model.config.n_layers):
        roles.setdefault(model.config.role(layer), []).append(layer)
    for role, layers in roles.items():
        for pattern, calls in _schedules(trace):
            yield Case(
                f"dspark/rejected-drafts-leave-no-trace-in-{role}/{pattern}",
                "core",
                "composed",
                "Fails when rejected drafts stay in the ring, the compressed rows, the index keys or the carry.",
                SPEC,
                partial(_attention, model, trace, layers, calls),
                flags=next((found for name, found in ROLE_FLAGS.items() if role.startswith(name)), RING),
                source=trace.source,
                reading="intended",
            )


def _attention(model: GoldenModel, trace: Trace, judged: Sequence[int], calls: Sequence[Verified]) -> Iterator[Step]:
    layers = needed_layers(model, judged, "intended")
    batch = len(calls[0].start)
    names = [f"layer {layer}" for layer in layers]
    shared = {"config": model.mapping, "batch_size": batch}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    for layer, name in zip(layers, names, strict=True):
        weights = model.layer(layer).within("attn.").mapping()
        arguments = {**shared, "layer_id": layer, "weights": weights, "runtime": Handle("runtime")}
        yield Step(Open(name, "attention", arguments), place=Place(layer))
    for layer, name in zip(layers, names, strict=True):
        x = concatenate([trace.part(0, "attn_in", layer)] * batch, axis=0)
        inputs = {"x": x, "start_pos": int64([0] * batch)}
        yield Step(Advance(name, inputs), place=trace.place(layer, 0))
    by_request = [_kept_calls(trace, calls, request) for request in range(batch)]
    bounded = [bounds_of_calls(model, trace, layers, kept) for kept in by_request]
    for number, call in enumerate(calls):
        for layer, name in zip(layers, names, strict=True):
            inputs = {"x": _with_drafts(trace.joined("attn_in", layer), call), "start_pos": int64(call.start)}
            rules = partial(_kept_rules, bounded, layer, number, call) if layer in judged else no_rules
            yield Step(Advance(name, inputs), rules, _place(layer, number, call))
        yield from _take_back(names, call, _place(None, number, call))
    if batch == 1:
        for layer in judged:
            rules = partial(state_rules, trace, bounded[0].rows[layer], layer)
            yield Step(ReadState(f"layer {layer}"), rules, Place(layer, ["state at the end"]))


def _kept_calls(trace: Trace, calls: Sequence[Verified], request: int) -> list[TracedCall]:
    """The calls as if nobody had drafted: the prompt, and then the tokens that each call keeps."""
    kept = [TracedCall(call.start[request], call.kept[request]) for call in calls]
    return [TracedCall(0, trace.lengths[0]), *kept]


def bounds_of_calls(
    model: GoldenModel, trace: Trace, layers: Sequence[int], calls: Sequence[TracedCall]
) -> TeacherForcedAttention:
    """The bounds of these layers over a trace that is cut into other calls than it was recorded in."""
    weights = {layer: model.layer(layer).within("attn.") for layer in layers}
    inputs = {layer: trace.joined("attn_in", layer).values()[:, : calls[-1].end] for layer in layers}
    return TeacherForcedAttention(model.config, weights, inputs, list(calls), {}, False)


def _kept_rules(
    bounded: Sequence[TeacherForcedAttention], layer: int, number: int, call: Verified
) -> Sequence[Expectation]:
    """The output at the tokens that are kept; what came out for rejected drafts is nobody's business."""
    parts = [each.output(layer, number + 1) for each in bounded]
    value = np.zeros((len(parts), 1 + DRAFTS, parts[0].shape[-1]))
    error = np.full_like(value, np.inf)
    for request, (part, kept) in enumerate(zip(parts, call.kept, strict=True)):
        value[request, :kept], error[request, :kept] = part.value[0], part.error[0]
    return [Within("attn_out", Bounded(value, error), "BF16", ("request", "position", "feature"))]


# Engram's history ---------------------------------------------------------------------------------------------------


def _of_engram(model: GoldenModel, trace: Trace, floors: Floors) -> Iterator[Case]:
    if not model.config.engram_layer_ids:
        return
    for pattern, calls in list(_schedules(trace))[: len(PATTERNS)]:
        case_id = f"dspark/rejected-drafts-leave-no-trace-in-engram/{pattern}"
        yield Case(
            case_id,
            "core",
            "propagated",
            "Fails when rejected drafts stay among the tokens that n-grams look back to.",
            SPEC,
            partial(_engram, model, trace, calls, floors, case_id),
            flags=("draft-left-in-look-back",),
            source=trace.source,
            reading="intended",
        )


def _engram(
    model: GoldenModel, trace: Trace, calls: Sequence[Verified], floors: Floors, case_id: str
) -> Iterator[Step]:
    judged = model.config.engram_layer_ids
    layers = needed_layers(model, judged, "intended")
    names = [f"layer {layer}" for layer in layers]
    shared = {"config": model.mapping, "batch_size": 1}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    for layer, name in zip(layers, names, strict=True):
        arguments = {
            **shared,
            "layer_id": layer,
            "weights": model.layer(layer).mapping(),
            "runtime": Handle("runtime"),
            "token_map": model.token_map if layer in judged else None,
        }
        yield Step(Open(name, "block", arguments), place=Place(layer))
    prompt = trace.lengths[0]
    for layer, name in zip(layers, names, strict=True):
        inputs = {
            "h": trace.block_input(layer)[:, :prompt],
            "pre": trace.part(0, "pre_in", layer),
            "input_ids": trace.part(0, "input_ids"),
            "start_pos": int64([0]),
            "image_mask": None,
        }
        yield Step(Advance(name, inputs), place=trace.place(layer, 0))
    for number, call in enumerate(calls):
        for layer, name in zip(layers, names, strict=True):
            inputs = {
                "h": _with_drafts(trace.block_input(layer), call),
                "pre": _with_drafts(trace.joined("pre_in", layer), call),
                "input_ids": _with_drafts(trace.input_ids, call, model.config.vocab_size),
                "start_pos": int64(call.start),
                "image_mask": None,
            }
            place = _place(layer, number, call)
            if layer not in judged:
                yield Step(Advance(name, inputs), place=place)
                continue
            required = partial(_block_rules, trace, layer, call, floors, case_id)
            yield Step(Advance(name, inputs), required, place, partial(_hash_rules, trace, layer, call))
        yield from _take_back(names, call, _place(None, number, call))


def _kept_part(trace: Trace, tap: str, layer: int, call: Verified) -> Tensor:
    return trace.joined(tap, layer)[:, call.start[0] : call.end[0]]


def _block_rules(trace: Trace, layer: int, call: Verified, floors: Floors, case_id: str) -> Sequence[Expectation]:
    return [
        OfRows(
            Propagated(
                tap,
                _kept_part(trace, tap, layer, call),
                floors.allowance(case_id, tap),
                floors.describe(),
                axes,
            ),
            range(call.kept[0]),
            1 + DRAFTS,
        )
        for tap, axes in (("h_out", STREAM_AXES), ("pre_out", PER_STREAM))
    ]


def _hash_rules(trace: Trace, layer: int, call: Verified) -> Sequence[Expectation]:
    recorded = _kept_part(trace, "engram_hash", layer, call)
    exact = Exact("engram_hash", recorded, ("request", "position", "column"))
    return [OfRows(exact, range(call.kept[0]), 1 + DRAFTS)]


# the whole model ----------------------------------------------------------------------------------------------------


def _of_model(model: GoldenModel, trace: Trace, floors: Floors) -> Iterator[Case]:
    for pattern, accepted in PATTERNS.items():
        case_id = f"dspark/model-goes-on-as-if-never-drafted/{pattern}"
        yield Case(
            case_id,
            "core",
            "propagated",
            "Fails when anything of a rejected draft is left anywhere in the model.",
            SPEC,
            partial(_model, model, trace, accepted, floors, case_id),
            flags=("draft-left-in-look-back", "draft-left-in-ring", "draft-left-in-rows", "draft-left-in-index-keys"),
            source=trace.source,
            reading="intended",
        )


def _model(model: GoldenModel, trace: Trace, accepted: Sequence[int], floors: Floors, case_id: str) -> Iterator[Step]:
    """A call that verifies drafts and a call without any take turns: logits are those of the last position."""
    shared = {"config": model.mapping, "batch_size": 1}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "weights": model.parameters.mapping(),
        "runtime": Handle("runtime"),
        "token_map": model.token_map,
    }
    yield Step(Open("model", "model", arguments))
    yield _model_step(trace.part(0, "input_ids"), 0)
    position = trace.lengths[0]
    for number, count in enumerate(islice(cycle(accepted), ROUNDS)):
        if position + 1 + count >= trace.total:
            return
        call = Verified((position,), (1 + count,))
        verified = _with_drafts(trace.input_ids, call, model.config.vocab_size)
        yield _model_step(verified, position)
        yield from _take_back(["model"], call, _place(None, number, call))
        position = call.end[0]
        # The prompt is call 0, and every later call is one token.
        recorded = position - trace.lengths[0] + 1
        rules = partial(_logits, trace, recorded, floors, case_id)
        yield _model_step(trace.part(recorded, "input_ids"), position, rules)
        position += 1


def _model_step(input_ids: Tensor, position: int, rules: Rules = no_rules) -> Step:
    inputs = {"input_ids": input_ids, "start_pos": int64([position]), "image_mask": None, "image_features": None}
    return Step(Advance("model", inputs), rules, Place(None, [f"at {position}"]))


def _logits(trace: Trace, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    recorded, allowance = trace.scenario.tap(call, "logits"), floors.allowance(case_id, "logits")
    return [
        Propagated("logits", recorded, allowance, floors.describe(), ("request", "token id")),
        OwnArgmax("output_ids", "logits"),
    ]


# the draft head -----------------------------------------------------------------------------------------------------


def _of_draft_head(model: GoldenModel, of: Drafts, floors: Floors) -> Iterator[Case]:
    for pattern, accepted in {"none-accepted": 0, "some-accepted": 2, "all-accepted": DRAFTS}.items():
        case_id = f"dspark/rejected-positions-leave-no-trace-in-draft-rings/{pattern}"
        yield Case(
            case_id,
            "core",
            "propagated",
            "Fails when rows of rejected positions stay in the rings of the draft head.",
            SPEC,
            partial(_draft_head, model, of, accepted, floors, case_id),
            flags=("draft-left-in-draft-rings",),
            source=of.trace.source,
        )


def _draft_head(model: GoldenModel, of: Drafts, accepted: int, floors: Floors, case_id: str) -> Iterator[Step]:
    trace = of.trace
    hidden = trace.joined("main_hidden")
    yield Step(Open("head", "dspark", head_arguments(model, trace.batch)))

    def step(part: Tensor, call: int, start: int) -> Advance:
        ids = trace.scenario.tap(call, "output_ids")
        return Advance("head", {"main_hidden": part, "output_ids": ids, "start_pos": int64([start] * trace.batch)})

    prompt = trace.lengths[0]
    yield Step(step(hidden[:, :prompt], 0, 0), place=of.place(None, 0))
    verified = Verified((prompt,), (1 + accepted,))
    last = 1 + accepted
    # Where everything is accepted, the drafts that come out are those after the last of the recorded calls.
    rules = partial(draft_rules, model, of, last, floors, case_id) if accepted == DRAFTS else no_rules
    yield Step(step(_with_drafts(hidden, verified), last, prompt), rules, of.place(None, last))
    yield from _take_back(["head"], Verified((prompt,) * trace.batch, (last,) * trace.batch), of.place(None, last))
    for call in range(last + 1, len(trace.starts)):
        rules = partial(draft_rules, model, of, call, floors, case_id)
        yield Step(step(trace.part(call, "main_hidden"), call, trace.starts[call]), rules, of.place(None, call))
        rings = partial(head_state_rules, model, trace, of.first(call))
        yield Step(ReadState("head"), rings, Place(None, [f"state after {call}"]))
    yield Step(ReadState("head"), partial(head_state_rules, model, trace), Place(None, ["state at the end"]))
