"""Compression of the token stream, stateful and row by row (numerics.md 6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.behaviours import named
from conformance.cases.case import Advance, Call, Case, Open, Place, ReadState, Step
from conformance.cases.traces import GoldenModel, RecordedCalls, Trace, exact, int64
from conformance.judge.bounded import Bounded
from conformance.judge.components.compressor import compressed_rows
from conformance.judge.components.teacher_forced import LayerRows
from conformance.judge.expectations import Expectation, NoRows, Within

ROW_AXES = ("request", "group", "feature")


RATIO_1_FLAGS = ("projection-not-rounded", "compressor-norm")
RATIO_N_FLAGS = (
    "leftover-lost",
    "carry-slot-wrong",
    "pool-rounding",
    "pooled-in-bf16",
    "gate-in-bf16",
    "softmax-over-features",
    "compressor-norm",
)


def cases(model: GoldenModel, traces: list[Trace]) -> Iterator[Case]:
    """A stateful compressor through every scenario, by ratio; then the cached rows of recorded latents."""
    by_ratio = _sources_by_ratio(model)
    for name, trace in named(traces).items():
        for ratio, layers in by_ratio.items():
            yield Case(
                f"compressor/carry-ratio-{ratio}/{name}",
                "core",
                "composed",
                "Fails when a prompt's leftover token is lost, a group is pooled in bf16, or a row comes out early.",
                "numerics.md 6.2",
                partial(_stateful, model, trace, layers),
                flags=RATIO_1_FLAGS if ratio == 1 else RATIO_N_FLAGS,
                source=trace.source,
            )
    for ratio, layers in by_ratio.items():
        yield Case(
            f"compressor/row-position-and-scale-format/ratio-{ratio}",
            "smoke",
            "composed",
            "Fails when a row is turned by its group's number or last token, or quantised with the index keys' format.",
            "numerics.md 4 and 6.2",
            partial(_rows, model, traces, layers),
            flags=(
                "row-turned-by-group-number",
                "row-turned-by-last-token",
                "compressed-rotation",
                "compressed-not-quantised",
            ),
            source="/".join((model.name, "all scenarios")),
        )


def _sources_by_ratio(model: GoldenModel) -> dict[int, list[int]]:
    config = model.config
    ratios = sorted({config.ratio(layer) for layer in config.kv_source_layers})
    return {r: [layer for layer in config.kv_source_layers if config.ratio(layer) == r] for r in ratios}


def _stateful(model: GoldenModel, trace: Trace, layers: list[int]) -> Iterator[Step]:
    for layer in layers:
        weights = model.layer(layer).within("attn.")
        rows = LayerRows(model.config, layer, weights, trace.joined("attn_in", layer).values())
        name = f"compressor of layer {layer}"
        arguments = {
            "config": model.mapping,
            "layer_id": layer,
            "weights": weights.mapping(),
            "batch_size": trace.batch,
        }
        yield Step(Open(name, "compressor", arguments), place=Place(layer))
        ratio = model.config.ratio(layer)
        for call, (start, length) in enumerate(zip(trace.starts, trace.lengths, strict=True)):
            part = slice(start // ratio, (start + length) // ratio)
            inputs = {"x": trace.part(call, "attn_in", layer), "start_pos": trace.start_pos(call)}

            def rules(
                part: slice = part, call: int = call, rows: LayerRows = rows, layer: int = layer
            ) -> list[Expectation]:
                if part.start == part.stop:
                    return [NoRows("latent")]
                recorded = trace.scenario.tap(call, "latent", layer)
                return [Within("latent", rows.latents[:, part], "BF16", ROW_AXES, recorded=recorded)]

            yield Step(Advance(name, inputs), rules, Place(layer, [call]))
        if trace.total % ratio:
            yield Step(
                ReadState(name),
                partial(carry_rules, trace, rows, layer),
                Place(layer, [f"state after {len(trace.starts) - 1}"]),
            )


def carry_rules(trace: RecordedCalls, rows: LayerRows, layer: int) -> list[Within]:
    """The carry after the last call: the tokens of the unfinished group, each at slot position mod ratio.

    What the other slots hold is never read: an implementation may keep old values there or clear them.
    """
    kv, gate = rows.carry
    ratio = rows.config.ratio(layer)
    waiting = range(trace.total - trace.total % ratio, trace.total)
    if gate is None or not waiting:
        return []
    axes = ("request", "slot", "feature")
    result = []
    for tap, tokens in (("carry_kv", kv), ("carry_score", gate)):
        value = np.zeros((trace.batch, ratio, kv.shape[-1]))
        error = np.full_like(value, np.inf)
        for position in waiting:
            slot = position % ratio
            value[:, slot], error[:, slot] = tokens.value[:, position], tokens.error[:, position]
        expected = Bounded(value, error)
        result.append(Within(tap, expected, "F32", axes, "dot", recorded=trace.state(layer, tap)))
    return result


def _rows(model: GoldenModel, traces: list[Trace], layers: list[int]) -> Iterator[Step]:
    for layer in layers:
        ratio = model.config.ratio(layer)
        for trace in traces:
            if trace.total < ratio:
                continue
            latent = trace.produced("latent", layer)
            positions = np.broadcast_to(np.arange(latent.shape[1]) * ratio, latent.shape[:2])
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "latent": latent,
                "positions": int64(positions),
            }

            def rules(layer: int = layer, trace: Trace = trace) -> list[Within]:
                latent = trace.produced("latent", layer)
                ratio = model.config.ratio(layer)
                positions = np.broadcast_to(np.arange(latent.shape[1]) * ratio, latent.shape[:2])
                expected = compressed_rows(model.config, layer, exact(latent), positions)
                recorded = trace.produced("compressed_rows", layer)
                return [Within("compressed_rows", expected, "BF16", ROW_AXES, recorded=recorded)]

            yield Step(Call("compressed_rows", arguments), rules, Place(layer, [trace.name]))
