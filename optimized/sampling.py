"""From logits to a token (numerics.md 9)."""

from __future__ import annotations

import torch

DRAWS_AT_ONCE = 1 << 22
"""Exponentials made at a time: what bounds the memory of many draws from a large vocabulary."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit, the first of equal ones: fp32 [B,V] -> int32 [B] (numerics.md 9)."""
    return logits.argmax(dim=-1).to(torch.int32)


def sample(logits: torch.Tensor, temperature: float, exponentials: torch.Tensor) -> torch.Tensor:
    """arg max of softmax(logits / temperature) / exponentials, in logarithms: fp32 [B,V] twice -> int32 [B] (9).

    The logarithm of the softmax differs from the scaled logits by a number that all of a row share, so that no sum over
    the vocabulary is needed.
    """
    if temperature == 0:
        return greedy(logits)
    return greedy(logits / temperature - exponentials.log())


def draws(logits: torch.Tensor, temperature: float, count: int, seed: int) -> torch.Tensor:
    """`count` independent draws from softmax(logits / temperature): fp32 [B,V] -> int32 [B,count] (numerics.md 9)."""
    generator = torch.Generator(logits.device).manual_seed(seed)
    batch, vocabulary = logits.shape
    at_once = max(1, DRAWS_AT_ONCE // (batch * vocabulary))
    drawn = []
    for first in range(0, count, at_once):
        repeated = logits.repeat_interleave(min(at_once, count - first), dim=0)
        exponentials = torch.empty_like(repeated).exponential_(generator=generator)
        drawn.append(sample(repeated, temperature, exponentials).view(batch, -1))
    return torch.cat(drawn, dim=1)
