"""Scores of packed keys in pieces give the selections that dense scores of unpacked keys give."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.fixtures import Fixtures
from optimized import scoring, selection
from optimized.candidates import candidate_mask
from optimized.config import Config
from optimized.indexer import index_scores, select_positions
from optimized.quantize import fake_quantize_fp4_e8m0, quantize_fp4_e8m0
from optimized.rows import index_key_format
from optimized.runtime import Batch, Runtime
from optimized.scoring import Asked

CONFIG = replace(
    Config.from_mapping(Fixtures.open(None).model("tiny").config),
    index_head_dim=64,
    index_topk=24,
    candidate_topk_blocks=12,
    candidate_block_size=4,
)
SOURCE = CONFIG.candidate_source_layer
RESTRICTED = next(layer for layer in CONFIG.index_source_layers if CONFIG.uses_candidates(layer))
SLOTS, LENGTH, CAPACITY = (2, 0), 3, 150
STARTS = (146, 39)
TOKENS = len(SLOTS) * LENGTH


def bf16(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).bfloat16().to(DEVICE)


class Server:
    """Two requests at different positions, their keys in slots 2 and 0 of three."""

    def __init__(self, config: Config, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        assert SOURCE is not None
        self.runtime = Runtime(config, 3, CAPACITY, TOKENS, layer_ids=[SOURCE, RESTRICTED])
        self.batch: Batch = self.runtime.begin(SLOTS, STARTS, LENGTH)
        keys = bf16(generator, 3, CAPACITY, config.index_head_dim)
        self.keys = fake_quantize_fp4_e8m0(keys)
        codes, scales = quantize_fp4_e8m0(keys)
        held = self.runtime.layers[SOURCE].index_keys
        assert held is not None
        held.copy_(torch.cat((codes, scales.view(torch.uint8)), dim=-1))
        self.generator = generator

    def ask(self, monkeypatch: pytest.MonkeyPatch, layer_id: int) -> torch.Tensor:
        """Publish the selection of random queries, and return the dense scores of each token, not yet restricted."""
        config, heads = self.config, self.config.index_n_heads
        queries = fake_quantize_fp4_e8m0(bf16(self.generator, TOKENS, heads, config.index_head_dim))
        weights = bf16(self.generator, TOKENS, heads)
        visible = (self.batch.positions.flatten() + 1) // config.ratio(layer_id)
        monkeypatch.setattr(scoring, "ask", lambda *_: Asked(queries, weights, visible, LENGTH))
        nothing: Any = None
        scoring.publish_selection(config, layer_id, {}, self.runtime, self.batch, nothing, nothing)
        batched = (queries.view(2, LENGTH, heads, -1), weights.view(2, LENGTH, heads))
        slots = torch.tensor(SLOTS)
        return index_scores(config, layer_id, *batched, self.keys[slots], self.batch.positions, None)

    def by_request(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(2, LENGTH, -1)


@pytest.fixture(params=[1 << 27, 2 * 2 * CAPACITY], ids=["at-once", "two-queries-at-a-time"])
def bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SCORE_BYTES", request.param)
    monkeypatch.setattr(scoring, "POSITION_BLOCK", 64)
    monkeypatch.setattr(selection, "LARGEST_SHARE", 64)
    monkeypatch.setattr(selection, "TILE", 64)
    monkeypatch.setattr(selection, "SMALLEST_TILE", 16)


def test_a_source_publishes_what_dense_scores_select(bounded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(CONFIG, 3)
    dense = server.ask(monkeypatch, SOURCE)
    expected = select_positions(CONFIG, SOURCE, dense, server.batch.positions)
    assert torch.equal(server.by_request(server.runtime.selected), expected)
    mask = candidate_mask(CONFIG, SOURCE, dense, server.batch.positions)
    for listed, kept in zip(server.runtime.candidates, mask.flatten(0, 1), strict=True):
        blocks = kept.nonzero().flatten().div(CONFIG.candidate_block_size, rounding_mode="floor").unique().int()
        assert torch.equal(listed[listed >= 0], blocks)
    assert (server.runtime.candidates < 0).any(), "a request with fewer blocks than are kept"


def test_a_restricted_layer_selects_among_the_candidates(bounded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(CONFIG, 4)
    mask = candidate_mask(CONFIG, SOURCE, server.ask(monkeypatch, SOURCE), server.batch.positions)
    dense = server.ask(monkeypatch, RESTRICTED).masked_fill(~mask, -torch.inf)
    expected = select_positions(CONFIG, RESTRICTED, dense, server.batch.positions)
    assert torch.equal(server.by_request(server.runtime.selected), expected)


def test_too_few_candidates_leave_places_empty(bounded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the specification leaves open (candidate-shortfall): nothing is selected from outside the candidates."""
    config = replace(CONFIG, candidate_topk_blocks=3)
    server = Server(config, 5)
    mask = candidate_mask(config, SOURCE, server.ask(monkeypatch, SOURCE), server.batch.positions)
    server.ask(monkeypatch, RESTRICTED)
    for selected, kept, position in zip(
        server.runtime.selected, mask.flatten(0, 1), server.batch.positions.flatten(), strict=True
    ):
        visible = kept.nonzero().flatten()
        assert selected[selected >= 0].tolist() == visible[visible <= position].tolist()
        assert (selected[len(selected[selected >= 0]) :] == -1).all()


class NoKernel:
    """In place of a kernel: nothing is computed, only the grids are kept."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


@pytest.mark.parametrize(("tokens", "positions"), [(4096, 65_536), (3, 1 << 20)], ids=["prefill", "decode"])
def test_memory_does_not_grow_with_queries_times_positions(
    tokens: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = NoKernel()
    monkeypatch.setattr(scoring, "_packed_scores_kernel", kernel)
    form = index_key_format(CONFIG)
    asked = Asked(
        torch.empty(tokens, 4, form.width, dtype=torch.bfloat16, device=DEVICE),
        torch.empty(tokens, 4, dtype=torch.bfloat16, device=DEVICE),
        torch.full((tokens,), positions, dtype=torch.int64, device=DEVICE),
        tokens,
    )
    keys = torch.empty(1, positions, form.bytes, dtype=torch.uint8, device=DEVICE)
    parts = list(scoring.packed_scores(asked, form, keys, torch.zeros(1, dtype=torch.int64, device=DEVICE), None))
    taken = [query for part in parts for query in range(part.queries.start, part.queries.stop)]
    assert taken == list(range(tokens))
    assert {part.scores.untyped_storage().data_ptr() for part in parts} == {parts[0].scores.data_ptr()}
    assert parts[0].scores.untyped_storage().nbytes() <= scoring.SCORE_BYTES
    assert [grid[0] for grid in kernel.grids] == [part.queries.stop - part.queries.start for part in parts]
