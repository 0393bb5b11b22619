"""Greedy sampling (numerics.md 9)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Trace
from conformance.judge.expectations import Exact
from conformance.tensors import Tensor


def cases(model: GoldenModel, traces: list[Trace]) -> Iterator[Case]:
    """Recorded logits, and a winner in each place where tiled kernels lose it."""
    yield Case(
        "sampling/greedy/trace",
        "smoke",
        "exact",
        "Fails when the arg max is not the largest logit.",
        "numerics.md 9",
        partial(_recorded, traces),
        flags=("argmax-wrong",),
        source=f"{model.name}/all scenarios",
    )
    yield Case(
        "sampling/greedy/every-lane",
        "core",
        "exact",
        "Fails when a tiled arg max answers with the start of a tile, or loses the last partial tile.",
        "numerics.md 9",
        partial(_lanes, model),
        flags=("argmax-tile-start", "argmax-last-tile-lost", "argmax-in-bf16"),
        source=f"{model.name}/configuration",
    )


def _recorded(traces: list[Trace]) -> Iterator[Step]:
    for trace in traces:
        for call in range(len(trace.starts)):
            logits = trace.scenario.tap(call, "logits")
            rules = partial(_exact, trace.scenario.tap(call, "output_ids"))
            yield Step(Call("greedy", {"logits": logits}), rules, Place(None, [f"{trace.name}/{call}"]))


def _lanes(model: GoldenModel) -> Iterator[Step]:
    vocabulary = model.config.vocab_size
    winners = np.unique(np.concatenate([np.arange(0, vocabulary, max(1, vocabulary // 97)), [vocabulary - 1]]))
    logits = np.full((len(winners), vocabulary), -1.0)
    logits[np.arange(len(winners)), winners] = np.nextafter(np.float32(-1.0), np.float32(0.0))
    expected = Tensor("I32", winners.astype(np.int32))
    yield Step(Call("greedy", {"logits": Tensor.from_values(logits, "F32")}), partial(_exact, expected))


def _exact(expected: Tensor) -> list[Exact]:
    return [Exact("output_ids", expected, ("request",))]
