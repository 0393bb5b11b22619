"""Attention over a list of rows with a sink, as a kernel (numerics.md 6, item 5).

A program takes one query and a group of its heads, and walks the list in blocks with a running maximum.  For a few
queries the list is split over programs, whose parts are merged exactly: each part's numerator and denominator are
brought to the largest maximum in the order of the list.
"""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED, for_device

# ruff: isort: split
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape


@dataclass(frozen=True)
class ListTile:
    """How a program walks its list: entries a step, steps that are loaded ahead."""

    entries: int
    stages: int


# Larger steps spill registers (AMD) or need more shared memory than there is (sm_120).
SMALL_LIST_TILE = ListTile(16, 2)
LIST_TILE = for_device(
    {"interpreted": ListTile(64, 1), "gfx": SMALL_LIST_TILE, "sm_120": SMALL_LIST_TILE, "any": ListTile(32, 3)}
)
MAXIMUM_START = tl.constexpr(-1e30)
"""The running maximum before any row: finite, so that a list without rows gives zero and not NaN (numerics.md 6)."""
SPLIT_QUERIES = 64
"""Up to this many queries the list is split."""
LIST_SPLITS = 1 if INTERPRETED else 4


@triton.jit
def accumulate(values, rows, valid, scale, maximum, denominator, numerator):
    """One step of a list: bf16 heads [HEADS, d] and rows [BLOCK, d] -> the running maximum, denominator, numerator."""
    scores = tl.dot(values, tl.trans(rows)) * scale
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    rescale = tl.exp(maximum - new_maximum)
    probabilities = tl.exp(scores - new_maximum[:, None])
    # The denominator sums the probabilities as they are; the value product takes them rounded.
    denominator = denominator * rescale + tl.sum(probabilities, axis=1)
    numerator = tl.dot(probabilities.to(tl.bfloat16), rows, numerator * rescale[:, None])
    return new_maximum, denominator, numerator


@triton.jit
def finish(
    place,
    head,
    known,
    part,
    heads,
    sink,
    out,
    part_maximum,
    part_denominator,
    part_numerator,
    maximum,
    denominator,
    numerator,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store a program's share: the attention of its heads, or part number `part` of it."""
    if SPLIT:
        tl.store(part_maximum + part * heads + head, maximum, mask=head < heads)
        tl.store(part_denominator + part * heads + head, denominator, mask=head < heads)
        tl.store(part_numerator + part * heads * WIDTH + place, numerator, mask=known)
    else:
        # Without a valid row the maximum is still -1e30, the sink's term is infinite, and the result is zero.
        denominator += tl.exp(tl.load(sink + head, mask=head < heads, other=0.0) - maximum)
        tl.store(out + place, (numerator / denominator[:, None]).to(tl.bfloat16), mask=known)


@triton.jit
def _attend_kernel(
    q,
    kv,
    indices,
    sink,
    out,
    part_maximum,
    part_denominator,
    part_numerator,
    scale,
    heads,
    queries_of_batch,
    rows_of_batch,
    listed,
    listed_of_split,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    feature = tl.arange(0, PADDED)
    known = (head < heads)[:, None] & (feature < WIDTH)[None, :]
    # A scalar start and 32-bit places within it: 64-bit places alone would fill the registers.
    start = query * heads * WIDTH
    place = head[:, None] * WIDTH + feature[None, :]
    values = tl.load(q + start + place, mask=known, other=0.0)
    own_rows = kv + (query // queries_of_batch) * rows_of_batch * WIDTH
    maximum = tl.full((HEADS,), MAXIMUM_START, tl.float32)
    denominator = tl.zeros((HEADS,), tl.float32)
    numerator = tl.zeros((HEADS, PADDED), tl.float32)
    for step in range(0, listed_of_split, BLOCK):
        entry = split * listed_of_split + step + tl.arange(0, BLOCK)
        row = tl.load(indices + query * listed + entry, mask=entry < listed, other=-1)
        valid = row >= 0
        rows = tl.load(
            own_rows + (row[:, None] * WIDTH + feature[None, :]),
            mask=valid[:, None] & (feature < WIDTH)[None, :],
            other=0.0,
        )
        maximum, denominator, numerator = accumulate(values, rows, valid, scale, maximum, denominator, numerator)
    finish(
        place,
        head,
        known,
        split * tl.num_programs(0) + query,
        heads,
        sink,
        out + start,
        part_maximum,
        part_denominator,
        part_numerator,
        maximum,
        denominator,
        numerator,
        WIDTH,
        SPLIT,
    )


@triton.jit
def _merge_kernel(
    part_maximum,
    part_denominator,
    part_numerator,
    sink,
    out,
    heads,
    all_heads,
    splits,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One head of one query: its parts in the order of the list."""
    place = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, PADDED)
    maximum = tl.load(part_maximum + place)
    for split in range(1, splits):
        maximum = tl.maximum(maximum, tl.load(part_maximum + split * all_heads + place))
    denominator = tl.exp(tl.load(sink + place % heads) - maximum)
    numerator = tl.zeros((PADDED,), tl.float32)
    for split in range(0, splits):
        part = split * all_heads + place
        rescale = tl.exp(tl.load(part_maximum + part) - maximum)
        denominator += tl.load(part_denominator + part) * rescale
        numerator += tl.load(part_numerator + part * WIDTH + feature, mask=feature < WIDTH, other=0.0) * rescale
    tl.store(out + place * WIDTH + feature, (numerator / denominator).to(tl.bfloat16), mask=feature < WIDTH)


@dataclass(frozen=True)
class Parts:
    """What programs that share a list leave for the merge; empty without a split."""

    splits: int
    maximum: torch.Tensor
    """fp32 [splits, queries, H]"""
    denominator: torch.Tensor
    """fp32 [splits, queries, H]"""
    numerator: torch.Tensor
    """fp32 [splits, queries, H, d]"""

    @classmethod
    def of(cls, splits: int, queries: int, heads: int, width: int) -> Parts:
        """Room for the parts of so many queries."""
        floats: Any = {"dtype": torch.float32, "device": DEVICE}
        shape = (splits if splits > 1 else 0, queries, heads)
        return cls(splits, *(torch.empty(*shape, *rest, **floats) for rest in ((), (), (width,))))

    def merge(self, sink: torch.Tensor, out: torch.Tensor) -> None:
        """Bring the parts to one maximum and add them, the sink first, in the order of the list: bf16 out [...,H,d]."""
        if self.splits > 1:
            heads, width = out.shape[-2:]
            programs = out.shape[:-1].numel()
            padded = max(16, triton.next_power_of_2(width))
            _merge_kernel[(programs,)](
                self.maximum,
                self.denominator,
                self.numerator,
                sink,
                out,
                heads,
                programs,
                self.splits,
                WIDTH=width,
                PADDED=padded,
            )


def head_tile(heads: int, width: int) -> tuple[int, int]:
    """Heads of a program, and the extent of a head's features, a power of two."""
    return max(16, min(64, triton.next_power_of_2(heads))), max(16, triton.next_power_of_2(width))


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    splits: int | None = None,
) -> torch.Tensor:
    """o = Σ exp(a_i − M)·kv_i / (Σ exp(a_i − M) + exp(sink − M)), a_i = q·kv_i · scale (numerics.md 6, item 5).

    bf16 q [B,T,H,d], kv [B,N,d] (key = value, shared by all heads), int32 indices [B,T,n] with -1 for none anywhere,
    fp32 sink [H] -> bf16 [B,T,H,d].  A duplicate index counts twice.  Indices must be below N: they are not checked.
    `splits` programs share a list; by default as many as suit the number of queries.

    Raises:
        ValueError: shapes that do not belong together.
    """
    q, kv = require_bf16("q", q), require_bf16("kv", kv)
    if q.dim() != 4:
        raise ValueError(f"q: expected [B, T, H, d], got {list(q.shape)}")
    batch, length, heads, width = q.shape
    if kv.dim() != 3 or kv.shape[0] != batch or kv.shape[2] != width:
        raise ValueError(f"kv: expected [{batch}, N, {width}] for q {list(q.shape)}, got {list(kv.shape)}")
    if kv.shape[1] * width >= 2**31:
        raise ValueError(f"kv: {kv.shape[1]} rows of {width} are beyond 32-bit places within a request")
    if indices.dim() != 3 or indices.shape[:2] != q.shape[:2] or indices.is_floating_point():
        raise ValueError(f"indices: expected int [{batch}, {length}, n], got {indices.dtype} {list(indices.shape)}")
    if splits is not None and splits < 1:
        raise ValueError(f"splits: expected at least 1, got {splits}")
    sink = require_shape("sink", sink, heads)
    out = torch.empty_like(q)
    queries, listed = batch * length, indices.shape[2]
    if not out.numel():
        return out
    if splits is None:
        splits = LIST_SPLITS if queries <= SPLIT_QUERIES else 1
    share = triton.cdiv(triton.cdiv(listed, splits), LIST_TILE.entries) * LIST_TILE.entries
    splits = max(1, triton.cdiv(listed, share)) if share else 1
    parts = Parts.of(splits, queries, heads, width)
    head_block, padded = head_tile(heads, width)
    _attend_kernel[(queries, triton.cdiv(heads, head_block), splits)](
        q,
        kv,
        indices.to(torch.int32).contiguous(),
        sink,
        out,
        parts.maximum,
        parts.denominator,
        parts.numerator,
        scale,
        heads,
        length,
        kv.shape[1],
        listed,
        share,
        WIDTH=width,
        PADDED=padded,
        HEADS=head_block,
        BLOCK=LIST_TILE.entries,
        SPLIT=splits > 1,
        num_warps=8,
        num_stages=LIST_TILE.stages,
    )
    parts.merge(sink, out)
    return out
