"""Consecutive blocks that run freely from one recorded residual (numerics.md 5 and 6.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from conformance.cases.attention import readings_differ
from conformance.cases.behaviours import named
from conformance.cases.block import PER_STREAM, STREAM_AXES
from conformance.cases.case import Advance, Case, Handle, Open, Step
from conformance.cases.traces import GoldenModel, Trace
from conformance.judge.expectations import Expectation
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated


def cases(model: GoldenModel, traces: list[Trace], floors: Floors) -> Iterator[Case]:
    """Each source with the layers that read it: the shortest stacks in which nothing is missing."""
    for layers in segments(model):
        for name, trace in named(traces).items():
            case_id = f"stack/source-before-reuse-layers-{layers[0]}-{layers[-1]}/{name}"
            yield Case(
                case_id,
                "core",
                "propagated",
                "Fails when a layer reads slots before its source has written them, or the mix is not handed on.",
                "numerics.md 6.1",
                partial(_steps, model, trace, layers, floors, case_id),
                flags=("source-after-reuse", "layer-order", "layer-left-out", "mix-ignored", "gate-image-bias"),
                source=trace.source,
                reading="intended" if readings_differ(model, trace, layers) else None,
            )


def segments(model: GoldenModel) -> list[list[int]]:
    """The layers split before every source of compressed rows."""
    starts = sorted({0, *model.config.kv_source_layers})
    ends = [*starts[1:], model.config.n_layers]
    return [list(range(start, end)) for start, end in zip(starts, ends, strict=True) if end > start]


def _steps(model: GoldenModel, trace: Trace, layers: list[int], floors: Floors, case_id: str) -> Iterator[Step]:
    shared = {"config": model.mapping, "batch_size": trace.batch}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "layer_ids": layers,
        "weights": model.parameters.mapping(),
        "runtime": Handle("runtime"),
        "token_map": model.token_map,
    }
    yield Step(Open("stack", "stack", arguments))
    for call in range(len(trace.starts)):
        span = slice(trace.starts[call], trace.starts[call] + trace.lengths[call])
        inputs = {
            "h": trace.block_input(layers[0])[:, span],
            "pre": trace.part(call, "pre_in", layers[0]),
            "input_ids": trace.part(call, "input_ids"),
            "start_pos": trace.start_pos(call),
            "image_mask": trace.mask_part(call),
        }
        rules = partial(_rules, trace, layers[-1], call, floors, case_id)
        yield Step(Advance("stack", inputs), rules, trace.place(layers[-1], call))


def _rules(trace: Trace, layer: int, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    return [
        Propagated(tap, trace.part(call, tap, layer), floors.allowance(case_id, tap), floors.describe(), axes)
        for tap, axes in (("h_out", STREAM_AXES), ("pre_out", PER_STREAM))
    ]
