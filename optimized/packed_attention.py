"""Sparse attention straight over packed state: FP8 window rows and FP4 compressed rows in one pass (numerics.md 6).

No list of window rows is made: which positions a query sees follows from its own.  Its list runs over the ring, then,
where a call is too long for the ring, over the rows of the call itself, then over the selected compressed rows.  A
program walks the list of one query and a group of its heads, or a share of it: then the parts are merged in the order
of the list, each brought to the largest maximum.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, for_device

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape, require_state
from optimized.rows import load_rows
from optimized.runtime import Batch, Runtime
from optimized.sparse_attention import MAXIMUM_START, ListTile, Parts, accumulate, finish, head_tile

# Larger steps spill registers (AMD) or need more shared memory than there is (sm_120).
SMALL_LIST_TILE = ListTile(16, 2)
LIST_TILE = for_device(
    {"interpreted": ListTile(128, 1), "gfx": SMALL_LIST_TILE, "sm_120": SMALL_LIST_TILE, "any": ListTile(32, 2)}
)
LARGEST_HEAD_BLOCK = for_device({"sm_120": 32, "gfx942": 32, "any": 64})
"""Heads of a program: 64 have sm_120 spill 2,872 bytes of registers a thread and gfx942 134; with 32 it is 456 and none
(Triton 3.9.0)."""
TARGET_PROGRAMS = 132
"""A program for each multiprocessor of an H100 or H200."""


@triton.jit
def _attend_packed_kernel(
    q,
    window,
    call_rows,
    compressed,
    selected,
    slots,
    start,
    sink,
    out,
    part_maximum,
    part_denominator,
    part_numerator,
    scale,
    heads,
    length,
    window_size,
    ring,
    compressed_rows,
    listed,
    blocks_of_split,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CALL: tl.constexpr,
    COMPRESSED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    feature = tl.arange(0, PADDED)
    known = (head < heads)[:, None] & (feature < WIDTH)[None, :]
    place = head[:, None] * WIDTH + feature[None, :]
    values = tl.load(q + query * heads * WIDTH + place, mask=known, other=0.0)
    maximum = tl.full((HEADS,), MAXIMUM_START, tl.float32)
    denominator = tl.zeros((HEADS,), tl.float32)
    numerator = tl.zeros((HEADS, PADDED), tl.float32)

    request = query // length
    slot = tl.load(slots + request)
    first = tl.load(start + request)
    position = first + query % length
    oldest = tl.maximum(position - window_size + 1, 0)
    entry = tl.arange(0, BLOCK)
    # The ring holds what the call has not written, or what it has too.
    stop = tl.minimum(first, position + 1) if CALL else position + 1
    ring_blocks = tl.cdiv(tl.maximum(stop - oldest, 0), BLOCK).to(tl.int32)
    own_window = window + slot * ring * (WIDTH + tl.cdiv(WIDTH, 32))
    window_blocks = ring_blocks
    if CALL:
        oldest_of_call = tl.maximum(oldest, first)
        window_blocks += tl.cdiv(position + 1 - oldest_of_call, BLOCK).to(tl.int32)
        own_call = call_rows + request * length * (WIDTH + tl.cdiv(WIDTH, 32))
    blocks = window_blocks
    if COMPRESSED:
        blocks += tl.cdiv(listed, BLOCK)
        own_compressed = compressed + slot * compressed_rows * (WIDTH // 2 + tl.cdiv(WIDTH, 16))

    # One loop over both kinds of rows: the products are the same, and stand in the code once.
    for block in range(tl.minimum(split * blocks_of_split, blocks), tl.minimum((split + 1) * blocks_of_split, blocks)):
        if block < window_blocks:
            listed_position = oldest + block * BLOCK + entry
            valid = listed_position < stop
            row = (listed_position % ring).to(tl.int32)
            base = own_window
            if CALL:
                ours = block >= ring_blocks
                position_of_call = oldest_of_call + (block - ring_blocks) * BLOCK + entry
                valid = tl.where(ours, position_of_call <= position, valid)
                row = tl.where(ours, (position_of_call % length).to(tl.int32), row)
                base = tl.where(ours, own_call, own_window)
            rows = load_rows(base, row, valid, "fp8", 32, WIDTH, PADDED)
        else:
            if COMPRESSED:
                column = (block - window_blocks) * BLOCK + entry
                row = tl.load(selected + query * listed + column, mask=column < listed, other=-1)
                valid = (row >= 0) & (row < compressed_rows)
                rows = load_rows(own_compressed, row, valid, "fp4_e4m3", 16, WIDTH, PADDED)
            else:
                # Never: the list ends with the window.
                valid = entry < 0
                rows = tl.zeros((BLOCK, PADDED), tl.bfloat16)
        maximum, denominator, numerator = accumulate(values, rows, valid, scale, maximum, denominator, numerator)

    finish(
        place,
        head,
        known,
        split * tl.num_programs(0) + query,
        heads,
        sink,
        out + query * heads * WIDTH,
        part_maximum,
        part_denominator,
        part_numerator,
        maximum,
        denominator,
        numerator,
        WIDTH,
        SPLIT,
    )


def _shared_by(blocks: int, programs: int) -> int:
    """How many programs share a list of so many blocks: enough for the device where there would be few."""
    return 1 if INTERPRETED else max(1, min(blocks, TARGET_PROGRAMS // programs))


def packed_attention(
    runtime: Runtime,
    layer_id: int,
    batch: Batch,
    q: torch.Tensor,
    sink: torch.Tensor,
    call_rows: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Sparse attention of a layer over what the runtime holds: bf16 q [B,T,H,d], fp32 sink [H] -> bf16 [B,T,H,d].

    Not yet turned back (numerics.md 6, item 5).  Each query sees the last window_size rows up to its own position and
    the compressed rows that `runtime.selected` lists for it, -1 anywhere for none.  `call_rows` uint8 [B,T,bytes] are
    packed window rows of this call, the one of position p at p modulo T, where the ring does not hold them yet; without
    it the ring already holds them.  `splits` programs share a list; by default as many as suit the number of queries.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not belong together, or a call too long for a ring that holds its rows.
    """
    q = require_bf16("q", q)
    config, state = runtime.config, runtime.layers[layer_id]
    length, heads, width = batch.length, config.n_heads, config.head_dim
    q = require_shape("q", q, batch.size, length, heads, width)
    sink = require_shape("sink", sink, heads)
    if call_rows is not None:
        call_rows = require_state("call_rows", call_rows, torch.uint8, runtime.window_format.bytes)
        call_rows = require_shape("call_rows", call_rows, batch.size, length, runtime.window_format.bytes)
    elif length > runtime.drafts + 1:
        raise ValueError(f"batch: {length} tokens at once have overwritten rows that they need; give call_rows")
    if splits is not None and splits < 1:
        raise ValueError(f"splits: expected at least 1, got {splits}")
    compressed = runtime.source(layer_id).compressed if config.ratio(layer_id) else None
    queries, listed = batch.size * length, config.index_topk
    head_block, padded = head_tile(heads, width)
    head_block = min(head_block, LARGEST_HEAD_BLOCK)
    head_blocks = triton.cdiv(heads, head_block)
    blocks = triton.cdiv(config.window_size, LIST_TILE.entries)
    blocks += 1 if call_rows is not None else 0
    blocks += triton.cdiv(listed, LIST_TILE.entries) if compressed is not None else 0
    if splits is None:
        splits = _shared_by(blocks, queries * head_blocks)
    share = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, share)
    parts = Parts.of(splits, queries, heads, width)
    out = torch.empty_like(q)
    _attend_packed_kernel[(queries, head_blocks, splits)](
        q,
        state.window,
        state.window if call_rows is None else call_rows,
        state.window if compressed is None else compressed,
        runtime.selected,
        batch.slots,
        batch.start,
        sink,
        out,
        parts.maximum,
        parts.denominator,
        parts.numerator,
        width**-0.5,
        heads,
        length,
        config.window_size,
        state.window.shape[1],
        0 if compressed is None else compressed.shape[1],
        listed,
        share,
        WIDTH=width,
        PADDED=padded,
        HEADS=head_block,
        BLOCK=LIST_TILE.entries,
        CALL=call_rows is not None,
        COMPRESSED=compressed is not None,
        SPLIT=splits > 1,
        num_warps=8,
        num_stages=LIST_TILE.stages,
    )
    parts.merge(sink, out)
    return out
