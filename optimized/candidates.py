"""Candidate blocks as kernels: the first level of the two-level selection (numerics.md 6.3)."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.config import Config
from optimized.indexer import visible_positions
from optimized.selection import mark_best

BLOCKS_PER_PROGRAM = 1024 if INTERPRETED else 128


@triton.jit
def _block_maxima_kernel(
    scores, visible, maxima, positions, blocks, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr
):
    """Maximum of each block of a query's scores, +inf at the block of its newest visible position.

    A block without a visible score stays at -inf, also where it is the pinned one.
    """
    query = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, PADDED)
    position = block[:, None] * SIZE + within[None, :]
    inside = (within < SIZE)[None, :] & (position < positions)
    score = tl.load(scores + query * positions + position, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(score, axis=1)
    newest = (tl.load(visible + query) + SIZE - 1) // SIZE - 1
    pinned = (block == newest) & (largest > float("-inf"))
    largest = tl.where(pinned, float("inf"), largest)
    tl.store(maxima + query * blocks + block, largest.to(tl.bfloat16), mask=block < blocks)


def candidate_mask(config: Config, layer_id: int, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bf16 scores [B,T,C] of the candidate source layer -> bool [B,T,C], whole blocks (numerics.md 6.3)."""
    scores = require_bf16("scores", scores)
    positions = require_shape("positions", positions, *scores.shape[:-1])
    size, count = config.candidate_block_size, scores.shape[-1]
    blocks = triton.cdiv(count, size)
    maxima = torch.empty(*scores.shape[:-1], blocks, dtype=torch.bfloat16, device=scores.device)
    if not maxima.numel():
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    visible = visible_positions(config, layer_id, positions).contiguous()
    grid = (scores.shape[:-1].numel(), triton.cdiv(blocks, BLOCKS_PER_PROGRAM))
    _block_maxima_kernel[grid](
        scores,
        visible,
        maxima,
        count,
        blocks,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        BLOCKS=BLOCKS_PER_PROGRAM,
    )
    kept = mark_best(maxima, min(config.candidate_topk_blocks, blocks))
    return kept.repeat_interleave(size, dim=-1)[..., :count]
