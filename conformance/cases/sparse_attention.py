"""Sparse attention over recorded rows (numerics.md 6, item 5)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.behaviours import named
from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import GoldenModel, Trace, bf16, exact
from conformance.judge.bounded import Bounded
from conformance.judge.components.attention import queries
from conformance.judge.components.sparse_attention import attend, counts_of
from conformance.judge.components.window import window_mask
from conformance.judge.expectations import Within
from conformance.tensors import Tensor, concatenate

Ints = npt.NDArray[np.int64]
AXES = ("request", "position", "head", "feature")


def cases(model: GoldenModel, traces: list[Trace]) -> Iterator[Case]:
    """One layer of every attention role, on lists in the published order."""
    config = model.config
    layers = {config.role(layer): layer for layer in reversed(range(config.n_layers))}
    for name, trace in named(traces).items():
        yield Case(
            f"sparse_attention/sink-and-listed-rows/{name}",
            "smoke" if name == "prefill-several-windows" else "core",
            "composed",
            "Fails when the sink adds a value or is scaled, -1 is read as a row, or probabilities are normalised late.",
            "numerics.md 6, item 5",
            partial(_steps, model, trace, sorted(layers.values())),
            flags=(
                "sink-missing",
                "sink-of-first-head",
                "minus-one-read-as-row",
                "scale-wrong",
                "requests-mixed",
                "bf16-truncated",
            ),
            source=trace.source,
        )


def listed_rows(model: GoldenModel, trace: Trace, layer: int, call: int) -> tuple[Tensor, Ints]:
    """Rows [B,N,d] and the list [B,T,n] of a call: window rows by position, then compressed rows of the source."""
    config = model.config
    span = trace.span(call)
    rows = [trace.joined("window_rows", layer)[:, : span.stop]]
    positions = trace.positions[:, list(span)]
    seen = window_mask(positions, span.stop, config.window_size)
    width = min(span.stop, config.window_size)
    order = np.argsort(~seen, axis=-1, kind="stable")[..., :width]
    lists = [np.where(np.take_along_axis(seen, order, -1), order, -1)]
    if config.ratio(layer) and span.stop // config.ratio(layer):
        count = span.stop // config.ratio(layer)
        rows.append(trace.produced("compressed_rows", config.kv_source(layer))[:, :count])
        selected = trace.scenario.tap(call, "selected", config.index_source(layer)).data.astype(np.int64)
        lists.append(np.where(selected >= 0, selected + span.stop, -1))
    return concatenate(rows, axis=1), np.concatenate(lists, -1)


def _steps(model: GoldenModel, trace: Trace, layers: list[int]) -> Iterator[Step]:
    config = model.config
    for layer in layers:
        weights = model.layer(layer).within("attn.")
        for call in range(len(trace.starts)):
            positions = trace.positions[:, list(trace.span(call))]
            recorded = trace.scenario.has(call, "attn_q", layer)
            if recorded:
                q = trace.scenario.tap(call, "attn_q", layer)
            else:
                q = bf16(queries(config, layer, weights, exact(trace.part(call, "q_latent", layer)), positions))
            kv, indices = listed_rows(model, trace, layer, call)
            # In a decode step the recorded list numbers the ring's slots, not the rows given here.
            if not trace.starts[call] and trace.scenario.has(call, "attn_list", layer):
                indices = trace.scenario.tap(call, "attn_list", layer).data.astype(np.int64)
            sink = weights.tensor("attn_sink")
            scale = config.head_dim**-0.5
            arguments = {
                "q": q,
                "kv": kv,
                "indices": Tensor("I32", indices.astype(np.int32)),
                "sink": sink,
                "scale": scale,
            }

            def rules(
                q: Tensor = q, kv: Tensor = kv, indices: Ints = indices, layer: int = layer, call: int = call
            ) -> list[Within]:
                sink = model.layer(layer)["attn.attn_sink"]
                counts = counts_of(indices, kv.shape[1])
                expected = attend(exact(q), Bounded.exact(kv.values()), counts, None, sink, config.head_dim**-0.5)
                golden = None
                if trace.scenario.has(call, "attn_q", layer):
                    golden = trace.scenario.tap(call, "attn_o", layer)
                return [Within("attn_o", expected, "BF16", AXES, recorded=golden)]

            yield Step(Call("sparse_attention", arguments), rules, trace.place(layer, call))
