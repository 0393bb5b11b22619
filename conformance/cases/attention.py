"""Attention: its projections, and every role stepped through every scenario with its state (numerics.md 6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from conformance.cases.behaviours import named
from conformance.cases.case import Advance, Call, Case, Handle, Open, Place, ReadState, Step
from conformance.cases.compressor import carry_rules
from conformance.cases.traces import GoldenModel, Joined, RecordedCalls, Trace, exact, int64
from conformance.interface import Reading
from conformance.judge import deviations
from conformance.judge.bounded import Bounded
from conformance.judge.choices import Selection
from conformance.judge.components import attention as rules_of, indexer
from conformance.judge.components.teacher_forced import Call as TracedCall, LayerRows, TeacherForcedAttention
from conformance.judge.components.window import ring_positions
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

ROW_AXES = ("request", "position", "feature")
GROUP_AXES = ("request", "group", "feature")
HEAD_AXES = ("request", "position", "head", "feature")

ROLE_MISTAKES = {
    "window-only": "the ring is off by one, read before it is written, or older rows survive",
    "source": "compressed rows, index keys or the selection of its own rows are wrong, or stale keys are scored",
    "candidate-source": "its own selection is restricted by the candidates it publishes, or it publishes late",
    "re-indexing": "candidates are ignored or are those of another call, or keys are not the source's",
    "reusing-re-indexed": "the selection of the candidate source is used instead of the re-indexing layer's",
    "reusing": "rows or selections of another source, or of an earlier call, are used",
}


ROLE_FLAGS: Mapping[str, tuple[str, ...]] = {
    "window-only": ("ring-read-before-write", "ring-slot-off", "window-one-too-narrow", "window-not-read"),
    "source": ("stale-index-keys", "selection-shift", "selection-not-read", "compressed-row-index", "chunk-keys-lost"),
    "candidate-source": ("candidates-applied-to-source", "selection-shift", "index-keys-from-rotated"),
    "re-indexing": ("candidates-not-applied", "candidates-of-earlier-call", "compressed-rows-of-other-source"),
    "reusing-re-indexed": ("selection-of-earlier-source", "selection-of-earlier-call", "selection-not-read"),
    "reusing": ("compressed-rows-of-other-source", "selection-of-earlier-call", "selection-not-read"),
}
"""The mistakes that a role's cases reveal, by the beginning of its name."""


def cases(model: GoldenModel, traces: list[Trace], joined: Joined) -> Iterator[Case]:
    """Projections by themselves, then the stateful attention by role and behaviour, then the literal reading."""
    yield Case(
        "attention/query-latent/trace",
        "core",
        "composed",
        "Fails when the latent is not normed, or heads are normed as in an earlier model.",
        "numerics.md 6, item 1",
        partial(_latent, model, joined),
        flags=("query-norm",),
        source=joined.source,
    )
    yield Case(
        "attention/queries-rotated-by-layer-kind/trace",
        "core",
        "composed",
        "Fails when the rotary base of another kind of layer is used, or heads are normed after projection.",
        "numerics.md 6, item 1",
        partial(_queries, model, joined),
        flags=("query-rotation", "query-heads-normed", "heads-transposed", "one-rotary-base"),
        source=joined.source,
    )
    yield Case(
        "attention/output-turned-back-and-grouped/trace",
        "smoke",
        "composed",
        "Fails when the output is not turned back, groups are mixed, or the input of wo_a is quantised.",
        "numerics.md 6, item 6",
        partial(_output, model, joined),
        flags=("inverse-rotation-missing", "inverse-rotation-forward", "wo-a-groups-mixed", "wo-a-input-quantised"),
        source=joined.source,
    )
    config = model.config
    roles: dict[str, list[int]] = {}
    for layer in range(config.n_layers):
        roles.setdefault(config.role(layer), []).append(layer)
    for role, layers in roles.items():
        mistake = next(text for name, text in ROLE_MISTAKES.items() if role.startswith(name))
        for name, trace in named(traces).items():
            yield Case(
                f"attention/{role}/{name}",
                "smoke" if name == "prefill-one-more-than-window" else "core",
                "composed",
                f"Fails when {mistake}.",
                "numerics.md 6",
                partial(_stateful, model, trace, layers, "intended"),
                flags=next(found for name, found in ROLE_FLAGS.items() if role.startswith(name)),
                source=trace.source,
                reading="intended" if readings_differ(model, trace, layers) else None,
            )
    for role, layers in roles.items():
        for name, trace in named(traces).items():
            if not readings_differ(model, trace, layers):
                continue
            yield Case(
                f"attention/{role}-stale-index-keys/{name}",
                "core",
                "composed",
                "Fails when a source that completes no group scores its own keys: the literal reading does not.",
                "numerics.md 6.4",
                partial(_stateful, model, trace, layers, "literal"),
                flags=("fresh-index-keys",),
                source=trace.source,
                reading="literal",
            )


def readings_differ(model: GoldenModel, trace: Trace, layers: Sequence[int]) -> bool:
    """Whether a layer's keys are those of a source that can skip a call."""
    config = model.config
    return len(trace.starts) > 1 and any(
        config.ratio(layer) > 1 and config.ratio(config.kv_source(layer)) > 1 for layer in layers
    )


def _layer_arguments(model: GoldenModel, layer: int) -> dict[str, object]:
    return {"config": model.mapping, "layer_id": layer, "weights": model.layer(layer).within("attn.").mapping()}


def _latent(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        x = joined.tap("attn_in", layer)

        def rules(layer: int = layer, x: Tensor = x) -> list[Within]:
            expected = rules_of.query_latent(model.config, model.layer(layer).within("attn."), exact(x))
            return [Within("q_latent", expected, "BF16", ROW_AXES, recorded=joined.tap("q_latent", layer))]

        yield Step(Call("query_latent", {**_layer_arguments(model, layer), "x": x}), rules, joined.place(layer))


def _queries(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        latent = joined.tap("q_latent", layer)
        arguments = {**_layer_arguments(model, layer), "q_latent": latent, "positions": int64(joined.positions)}

        def rules(layer: int = layer, latent: Tensor = latent) -> list[Within]:
            weights = model.layer(layer).within("attn.")
            expected = rules_of.queries(model.config, layer, weights, exact(latent), joined.positions)
            return [Within("attn_q", expected, "BF16", HEAD_AXES)]

        yield Step(Call("attention_queries", arguments), rules, joined.place(layer))


def _output(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        o = joined.tap("attn_o", layer)
        arguments = {**_layer_arguments(model, layer), "o": o, "positions": int64(joined.positions)}

        def rules(layer: int = layer, o: Tensor = o) -> list[Within]:
            weights = model.layer(layer).within("attn.")
            expected = rules_of.output(model.config, layer, weights, exact(o), joined.positions)
            return [Within("attn_out", expected, "BF16", ROW_AXES, recorded=joined.tap("attn_out", layer))]

        yield Step(Call("attention_output", arguments), rules, joined.place(layer))


def needed_layers(model: GoldenModel, layers: Sequence[int], reading: Reading) -> list[int]:
    """The layers to step: these, the sources they read, and every source where keys are shared by a process."""
    needed = model.config.with_sources(layers)
    return sorted({*needed, *model.config.kv_source_layers}) if reading == "literal" else needed


def bounds(model: GoldenModel, trace: Trace, layers: Sequence[int], reading: Reading) -> TeacherForcedAttention:
    """The bounds of these layers over a trace."""
    calls = [TracedCall(start, length) for start, length in zip(trace.starts, trace.lengths, strict=True)]
    selected = {}
    if reading == trace.scenario.reading:
        for layer in layers:
            for call in range(len(calls)):
                if model.config.indexes(layer) and trace.scenario.has(call, "selected", layer):
                    selected[layer, call] = trace.scenario.tap(call, "selected", layer).data.astype(np.int64)
    return TeacherForcedAttention(
        model.config,
        {layer: model.layer(layer).within("attn.") for layer in layers},
        {layer: trace.joined("attn_in", layer).values() for layer in layers},
        calls,
        selected,
        reading == "literal",
    )


def _stateful(model: GoldenModel, trace: Trace, judged: Sequence[int], reading: Reading) -> Iterator[Step]:
    layers = needed_layers(model, judged, reading)
    bounded = bounds(model, trace, layers, reading)
    shared = {"config": model.mapping, "batch_size": trace.batch}
    yield Step(Open("runtime", "runtime", {**shared, "reading": reading}))
    for layer in layers:
        arguments = {**_layer_arguments(model, layer), "batch_size": trace.batch, "runtime": Handle("runtime")}
        yield Step(Open(f"layer {layer}", "attention", arguments), place=Place(layer))
    for call in range(len(trace.starts)):
        for layer in layers:
            inputs = {"x": trace.part(call, "attn_in", layer), "start_pos": trace.start_pos(call)}
            required = partial(output_rules, trace, bounded, layer, call, reading)
            optional = partial(tap_rules, trace, bounded, layer, call, reading)
            if layer in judged:
                yield Step(Advance(f"layer {layer}", inputs), required, trace.place(layer, call), optional)
            else:
                yield Step(Advance(f"layer {layer}", inputs), place=trace.place(layer, call))
    for layer in judged:
        place = Place(layer, [f"state after {len(trace.starts) - 1}"])
        yield Step(ReadState(f"layer {layer}"), partial(state_rules, trace, bounded.rows[layer], layer), place)


def _recorded(trace: Trace, layer: int, call: int, tap: str, reading: Reading) -> Tensor | None:
    """The recorded tap, if it belongs to the reading that is judged."""
    same = reading == trace.scenario.reading
    return trace.scenario.tap(call, tap, layer) if same and trace.scenario.has(call, tap, layer) else None


def output_rules(
    trace: Trace, bounded: TeacherForcedAttention, layer: int, call: int, reading: Reading
) -> Sequence[Expectation]:
    """The required result of a call."""
    recorded = _recorded(trace, layer, call, "attn_out", reading)
    return [Within("attn_out", bounded.output(layer, call), "BF16", ROW_AXES, recorded=recorded)]


def tap_rules(
    trace: Trace, bounded: TeacherForcedAttention, layer: int, call: int, reading: Reading
) -> Sequence[Expectation]:
    """Taps that an implementation may show: a finer look at the same step."""
    config, rows = bounded.config, bounded.rows[layer]
    span = slice(trace.starts[call], trace.starts[call] + trace.lengths[call])

    def within(tap: str, expected: Bounded, axes: tuple[str, ...]) -> Within:
        return Within(tap, expected, "BF16", axes, recorded=_recorded(trace, layer, call, tap, reading))

    rules: list[Expectation] = [
        within("q_latent", rows.q_latent[:, span], ROW_AXES),
        within("window_rows", rows.window_rows[:, span], ROW_AXES),
        within("attn_q", rows.queries[:, span], HEAD_AXES),
    ]
    if config.compresses(layer):
        part = bounded.produced(layer, call)
        if part.stop > part.start:
            rules += [
                within("latent", rows.latents[:, part], GROUP_AXES),
                within("compressed_rows", rows.compressed_rows[:, part], GROUP_AXES),
                within("index_keys", rows.index_keys[:, part], GROUP_AXES),
            ]
    if config.ratio(layer) and config.indexes(layer) and bounded.rows_after(layer, call):
        low, high, scores = bounded.restricted(layer, call)
        visible = indexer.visibility(config, layer, rows.positions[:, span], low.shape[-1])
        rules += [
            within("index_q", rows.index_queries[:, span], ("request", "position", "index head", "feature")),
            within("index_weights", rows.index_weights[:, span], ("request", "position", "index head")),
            replace(
                within("index_score", scores, ("request", "position", "compressed position")),
                dtype=deviations.score_format().name,
            ),
            Selection(
                "selected",
                low,
                high,
                visible,
                config.index_topk,
                ("request", "position"),
                _recorded(trace, layer, call, "selected", reading),
            ),
        ]
    return rules


def state_rules(trace: RecordedCalls, rows: LayerRows, layer: int) -> Sequence[Expectation]:
    """What is kept after the last call: the ring slot by slot and, for sources, the caches and the carry."""
    config = rows.config
    held = ring_positions(trace.total, config.window_size)
    kept = rows.window_rows[:, np.maximum(held, 0)].scaled(np.where(held >= 0, 1.0, 0.0)[None, :, None])
    rules: list[Expectation] = [
        Within("window", kept, "BF16", ("request", "slot", "feature"), recorded=trace.state(layer, "window"))
    ]
    if config.compresses(layer):
        rules += [
            Within("compressed", rows.compressed_rows, "BF16", GROUP_AXES, recorded=trace.state(layer, "compressed")),
            Within("index_keys", rows.index_keys, "BF16", GROUP_AXES, recorded=trace.state(layer, "index_keys")),
        ]
        rules += carry_rules(trace, rows, layer)
    return rules
