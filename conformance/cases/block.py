"""Whole blocks, each given its recorded residual and the mix of the block before (numerics.md 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from conformance.cases.attention import needed_layers, readings_differ
from conformance.cases.behaviours import named
from conformance.cases.case import Advance, Case, Handle, Open, Place, Step
from conformance.cases.traces import GoldenModel, Trace, exact
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components.hyper_connections import coefficients, read
from conformance.judge.components.norm import rms_norm
from conformance.judge.expectations import Axes, Expectation, Within
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated

Expected = tuple[str, Bounded, str, Axes]
"""A tap, its values, their dtype and axes."""

STREAM_AXES = ("request", "position", "stream", "feature")
PER_STREAM = ("request", "position", "stream")


def cases(model: GoldenModel, traces: list[Trace], floors: Floors) -> Iterator[Case]:
    """Blocks by the role of their attention, through every scenario."""
    roles: dict[str, list[int]] = {}
    for layer in range(model.config.n_layers):
        roles.setdefault(model.config.role(layer), []).append(layer)
    for role, layers in roles.items():
        for name, trace in named(traces).items():
            case_id = f"block/mix-one-sublayer-late-{role}/{name}"
            yield Case(
                case_id,
                "core",
                "propagated",
                "Fails when a sublayer reads with its own mix instead of the previous one's, or Engram comes too late.",
                "numerics.md 5",
                partial(_steps, model, trace, layers, floors, case_id),
                flags=(
                    "mix-not-late",
                    "mix-two-late",
                    "coefficients-not-renewed",
                    "block-norms-swapped",
                    "gate-image-bias",
                ),
                source=trace.source,
                reading="intended" if readings_differ(model, trace, layers) else None,
            )


def _steps(model: GoldenModel, trace: Trace, judged: Sequence[int], floors: Floors, case_id: str) -> Iterator[Step]:
    layers = needed_layers(model, judged, "intended")
    attention_input = cache(partial(_attention_input, model, trace))
    shared = {"config": model.mapping, "batch_size": trace.batch}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    for layer in layers:
        arguments = {
            **shared,
            "layer_id": layer,
            "weights": model.layer(layer).mapping(),
            "runtime": Handle("runtime"),
            "token_map": model.token_map if layer in model.config.engram_layer_ids else None,
        }
        yield Step(Open(f"layer {layer}", "block", arguments), place=Place(layer))
    for call in range(len(trace.starts)):
        span = slice(trace.starts[call], trace.starts[call] + trace.lengths[call])
        for layer in layers:
            inputs = {
                "h": trace.block_input(layer)[:, span],
                "pre": trace.part(call, "pre_in", layer),
                "input_ids": trace.part(call, "input_ids"),
                "start_pos": trace.start_pos(call),
                "image_mask": trace.mask_part(call),
            }
            place = trace.place(layer, call)
            if layer in judged:
                required = partial(_required, trace, layer, call, floors, case_id)
                optional = partial(_optional, trace, attention_input, layer, call)
                yield Step(Advance(f"layer {layer}", inputs), required, place, optional)
            else:
                yield Step(Advance(f"layer {layer}", inputs), place=place)


def _required(trace: Trace, layer: int, call: int, floors: Floors, case_id: str) -> Sequence[Expectation]:
    return [
        Propagated(tap, trace.part(call, tap, layer), floors.allowance(case_id, tap), floors.describe(), axes)
        for tap, axes in (("h_out", STREAM_AXES), ("pre_out", PER_STREAM))
    ]


def _attention_input(model: GoldenModel, trace: Trace, layer: int) -> Sequence[Expected]:
    """What depends on the recorded inputs alone: the attention's coefficients and its input, read with the late mix.

    Over the whole trace, [B,P,...].  With an Engram in front, the coefficients follow from
    the block's own Engram output, which may honestly differ from the recorded one by an ulp: nothing is judged there.
    """
    config, parameters = model.config, model.layer(layer)
    if layer in config.engram_layer_ids:
        return ()
    h = exact(trace.attention_stream(layer))
    found = coefficients(config, h, *(parameters[f"hc_attn_{part}"] for part in ("fn", "scale", "base")))
    mixed = read(h, exact(trace.joined("pre_in", layer))).rounded(BF16)
    attn_in = rms_norm(mixed, parameters["attn_norm.weight"], config.norm_eps)
    return (
        ("attn_pre", found.pre, "F32", PER_STREAM),
        ("attn_post", found.post, "F32", PER_STREAM),
        ("attn_comb", found.comb, "F32", ("request", "position", "summed stream", "written stream")),
        ("attn_in", attn_in, "BF16", ("request", "position", "feature")),
    )


def _optional(
    trace: Trace,
    attention_input: Callable[[int], Sequence[Expected]],
    layer: int,
    call: int,
) -> Sequence[Expectation]:
    span = slice(trace.starts[call], trace.starts[call] + trace.lengths[call])
    return [
        Within(tap, value[:, span], dtype, axes, recorded=trace.part(call, tap, layer))
        for tap, value, dtype, axes in attention_input(layer)
    ]
