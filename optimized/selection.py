"""Exact top-k over bf16 scores, in the order of positions (numerics.md 6.3).

A bf16 score is a 16-bit number, so the k-th largest is found by counting: one histogram of the high bytes, one of the
low bytes within the boundary's high byte.  Everything above it is taken, and of the scores equal to it the earliest
positions: the stated rule for ties.  NaN counts as the largest score, and -0 equals +0.  Memory does not grow with the
number of positions.
"""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape

BLOCK = 4096 if INTERPRETED else 1024


@triton.jit
def ordered_key(score):
    """bf16 -> int32 0...65535 in the order of the values."""
    bits = score.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    key = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    return tl.where((bits & 0x7FFF) > 0x7F80, 0xFFFF, key)


@triton.jit
def _boundary(counts, wanted):
    """The highest of 256 bins at and above which at least `wanted` entries lie, and how many lie above it."""
    bins = tl.arange(0, 256)
    from_here = tl.sum(counts) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.max(tl.where(from_here >= wanted, bins, 0), axis=0)
    return chosen, tl.sum(tl.where(bins > chosen, counts, 0))


@triton.jit
def threshold_key(scores, count, wanted, BLOCK: tl.constexpr):
    """Key of the `wanted`-th largest of `count` scores, and how many of those equal to it belong to the best."""
    high = tl.zeros((256,), tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = ordered_key(tl.load(scores + place, mask=place < count, other=0.0))
        high += tl.histogram(key >> 8, 256, mask=place < count)
    high_byte, above = _boundary(high, wanted)
    low = tl.zeros((256,), tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = ordered_key(tl.load(scores + place, mask=place < count, other=0.0))
        low += tl.histogram(key & 255, 256, mask=(place < count) & ((key >> 8) == high_byte))
    low_byte, above_within = _boundary(low, wanted - above)
    return (high_byte << 8) | low_byte, wanted - above - above_within


@triton.jit
def _select_kernel(scores, visible, selected, count, wanted, BLOCK: tl.constexpr):
    """Positions of the best scores of one query in ascending order; those beyond `visible` become -1."""
    query = tl.program_id(0).to(tl.int64)
    own = scores + query * count
    threshold, ties = threshold_key(own, count, wanted, BLOCK)
    limit = tl.load(visible + query)
    taken, equal_seen = 0, 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        key = ordered_key(tl.load(own + place, mask=inside, other=0.0))
        equal = (inside & (key == threshold)).to(tl.int32)
        rank = equal_seen + tl.cumsum(equal, axis=0) - equal
        take = (inside & (key > threshold)) | ((equal != 0) & (rank < ties))
        counted = take.to(tl.int32)
        slot = taken + tl.cumsum(counted, axis=0) - counted
        tl.store(selected + query * wanted + slot, tl.where(place < limit, place, -1), mask=take)
        taken += tl.sum(counted)
        equal_seen += tl.sum(equal)


@triton.jit
def _mark_kernel(scores, kept, count, wanted, BLOCK: tl.constexpr):
    """Which entries of one row are among its best and above -inf."""
    row = tl.program_id(0).to(tl.int64)
    own = scores + row * count
    threshold, ties = threshold_key(own, count, wanted, BLOCK)
    equal_seen = 0
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < count
        key = ordered_key(tl.load(own + place, mask=inside, other=0.0))
        equal = (inside & (key == threshold)).to(tl.int32)
        rank = equal_seen + tl.cumsum(equal, axis=0) - equal
        take = (key > threshold) | ((equal != 0) & (rank < ties))
        # The key of -inf is 0x7F.
        tl.store(kept + row * count + place, (take & (key > 0x7F)).to(tl.uint8), mask=inside)
        equal_seen += tl.sum(equal)


def best_positions(scores: torch.Tensor, wanted: int, visible: torch.Tensor) -> torch.Tensor:
    """bf16 scores [B,T,C], int64 visible counts [B,T] -> int32 [B,T,wanted], ascending, then -1."""
    scores = require_bf16("scores", scores)
    visible = require_shape("visible", visible, *scores.shape[:-1])
    if not 0 <= wanted <= scores.shape[-1]:
        raise ValueError(f"wanted: {wanted} of {scores.shape[-1]} scores")
    selected = torch.empty(*scores.shape[:-1], wanted, dtype=torch.int32, device=scores.device)
    if selected.numel():
        _select_kernel[(visible.numel(),)](scores, visible, selected, scores.shape[-1], wanted, BLOCK=BLOCK)
    return selected


def mark_best(scores: torch.Tensor, wanted: int) -> torch.Tensor:
    """bf16 scores [B,T,n] -> bool [B,T,n]: the `wanted` best, entries of -inf never among them."""
    scores = require_bf16("scores", scores)
    kept = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    if kept.numel():
        _mark_kernel[(scores.shape[:-1].numel(),)](scores, kept, scores.shape[-1], wanted, BLOCK=BLOCK)
    return kept.bool()
