"""From logits to a token (numerics.md 9)."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit, as at temperature 0: fp32 [B,V] -> int32 [B] (numerics.md 9)."""
    return logits.argmax(dim=-1).to(torch.int32)


def sample(
    logits: torch.Tensor,
    temperature: float,
    exponentials: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """argmax of softmax(logits / temperature) / exponentials: fp32 [B,V] twice -> int32 [B] (numerics.md 9).

    With independent unit exponentials this draws from the softmax (the Gumbel trick).  They are an argument so that a
    draw can be repeated.
    """
    if temperature == 0:
        return greedy(logits)
    probabilities = torch.softmax(logits.to(compute) / temperature, dim=-1)
    return (probabilities / exponentials.to(compute)).argmax(dim=-1).to(torch.int32)


DRAWS_AT_ONCE = 1 << 22
"""Exponentials made at a time: what bounds the memory of many draws from a large vocabulary."""


def draws(
    logits: torch.Tensor, temperature: float, count: int, seed: int, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """`count` independent draws from softmax(logits / temperature): fp32 [B,V] -> int32 [B,count] (numerics.md 9)."""
    generator = torch.Generator().manual_seed(seed)
    batch_size, vocabulary = logits.shape
    drawn = []
    while count > 0:
        now = min(count, max(1, DRAWS_AT_ONCE // (batch_size * vocabulary)))
        repeated = logits.repeat_interleave(now, dim=0)
        exponentials = torch.empty_like(repeated).exponential_(generator=generator)
        drawn.append(sample(repeated, temperature, exponentials, compute=compute).view(batch_size, now))
        count -= now
    return torch.cat(drawn, dim=1)
