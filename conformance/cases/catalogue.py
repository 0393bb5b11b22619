"""The whole catalogue of a run: every case that the loaded fixtures give rise to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from conformance.cases import (
    attention,
    block,
    candidates,
    compressor,
    draft_view,
    dspark,
    engram,
    experts,
    gate,
    hyper_connections,
    indexer,
    linear,
    model,
    moe,
    norm,
    quantize,
    released,
    roll_back,
    rotary,
    sampling,
    serving,
    serving_model,
    sparse_attention,
    stack,
    vision,
    window,
)
from conformance.cases.case import Case
from conformance.cases.noise_floors import floors_of, recipe_floors
from conformance.cases.traces import GoldenModel, Joined
from conformance.cases.vectors import (
    attention as attention_vectors,
    candidates as candidates_vectors,
    compressor as compressor_vectors,
    draws as draws_vectors,
    dspark as dspark_vectors,
    engram as engram_vectors,
    experts as experts_vectors,
    gate as gate_vectors,
    hyper_connections as hyper_connections_vectors,
    images as images_vectors,
    indexer as indexer_vectors,
    linear as linear_vectors,
    model as model_vectors,
    norm as norm_vectors,
    quantize as quantize_vectors,
    rotary as rotary_vectors,
    sampling as sampling_vectors,
    serving as serving_vectors,
    sparse_attention as sparse_attention_vectors,
    vision as vision_vectors,
    window as window_vectors,
)
from conformance.fixtures import Fixtures
from conformance.interface import COMPONENTS
from conformance.judge.noise import Floors

VECTORS = (
    quantize_vectors,
    linear_vectors,
    norm_vectors,
    rotary_vectors,
    hyper_connections_vectors,
    window_vectors,
    compressor_vectors,
    indexer_vectors,
    candidates_vectors,
    sparse_attention_vectors,
    attention_vectors,
    gate_vectors,
    experts_vectors,
    engram_vectors,
    model_vectors,
    dspark_vectors,
    vision_vectors,
    images_vectors,
    sampling_vectors,
    draws_vectors,
    serving_vectors,
)
"""The hand-made vectors, which need no fixtures."""


def catalogue(fixtures: Fixtures) -> Sequence[Case]:
    """All cases in the order in which they are run and shown: by component, lattices first, then by id.

    A lattice allows no error at all: where one fails, no bound of a later case needs to be looked at.
    """
    result: list[Case] = []
    models = [name for name in fixtures.sets if fixtures.kind(name) == "model"]
    for name in fixtures.sets:
        if name in models:
            golden = GoldenModel(fixtures.model(name))
            found = cases_of(golden, floors_of(fixtures, golden))
            # Ids are immutable and name no set; where a directory holds several models, those after the first say so.
            result += found if name == models[0] else [replace(case, id=f"{case.id}@{name}") for case in found]
        else:
            result += released.cases(fixtures.recipe(name), recipe_floors(fixtures, name))
    for component in VECTORS:
        result += component.cases()
    return sorted(result, key=lambda case: (COMPONENTS.index(case.component), "/lattice-" not in case.id, case.id))


def cases_of(golden: GoldenModel, floors: Floors) -> list[Case]:
    """The cases of one golden model."""
    return list(_cases_of(golden, floors))


def _cases_of(golden: GoldenModel, floors: Floors) -> Iterator[Case]:
    full = [trace for trace in golden.traces if trace.has("attn_in", 0)]
    joined = Joined(full)
    images = [trace for trace in full if trace.image_mask is not None]
    yield from quantize.cases(golden, joined)
    yield from linear.cases(golden, joined)
    yield from norm.cases(golden, joined)
    yield from rotary.cases(golden, joined)
    yield from hyper_connections.cases(golden, joined)
    yield from window.cases(golden, joined)
    yield from compressor.cases(golden, full)
    yield from indexer.cases(golden, golden.traces, full, joined)
    yield from candidates.cases(golden, golden.traces)
    yield from sparse_attention.cases(golden, full)
    yield from attention.cases(golden, full, joined)
    yield from gate.cases(golden, joined, Joined(images) if images else None)
    yield from experts.cases(golden, joined)
    yield from moe.cases(golden, joined)
    yield from engram.cases(golden, full, golden.traces)
    yield from block.cases(golden, full, floors)
    yield from stack.cases(golden, full, floors)
    if not golden.whole:
        return
    yield from model.cases(golden, golden.traces, joined, floors)
    drafts = draft_view.drafting(golden)
    if drafts:
        yield from draft_view.cases(golden, drafts)
        yield from dspark.cases(golden, drafts, floors)
        yield from roll_back.cases(golden, full, drafts, floors)
    yield from vision.cases(golden, images, floors)
    yield from serving.cases(golden, full)
    yield from serving_model.cases(golden, golden.traces, floors)
    yield from sampling.cases(golden, golden.traces)
