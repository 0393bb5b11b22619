"""Work that is shared between programs gives what one program gives: splits of a sum or a list, blocks of positions."""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED

# ruff: isort: split
import numpy as np
import pytest
import torch

from conformance.config import ModelConfig
from conformance.fixtures import Fixtures
from conformance.judge.components import engram as judged
from optimized import engram, linear, selection, sparse_attention
from optimized.config import Config

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


def expected_positions(scores: torch.Tensor, wanted: int, visible: torch.Tensor) -> torch.Tensor:
    """By a stable sort in float64, NaN first; -0 equals +0."""
    keys = torch.where(scores.isnan(), torch.tensor(float("inf")).double(), scores.double())
    nan_first = torch.where(scores.isnan(), 0, 1)
    rows = []
    for key, first, limit in zip(keys, nan_first, visible.tolist(), strict=True):
        order = np.lexsort((np.arange(len(key)), -key.numpy(), first.numpy()))[:wanted]
        chosen = np.sort(order)
        rows.append(torch.from_numpy(np.where(chosen < limit, chosen, -1)).int())
    return torch.stack(rows)


def rows_of_scores(count: int) -> torch.Tensor:
    """Random, many ties, all equal, all NaN, some NaN, signed zeros, infinities, mostly -inf."""
    scores = torch.randn(8, count, generator=GENERATOR).bfloat16()
    scores[1] = torch.randint(0, 4, (count,), generator=GENERATOR).bfloat16()
    scores[2] = 1.5
    scores[3] = float("nan")
    scores[4, ::7] = float("nan")
    scores[5] = torch.where(torch.arange(count) % 2 == 0, -0.0, 0.0)
    scores[6, ::5] = float("inf")
    scores[6, 1::5] = float("-inf")
    scores[7, 3:] = float("-inf")
    return scores


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (100, 100), (100, 7), (9000, 512)])
def test_selection_is_exact_with_the_stated_ties(count: int, wanted: int) -> None:
    scores = rows_of_scores(count)
    visible = torch.tensor([count, count, count // 2, count, count, count, count, count])
    found = selection.best_positions(scores[None].to(DEVICE), wanted, visible[None].to(DEVICE))[0].cpu()
    # Positions are ascending; those not visible follow from their place, not from their score.
    assert torch.equal(found, expected_positions(scores, wanted, visible))


def test_selection_of_a_million_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best are planted across blocks; ties at the boundary go to the earliest."""
    if INTERPRETED:
        monkeypatch.setattr(selection, "BLOCK", 1 << 16)
    count, wanted = 2**20, 8
    scores = torch.zeros(1, 1, count, dtype=torch.bfloat16)
    planted = torch.tensor([0, 65_535, 65_536, 777_777, count - 1])
    scores[0, 0, planted] = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]).bfloat16()
    found = selection.best_positions(scores.to(DEVICE), wanted, torch.tensor([[count]]).to(DEVICE))
    assert found[0, 0].tolist() == sorted([*planted.tolist(), 1, 2, 3])


def test_marking_leaves_out_what_is_not_there() -> None:
    scores = torch.tensor([[[1.0, float("-inf"), 2.0, float("-inf")]]]).bfloat16().to(DEVICE)
    assert selection.mark_best(scores, 3).tolist() == [[[True, False, True, False]]]
    assert selection.mark_best(scores, 1).tolist() == [[[False, False, True, False]]]


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
