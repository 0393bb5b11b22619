"""Index scores of packed keys, as a server needs them: read where they are cached, worked off in bounded memory (6.3).

The scores of a call are never there all at once: queries are taken a few at a time, and what is selected of their
scores is kept.  A program walks positions as far as its query sees, which it learns on the device.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, TARGET_PROGRAMS

# ruff: isort: split
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.candidates import block_maxima
from optimized.config import Config
from optimized.indexer import index_weights, load_query, visible_positions, weighted_scores
from optimized.linear import linear_fp8
from optimized.rotary import rotate_at
from optimized.rows import RowFormat, load_rows
from optimized.runtime import Batch, Runtime
from optimized.selection import Listed, best_positions

POSITION_BLOCK = 512 if INTERPRETED else 64
SCORE_BYTES = 1 << 27
"""Bound on the scores that are held at a time; one query's are held whatever their number."""

Weights = Mapping[str, torch.Tensor]


@triton.jit
def _packed_scores_kernel(
    queries,
    head_weights,
    keys,
    slots,
    visible,
    blocks,
    scores,
    first,
    length,
    heads,
    rows,
    count,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Scores of one query, every so manieth block of positions.

    With a SIZE, place p of the scores stands for position blocks[p // SIZE] · SIZE + p % SIZE.
    """
    own = tl.program_id(0).to(tl.int64)
    query = first + own
    q, share = load_query(queries, head_weights, query, heads, WIDTH, PADDED, HEADS)
    cached = keys + tl.load(slots + query // length) * rows * BYTES
    seen = tl.load(visible + query).to(tl.int32)
    end = seen
    if SIZE:
        end = tl.minimum(count, tl.cdiv(seen, SIZE) * SIZE)
    for start in range(tl.program_id(1) * POSITIONS, end, tl.num_programs(1) * POSITIONS):
        place = start + tl.arange(0, POSITIONS)
        position = place
        if SIZE:
            block = tl.load(blocks + query * (count // SIZE) + place // SIZE, mask=place < count, other=-1)
            position = block * SIZE + place % SIZE
        valid = (position >= 0) & (position < seen)
        k = load_rows(cached, position, valid, FORMAT, GROUP, WIDTH, PADDED)
        score = tl.where(valid, weighted_scores(q, share, k), float("-inf"))
        tl.store(scores + own * count + place, score.to(tl.bfloat16), mask=place < end)


@dataclass(frozen=True)
class Asked:
    """What a call asks the index: one row a token, request by request."""

    queries: torch.Tensor
    """bf16 [N, heads, width], turned and quantised."""
    weights: torch.Tensor
    """bf16 [N, heads]."""
    visible: torch.Tensor
    """int64 [N]: positions that each token sees."""
    length: int
    """Tokens of a request."""


@dataclass(frozen=True)
class Scored:
    """The scores of some queries of a call."""

    queries: slice
    scores: torch.Tensor
    """bf16 [n, C]; what lies beyond `counted` is not written."""
    counted: torch.Tensor
    """int64 [n]."""


def packed_scores(
    asked: Asked, form: RowFormat, keys: torch.Tensor, slots: torch.Tensor, listed: Listed | None
) -> Iterator[Scored]:
    """Scores of cached keys uint8 [slots, rows, bytes], a few queries at a time, into the same memory (6.3).

    Of `listed` blocks only, int32 [N, n], or of all positions.
    """
    tokens, heads, width = asked.queries.shape
    count = keys.shape[1] if listed is None else listed.blocks.shape[-1] * listed.size
    counted = asked.visible
    if listed is not None:
        counted = (-(-asked.visible // listed.size) * listed.size).clamp(max=count)
    step = max(1, min(tokens, SCORE_BYTES // (2 * max(1, count))))
    block = min(POSITION_BLOCK, max(16, triton.next_power_of_2(count)))
    programs = min(triton.cdiv(count, block), max(1, TARGET_PROGRAMS // step))
    held = torch.empty(step, count, dtype=torch.bfloat16, device=keys.device)
    for first in range(0, tokens, step):
        taken = slice(first, min(first + step, tokens))
        own = taken.stop - taken.start
        if count:
            _packed_scores_kernel[(own, programs)](
                asked.queries,
                asked.weights,
                keys,
                slots,
                asked.visible,
                held if listed is None else listed.blocks,
                held,
                first,
                asked.length,
                heads,
                keys.shape[1],
                count,
                FORMAT=form.form,
                GROUP=form.group,
                WIDTH=width,
                PADDED=max(form.group, triton.next_power_of_2(width)),
                BYTES=form.bytes,
                HEADS=max(16, triton.next_power_of_2(heads)),
                POSITIONS=block,
                SIZE=0 if listed is None else listed.size,
            )
        yield Scored(taken, held[:own], counted[taken])


def ask(
    config: Config,
    layer_id: int,
    weights: Weights,
    runtime: Runtime,
    batch: Batch,
    x: torch.Tensor,
    q_latent: torch.Tensor,
) -> Asked:
    """The index queries of a call: bf16 x [B,T,D] and q_latent [B,T,q_lora_rank] (numerics.md 6.3)."""
    heads = config.index_n_heads
    queries = linear_fp8(q_latent, weights["indexer.wq_b.weight"], weights["indexer.wq_b.scale"])
    queries = torch.unflatten(queries, -1, (heads, -1))
    queries = rotate_at(queries, *runtime.rotary(layer_id), batch.positions, form="fp4_e8m0")
    head_weights = index_weights(config, layer_id, weights, x)
    visible = visible_positions(config, layer_id, batch.positions).flatten()
    return Asked(queries.flatten(0, 1), head_weights.flatten(0, 1), visible, batch.length)


def publish_selection(
    config: Config,
    layer_id: int,
    weights: Weights,
    runtime: Runtime,
    batch: Batch,
    x: torch.Tensor,
    q_latent: torch.Tensor,
) -> None:
    """What an index source publishes: `runtime.selected`, and the candidate source also `runtime.candidates` (6.3).

    bf16 x [B,T,D] is the attention's input, q_latent [B,T,q_lora_rank] its query latent; `weights` are the attention's.
    Where candidate blocks hold fewer visible positions than are selected, the rest stays -1 (numerics.md 6.4,
    candidate-shortfall).
    """
    asked = ask(config, layer_id, weights, runtime, batch, x, q_latent)
    tokens = len(asked.visible)
    keys = runtime.source(layer_id).index_keys
    if keys is None:
        raise ValueError(f"runtime: the source of layer {layer_id} has no room for index keys")
    selected, candidates = runtime.selected[:tokens], runtime.candidates[:tokens]
    listed = Listed(candidates, config.candidate_block_size) if config.uses_candidates(layer_id) else None
    for part in packed_scores(asked, runtime.index_key_format, keys, batch.slots, listed):
        own, visible = part.queries, asked.visible[part.queries]
        of_part = None if listed is None else Listed(listed.blocks[own], listed.size)
        best_positions(
            part.scores,
            config.index_topk,
            visible,
            part.counted,
            of_part,
            out=selected[own],
        )
        if config.publishes_candidates(layer_id):
            maxima, blocks = block_maxima(part.scores, config.candidate_block_size, visible, part.counted)
            best_positions(maxima, config.candidate_topk_blocks, blocks, blocks, ordered=True, out=candidates[own])
