"""Work that is shared between programs gives what one program gives: splits of a sum or a list, tiles of rows."""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
import numpy as np
import pytest
import torch

from conformance.config import ModelConfig
from conformance.fixtures import Fixtures
from conformance.judge.components import engram as judged
from optimized import engram, linear, sparse_attention
from optimized.config import Config
from optimized.expert_tiles import TILES, RowTiles, tiles_for
from optimized.output_projection import project_turned_back
from optimized.rotary import rotate_at

GENERATOR = torch.Generator().manual_seed(11)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).bfloat16().to(DEVICE)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("precise", [False, True])
def test_a_split_sum_is_the_sum(splits: int, precise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers: every partial sum is exact, so that order cannot matter and a lost part must show."""
    x = torch.randint(-8, 9, (5, 1056), generator=GENERATOR).bfloat16().to(DEVICE)
    weight = torch.randint(-8, 9, (40, 1056), generator=GENERATOR).bfloat16().to(DEVICE)
    product = linear.linear_fp32 if precise else linear.linear_bf16
    weight = weight.float() if precise else weight
    monkeypatch.setattr(linear.Tiles, "splits", lambda *_: splits)
    expected = x.float() @ weight.float().T
    assert torch.equal(product(x, weight).float(), expected if precise else expected.bfloat16().float())


@pytest.mark.parametrize("splits", [2, 5])
def test_split_fp4_products_are_the_unsplit_ones(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-8, 9, (3, 672), generator=GENERATOR).bfloat16().to(DEVICE)
    weight = torch.randint(0, 256, (24, 336), generator=GENERATOR).to(torch.uint8).to(DEVICE)
    scale = torch.randint(125, 130, (24, 21), generator=GENERATOR).to(torch.uint8).to(DEVICE)
    whole = linear.linear_fp4(x, weight, scale)
    monkeypatch.setattr(linear.Tiles, "splits", lambda *_: splits)
    assert torch.equal(linear.linear_fp4(x, weight, scale), whole)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_a_projection_of_ones_shows_what_is_turned_back(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, features and outputs than a tile holds; tiles of inputs begin within heads; a matrix a group."""
    heads, width, turning, groups = 6, 96, 16, 2
    o, places = random(2, 70, heads, width), torch.randint(0, 40, (2, 70), generator=GENERATOR).to(DEVICE)
    angles = torch.rand(40, turning // 2, generator=GENERATOR, dtype=torch.float64) * 6
    tables = angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)
    one = torch.eye(heads // groups * width, dtype=torch.bfloat16, device=DEVICE)
    monkeypatch.setattr(linear.Tiles, "splits", lambda *_: splits)
    # Every other product is zero, so that no order of sums matters.
    found = project_turned_back(o, *tables, places, torch.cat([one, one.flip(0)]), groups)
    first, second = rotate_at(o, *tables, places, inverse=True).flatten(-2).chunk(groups, dim=-1)
    assert torch.equal(found, torch.cat([first, second.flip(-1)], dim=-1))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    "counts",
    [[1], [16], [17], [200], [0, 0, 40, 0], [64, 0, 65, 1], [1, 1, 1, 129], [17, 17, 17, 17], [3, 0, 0, 0]],
    ids=lambda counts: "-".join(map(str, counts)),
)
def test_every_row_lies_in_one_tile_of_its_expert(counts: list[int], rows: int) -> None:
    place = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    place = place[torch.randperm(len(place), generator=GENERATOR)].unsqueeze(1).int().to(DEVICE)
    cut = RowTiles.of(place, len(counts), rows)
    covered = []
    for expert, start, end in zip(cut.experts.tolist(), cut.starts.tolist(), cut.ends.tolist(), strict=True):
        slots = cut.order[start : min(start + rows, end)].tolist()
        assert {int(place[slot]) for slot in slots} <= {expert}
        covered += slots
    assert sorted(covered) == list(range(len(place)))


@pytest.mark.parametrize("rows", [16, 64])
def test_no_more_programs_than_tiles_where_the_worst_comes(rows: int) -> None:
    """All rows to one expert, and one row to each but the first."""
    for counts in ([5 * rows + 1], [2 * rows + 1, 1, 1]):
        place = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).unsqueeze(1).int().to(DEVICE)
        cut = RowTiles.of(place, len(counts), rows)
        assert bool((cut.starts < cut.ends).all())
        assert len(cut.starts) == sum(-(-count // rows) for count in counts)


def test_tiles_of_experts_follow_the_mean() -> None:
    few, many = TILES
    assert few.rows < many.rows
    assert [tiles_for(rows, 384) for rows in (1, 384, 16 * 384, 16 * 384 + 1)] == [few, few, few, many]


def attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one request in float64: the result, and the same sum of magnitudes."""
    rows = kv[indices.clamp(min=0).long()].double()
    scores = torch.einsum("thd,tnd->thn", q.double(), rows) * scale
    weights = scores.exp() * (indices >= 0)[:, None, :]
    weights = weights / (weights.sum(-1, keepdim=True) + sink.double().exp()[None, :, None])
    return weights @ rows, weights @ rows.abs()


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_a_split_list_is_attended_as_a_whole(splits: int) -> None:
    """-1 anywhere, a part without any row, a query without any, and a sink that outweighs the rows."""
    q, kv, sink = random(1, 4, 8, 64), random(1, 300, 64), 4 * random(8).float()
    indices = torch.randint(0, 300, (1, 4, 450), generator=GENERATOR, dtype=torch.int32).to(DEVICE)
    indices[0, 0, ::3] = -1
    indices[0, 1, :200] = -1
    indices[0, 2, 70:] = -1
    indices[0, 3] = -1
    found = sparse_attention.sparse_attention(q, kv, indices, sink, 0.125, splits=splits)[0].double()
    expected, magnitude = attention(q[0], kv[0], indices[0], sink, 0.125)
    # Probabilities and the result are rounded to bf16, half an ulp each; the scores' fp32 sums of 64 products of
    # magnitudes below 16 move an exponential by less than 2^-13.
    assert ((found - expected).abs() <= (2.0**-9 + 2.0**-9 + 2.0**-13) * magnitude).all()
    assert not found[3].any()
    assert found[:3].abs().amax(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("name", ["tiny", "released"])
def test_engram_layout_is_the_judges(name: str) -> None:
    fixtures = Fixtures.open(None)
    mapping = dict(fixtures.model("tiny").config)
    if name == "released":
        mapping |= {"engram_vocab_size": 1_000_003, "engram_n_heads": 8, "engram_max_ngram_size": 4}
    own, theirs = Config.from_mapping(mapping), ModelConfig.from_mapping(mapping, name)
    multipliers, primes, offsets = engram.engram_layout(own)
    assert torch.equal(primes, torch.from_numpy(np.asarray(judged.primes(theirs))))
    assert torch.equal(offsets, torch.from_numpy(np.asarray(judged.offsets(theirs))))
    for row, layer in zip(multipliers, own.engram_layer_ids, strict=True):
        assert torch.equal(row, torch.from_numpy(np.asarray(judged.multipliers(theirs, layer))))
