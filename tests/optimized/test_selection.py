"""The exact top-k of several programs, against a stable sort."""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED

# ruff: isort: split
import pytest
import torch

from optimized import selection

GENERATOR = torch.Generator().manual_seed(11)


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and shares, so that a few hundred scores are walked by several programs of two tiles each."""
    monkeypatch.setattr(selection, "TILE", 64)
    monkeypatch.setattr(selection, "SMALLEST_TILE", 16)
    monkeypatch.setattr(selection, "LARGEST_SHARE", 128)


def sorted_positions(scores: torch.Tensor, wanted: int, visible: torch.Tensor) -> torch.Tensor:
    """By torch.sort: NaN first, equal scores in their order, -0 equal to +0."""
    rows = []
    for row, limit in zip(scores, visible.tolist(), strict=True):
        order = torch.sort(row.float(), descending=True, stable=True).indices[:wanted]
        chosen = order.sort().values
        chosen = torch.where(chosen < limit, chosen, -1)
        rows.append(torch.nn.functional.pad(chosen, (0, wanted - len(chosen)), value=-1).int())
    return torch.stack(rows)


def adversarial(count: int) -> torch.Tensor:
    """Random, two values, all equal, all NaN, some NaN, signed zeros, infinities, mostly -inf, a boundary at a tile."""
    place = torch.arange(count)
    scores = torch.randn(9, count, generator=GENERATOR).bfloat16()
    scores[1] = torch.randint(0, 2, (count,), generator=GENERATOR).bfloat16()
    scores[2] = 1.5
    scores[3] = float("nan")
    scores[4, ::7] = float("nan")
    scores[5] = torch.where(place % 2 == 0, -0.0, 0.0)
    scores[6, ::5] = float("inf")
    scores[6, 1::5] = float("-inf")
    scores[7, 3:] = float("-inf")
    # Equal scores on both sides of every boundary of tiles and of programs, better ones behind them.
    scores[8] = torch.where((place % 64 == 63) | (place % 64 == 0), 2.0, 1.0)
    scores[8, -1:] = 3.0
    return scores


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (333, 7), (333, 333), (333, 340), (333, 25)])
def test_selection_is_exact_with_the_stated_ties(count: int, wanted: int, many_programs: None) -> None:
    scores = adversarial(count)
    assert count == 1 or selection.shares(len(scores), count)[0] > 2
    visible = torch.tensor([count, count, count // 2, *[count] * 6])
    found = selection.best_positions(scores[None].to(DEVICE), wanted, visible[None].to(DEVICE))[0].cpu()
    assert torch.equal(found, sorted_positions(scores, wanted, visible))


@pytest.mark.parametrize("exist", [0, 1, 31, 64, 200])
def test_what_does_not_exist_is_not_looked_at(exist: int, many_programs: None) -> None:
    """Fewer scores than are wanted, behind them what an earlier call left there."""
    scores = torch.randn(1, 1, 333, generator=GENERATOR).bfloat16()
    expected = torch.full((40,), -1, dtype=torch.int32)
    best = sorted_positions(scores[0, :, :exist], min(40, exist), torch.tensor([exist]))[0]
    expected[: len(best)] = best
    scores[..., exist:] = float("inf")
    number = torch.tensor([[exist]]).to(DEVICE)
    found = selection.best_positions(scores.to(DEVICE), 40, number, number)
    assert torch.equal(found[0, 0].cpu(), expected)


def test_scores_of_listed_blocks_stand_for_their_positions(many_programs: None) -> None:
    blocks = torch.arange(3, 103, 2, dtype=torch.int32)
    blocks[45:] = -1
    scores = torch.randn(200, generator=GENERATOR).bfloat16()
    scores[180:] = float("-inf")
    positions = (blocks[:, None] * 4 + torch.arange(4)).flatten()
    visible = int(positions[175])
    best = torch.sort(scores.float(), descending=True, stable=True).indices[:190].sort().values
    chosen = torch.where((positions[best] >= 0) & (positions[best] < visible), positions[best], -1)
    found = selection.best_positions(
        scores[None].to(DEVICE),
        190,
        torch.tensor([visible]).to(DEVICE),
        listed=selection.Listed(blocks[None].to(DEVICE), 4),
    )
    assert torch.equal(found[0].cpu(), chosen.int())


def test_a_million_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best are planted across programs; ties at the boundary go to the earliest."""
    if INTERPRETED:
        monkeypatch.setattr(selection, "TILE", 1 << 17)
        monkeypatch.setattr(selection, "LARGEST_SHARE", 1 << 18)
    count, wanted = 2**20, 8
    assert selection.shares(1, count)[0] >= 4
    scores = torch.zeros(1, 1, count, dtype=torch.bfloat16)
    planted = torch.tensor([0, 65_535, 65_536, 777_777, count - 1])
    scores[0, 0, planted] = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]).bfloat16()
    found = selection.best_positions(scores.to(DEVICE), wanted, torch.tensor([[count]]).to(DEVICE))
    assert found[0, 0].tolist() == sorted([*planted.tolist(), 1, 2, 3])


def test_what_must_be_above_minus_infinity() -> None:
    scores = torch.tensor([[[1.0, float("-inf"), 2.0, float("nan")]]]).bfloat16().to(DEVICE)
    every = torch.tensor([[4]]).to(DEVICE)
    assert selection.best_positions(scores, 4, every, ordered=True).tolist() == [[[0, -1, 2, -1]]]
    assert selection.best_positions(scores, 4, every).tolist() == [[[0, 1, 2, 3]]]
