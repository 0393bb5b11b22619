"""From logits to a token (numerics.md 9)."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit, the first of equal ones: fp32 [B,V] -> int32 [B] (numerics.md 9)."""
    return logits.argmax(dim=-1).to(torch.int32)
