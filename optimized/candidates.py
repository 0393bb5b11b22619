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
from optimized.selection import best_positions

BLOCKS_PER_PROGRAM = 1024 if INTERPRETED else 128


@triton.jit
def _block_maxima_kernel(
    scores, visible, counted, maxima, positions, blocks, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr
):
    """Maximum of each block of a query's scores, +inf at the block of its newest visible position.

    A block without a visible score stays at -inf, also where it is the pinned one.  A block with a NaN is NaN: it comes
    among the best, and is then not above -inf.
    """
    query = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, PADDED)
    position = block[:, None] * SIZE + within[None, :]
    inside = (within < SIZE)[None, :] & (position < tl.load(counted + query))
    score = tl.load(scores + query * positions + position, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(score, axis=1)
    # A maximum passes NaN over.
    unordered = tl.max((score != score).to(tl.int32), axis=1) != 0
    newest = (tl.load(visible + query) + SIZE - 1) // SIZE - 1
    pinned = (block == newest) & (largest > float("-inf"))
    largest = tl.where(pinned, float("inf"), largest)
    largest = tl.where(unordered, float("nan"), largest)
    tl.store(maxima + query * blocks + block, largest.to(tl.bfloat16), mask=block < blocks)


def block_maxima(
    scores: torch.Tensor, size: int, visible: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bf16 scores [..., C] the maximum of each block, the newest visible one pinned: bf16 [..., ⌈C/size⌉] (6.3).

    int64 visible [...] says which block is the newest, `counted` [...] how many scores of a row exist.  The second
    result int64 [...] is how many blocks exist.
    """
    lead, count = scores.shape[:-1], scores.shape[-1]
    blocks = triton.cdiv(count, size)
    maxima = torch.empty(*lead, blocks, dtype=torch.bfloat16, device=scores.device)
    if maxima.numel():
        _block_maxima_kernel[(lead.numel(), triton.cdiv(blocks, BLOCKS_PER_PROGRAM))](
            scores,
            visible,
            counted,
            maxima,
            count,
            blocks,
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            BLOCKS=BLOCKS_PER_PROGRAM,
        )
    return maxima, -(-counted // size)


def candidate_mask(config: Config, layer_id: int, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bf16 scores [B,T,C] of the candidate source layer -> bool [B,T,C], whole blocks (numerics.md 6.3)."""
    scores = require_bf16("scores", scores)
    positions = require_shape("positions", positions, *scores.shape[:-1])
    size, count = config.candidate_block_size, scores.shape[-1]
    visible = visible_positions(config, layer_id, positions).contiguous()
    maxima, blocks = block_maxima(scores, size, visible, torch.full_like(visible, count))
    wanted = min(config.candidate_topk_blocks, maxima.shape[-1])
    chosen = best_positions(maxima, wanted, blocks, ordered=True).long()
    # -1 marks a column behind the last, which is cut off.
    kept = torch.zeros(*maxima.shape[:-1], maxima.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(-1, torch.where(chosen < 0, maxima.shape[-1], chosen), True)
    return kept[..., :-1].repeat_interleave(size, dim=-1)[..., :count]
