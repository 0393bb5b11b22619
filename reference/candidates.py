"""Candidate blocks: the first level of the two-level selection (numerics.md 6.3)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.indexer import Ties, best, visible_positions


def block_scores(config: Config, scores: torch.Tensor) -> torch.Tensor:
    """Maximum of each block of positions, the last block filled with −inf: bf16 [B,T,C] -> bf16 [B,T,blocks]."""
    size = config.candidate_block_size
    padded = functional.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    return torch.unflatten(padded, -1, (-1, size)).amax(dim=-1)


def candidate_mask(
    config: Config, layer_id: int, scores: torch.Tensor, positions: torch.Tensor, *, ties: Ties = "library"
) -> torch.Tensor:
    """Positions in the best candidate blocks: bf16 scores [B,T,C], int64 positions [B,T] -> bool [B,T,C].

    The block of the newest visible position is pinned in and counts among the best; blocks without a visible position
    are dropped.  The mask covers whole blocks, positions of the newest block that are not visible yet included
    (numerics.md 6.3).
    """
    by_block = block_scores(config, scores)
    blocks = by_block.shape[-1]
    newest = (visible_positions(config, layer_id, positions) - 1) // config.candidate_block_size
    pinned = torch.arange(blocks) == newest.unsqueeze(-1)
    kept_blocks = best(by_block.masked_fill(pinned, torch.inf), min(config.candidate_topk_blocks, blocks), ties)
    kept = torch.zeros(by_block.shape, dtype=torch.bool).scatter(-1, kept_blocks, True)
    kept = kept & (by_block > -torch.inf)
    return kept.repeat_interleave(config.candidate_block_size, dim=-1)[..., : scores.shape[-1]]
