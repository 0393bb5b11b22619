"""The candidate mask of the candidate source layer (numerics.md 6.3, level one)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Trace, exact, int64
from conformance.judge.choices import CandidateBlocks
from conformance.judge.components.indexer import visible_counts
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


FLAGS: Mapping[str, tuple[str, ...]] = {
    "fewer-blocks-than-kept": ("hidden-blocks-kept", "mask-of-positions"),
    "newest-block-partly-filled": ("newest-block-not-pinned", "pinned-in-addition", "mask-of-positions", "block-mean"),
    "newest-block-full": ("pinned-block-of-next-position", "newest-block-not-pinned", "candidate-count"),
}
"""The mistakes that each situation reveals."""


def cases(model: GoldenModel, traces: list[Trace]) -> Iterator[Case]:
    """Recorded scores sorted by the state of the newest block and by whether blocks have to go."""
    config = model.config
    size, kept = config.candidate_block_size, config.candidate_topk_blocks
    if config.candidate_source_layer < 0:
        return
    situations: dict[str, tuple[str, Callable[[Ints], Bools]]] = {
        "fewer-blocks-than-kept": (
            "Fails when blocks that hold nothing visible are kept to fill up.",
            lambda seen: (seen + size - 1) // size <= kept,
        ),
        "newest-block-partly-filled": (
            "Fails when the newest block is not pinned, or its positions that are not visible yet leave the mask.",
            lambda seen: ((seen + size - 1) // size > kept) & (seen % size != 0),
        ),
        "newest-block-full": (
            "Fails when the block after the newest one is pinned instead.",
            lambda seen: ((seen + size - 1) // size > kept) & (seen % size == 0),
        ),
    }
    for name, (why, chosen) in situations.items():
        if not any(True for _ in _masks(model, traces, chosen)):
            continue
        yield Case(
            f"candidates/mask/{name}",
            "smoke" if name == "newest-block-partly-filled" else "core",
            "choice",
            why,
            "numerics.md 6.3",
            partial(_masks, model, traces, chosen),
            flags=FLAGS[name],
            source=f"{model.name}/all scenarios",
        )


def _masks(model: GoldenModel, traces: list[Trace], chosen: Callable[[Ints], Bools]) -> Iterator[Step]:
    config = model.config
    layer = config.candidate_source_layer
    for trace in traces:
        for call in range(len(trace.starts)):
            if not (trace.scenario.has(call, "candidates", layer) and trace.scenario.has(call, "index_score", layer)):
                continue
            positions = trace.positions[:, list(trace.span(call))]
            queries = np.flatnonzero(chosen(visible_counts(config, layer, positions[0])))
            if not queries.size:
                continue
            scores = trace.scenario.tap(call, "index_score", layer)[:, queries]
            recorded = trace.scenario.tap(call, "candidates", layer)[:, queries]
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "scores": scores,
                "positions": int64(positions[:, queries]),
            }

            def rules(
                scores: Tensor = scores, recorded: Tensor = recorded, seen: Ints = positions[:, queries]
            ) -> list[CandidateBlocks]:
                return [
                    CandidateBlocks(
                        "candidates",
                        exact(scores),
                        visible_counts(config, layer, seen),
                        config.candidate_block_size,
                        config.candidate_topk_blocks,
                        ("request", "position"),
                        recorded,
                    )
                ]

            place = Place(layer, [f"{trace.name}/{call}"], positions[0, queries].tolist())
            yield Step(Call("candidate_mask", arguments), rules, place)
