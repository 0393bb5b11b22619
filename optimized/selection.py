"""Exact top-k over bf16 scores, in the order of positions (numerics.md 6.3).

A bf16 score is a 16-bit number, so the k-th largest is found by counting: a histogram of the high bytes, then one of
the low bytes within the boundary's high byte.  Everything above the k-th largest is taken, and of the scores equal to
it the earliest positions: the stated rule for ties.  NaN counts as the largest score, and -0 equals +0.

Several programs share a row, each a run of consecutive tiles.  Each leaves its own histograms, and adds up those of all
others itself: whole numbers, so that the result does not depend on the timing.  From the histograms of the programs
before it a program also knows where its first choice goes, so that the list comes out sorted.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, TARGET_PROGRAMS

# ruff: isort: split
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape

TILE = 4096 if INTERPRETED else 1024
"""Scores that a program looks at a time, where there are so many."""
SMALLEST_TILE = 256
LARGEST_SHARE = 1 << 14
"""Scores that a program walks, where rows are few enough for more programs to help."""
HISTOGRAMS = 16
"""Histograms that a program adds up a time."""
KEY_OF_MINUS_INFINITY = tl.constexpr(0x7F)
KEY_OF_NAN = tl.constexpr(0xFFFF)


@triton.jit
def ordered_key(score):
    """bf16 -> int32 0...65535 in the order of the values."""
    bits = score.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    key = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where((bits & 0x7FFF) > 0x7F80, KEY_OF_NAN, key)


@triton.jit
def _load_keys(scores, place, inside):
    return ordered_key(tl.load(scores + place, mask=inside, other=0.0))


@triton.jit
def _total(counts, row, splits, GROUP: tl.constexpr):
    """The sum of the histograms that the programs of a row left: int32 [256]."""
    bins = tl.arange(0, 256)
    total = tl.zeros((256,), tl.int32)
    for start in range(0, splits, GROUP):
        split = start + tl.arange(0, GROUP)
        offsets = (row * splits + split)[:, None] * 256 + bins[None, :]
        total += tl.sum(tl.load(counts + offsets, mask=(split < splits)[:, None], other=0), axis=0)
    return total


@triton.jit
def _boundary(counts, wanted):
    """The highest of 256 bins at and above which at least `wanted` entries lie, and how many lie above it."""
    bins = tl.arange(0, 256)
    from_here = tl.sum(counts) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.max(tl.where(from_here >= wanted, bins, 0), axis=0)
    return chosen, tl.sum(tl.where(bins > chosen, counts, 0))


@triton.jit
def _high_kernel(scores, counted, high, count, share, TILE: tl.constexpr):
    """How often each high byte comes among a program's share of its row."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.minimum(tl.load(counted + row).to(tl.int32), (split + 1) * share)
    found = tl.zeros((256,), tl.int32)
    for start in range(split * share, limit, TILE):
        place = start + tl.arange(0, TILE)
        key = _load_keys(scores + row * count, place, place < limit)
        found += tl.histogram(key >> 8, 256, mask=place < limit)
    tl.store(high + (row * tl.num_programs(1) + split) * 256 + tl.arange(0, 256), found)


@triton.jit
def _low_kernel(scores, counted, high, low, count, wanted, share, TILE: tl.constexpr, GROUP: tl.constexpr):
    """How often each low byte comes among those whose high byte is that of the wanted-th largest."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    considered = tl.load(counted + row).to(tl.int32)
    limit = tl.minimum(considered, (split + 1) * share)
    high_byte, _ = _boundary(_total(high, row, tl.num_programs(1), GROUP), tl.minimum(wanted, considered))
    found = tl.zeros((256,), tl.int32)
    for start in range(split * share, limit, TILE):
        place = start + tl.arange(0, TILE)
        key = _load_keys(scores + row * count, place, place < limit)
        found += tl.histogram(key & 255, 256, mask=(place < limit) & ((key >> 8) == high_byte))
    tl.store(low + (row * tl.num_programs(1) + split) * 256 + tl.arange(0, 256), found)


@triton.jit
def _select_kernel(
    scores,
    counted,
    visible,
    blocks,
    high,
    low,
    selected,
    count,
    wanted,
    share,
    SIZE: tl.constexpr,
    ORDERED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a program's choices behind those of the programs before it.

    With a SIZE, place p of the scores stands for position blocks[p // SIZE] · SIZE + p % SIZE.  What is not visible is
    chosen as -1, and so is, where scores must be ORDERED, what is not above -inf.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)
    bins = tl.arange(0, 256)
    considered = tl.load(counted + row).to(tl.int32)
    limit = tl.minimum(considered, (split + 1) * share)
    best = tl.minimum(wanted, considered)
    high_byte, above = _boundary(_total(high, row, splits, GROUP), best)
    low_byte, above_within = _boundary(_total(low, row, splits, GROUP), best - above)
    threshold, ties = (high_byte << 8) | low_byte, best - above - above_within

    # What the programs before this one take, and how many equal to the threshold they see.
    taken, equal_seen = 0, 0
    for start in range(0, split, GROUP):
        earlier = start + tl.arange(0, GROUP)
        offsets = (row * splits + earlier)[:, None] * 256 + bins[None, :]
        inside = (earlier < split)[:, None]
        of_high = tl.load(high + offsets, mask=inside, other=0)
        of_low = tl.load(low + offsets, mask=inside, other=0)
        taken += tl.sum(tl.where((bins > high_byte)[None, :], of_high, 0))
        taken += tl.sum(tl.where((bins > low_byte)[None, :], of_low, 0))
        equal_seen += tl.sum(tl.where((bins == low_byte)[None, :], of_low, 0))
    taken += tl.minimum(equal_seen, ties)

    limit_of_position = tl.load(visible + row)
    for start in range(split * share, limit, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < limit
        key = _load_keys(scores + row * count, place, inside)
        equal = (inside & (key == threshold)).to(tl.int32)
        rank = equal_seen + tl.cumsum(equal, axis=0) - equal
        take = (inside & (key > threshold)) | ((equal != 0) & (rank < ties))
        chosen = take.to(tl.int32)
        slot = taken + tl.cumsum(chosen, axis=0) - chosen
        position = place
        if SIZE:
            block = tl.load(blocks + row * (count // SIZE) + place // SIZE, mask=inside, other=-1)
            position = block * SIZE + place % SIZE
        present = (position >= 0) & (position < limit_of_position)
        if ORDERED:
            present = present & (key > KEY_OF_MINUS_INFINITY) & (key < KEY_OF_NAN)
        tl.store(selected + row * wanted + slot, tl.where(present, position, -1), mask=take)
        taken += tl.sum(chosen)
        equal_seen += tl.sum(equal)


@dataclass(frozen=True)
class Listed:
    """Scores of some positions only: whole blocks of `size` positions, listed in ascending order, then -1."""

    blocks: torch.Tensor
    """int32 [..., n] for scores [..., n · size]."""
    size: int


def shares(rows: int, count: int) -> tuple[int, int, int]:
    """How many programs walk a row of `count` scores, how many scores each, and how many at a time."""
    tile = min(TILE, max(SMALLEST_TILE, triton.next_power_of_2(count)))
    splits = min(triton.cdiv(count, LARGEST_SHARE), max(1, TARGET_PROGRAMS // max(1, rows)))
    share = triton.cdiv(triton.cdiv(count, splits), tile) * tile
    return triton.cdiv(count, share), share, tile


def best_positions(
    scores: torch.Tensor,
    wanted: int,
    visible: torch.Tensor,
    counted: torch.Tensor | None = None,
    listed: Listed | None = None,
    ordered: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `wanted` best of bf16 scores [..., C], earliest positions among equals -> int32 [..., wanted], ascending.

    Positions that are chosen but not below int64 `visible` [...] become -1, and so do places that nothing is left for:
    both stand last where scores beyond what is visible are -inf.  Only the first `counted` [...] scores of a row exist;
    None for all.  With `ordered`, what is not above -inf (NaN is not) is chosen as -1.  Where there is an `out`, it is
    written to.

    Raises:
        TypeError: scores that are not bf16.
        ValueError: shapes that do not belong together.
    """
    scores = require_bf16("scores", scores)
    lead, count = scores.shape[:-1], scores.shape[-1]
    visible = require_shape("visible", visible, *lead)
    if wanted < 0:
        raise ValueError(f"wanted: expected 0 or more, got {wanted}")
    if counted is None:
        counted = torch.full_like(visible, count)
    counted = require_shape("counted", counted, *lead)
    if listed is not None:
        if count % listed.size:
            raise ValueError(f"scores: {count} are no whole blocks of {listed.size}")
        listed = Listed(require_shape("blocks", listed.blocks, *lead, count // listed.size), listed.size)
    if out is None:
        out = torch.empty(*lead, wanted, dtype=torch.int32, device=scores.device)
    elif not out.is_contiguous():
        raise ValueError("out: not contiguous, a copy of it would be written to")
    selected = require_shape("out", out, *lead, wanted).fill_(-1)
    if not selected.numel() or not count:
        return selected
    rows = lead.numel()
    splits, share, tile = shares(rows, count)
    high, low = (torch.empty(rows, splits, 256, dtype=torch.int32, device=scores.device) for _ in range(2))
    grid, sizes = (rows, splits), {"TILE": tile, "GROUP": min(HISTOGRAMS, triton.next_power_of_2(splits))}
    _high_kernel[grid](scores, counted, high, count, share, TILE=tile)
    _low_kernel[grid](scores, counted, high, low, count, wanted, share, **sizes)
    _select_kernel[grid](
        scores,
        counted,
        visible,
        selected if listed is None else listed.blocks,
        high,
        low,
        selected,
        count,
        wanted,
        share,
        SIZE=0 if listed is None else listed.size,
        ORDERED=ordered,
        **sizes,
    )
    return selected
