"""Attention over a list of rows, with a sink (numerics.md 6, item 5)."""

from __future__ import annotations

import torch

from reference.precision import to_bf16

LIST_BLOCK = 64
RUNNING_MAXIMUM_START = -1e30
GATHERED_ELEMENTS = 1 << 21
"""Bound on the elements of the rows gathered at once; more queries than fit are worked off in turn."""


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    compute: torch.dtype,
) -> torch.Tensor:
    """Walk the list in blocks of 64 with a running maximum: shapes as `sparse_attention`."""
    batch = torch.arange(q.shape[0])[:, None, None]
    q, sink = q.to(compute), sink.to(compute)
    maximum = torch.full(q.shape[:-1], RUNNING_MAXIMUM_START, dtype=compute)
    denominator = torch.zeros_like(maximum)
    numerator = torch.zeros_like(q)
    for start in range(0, indices.shape[-1], LIST_BLOCK):
        listed = indices[..., start : start + LIST_BLOCK]
        rows = kv[batch, listed.clamp(min=0)].to(compute)
        scores = (q @ rows.transpose(-1, -2)) * scale
        scores = scores.masked_fill((listed < 0).unsqueeze(-2), -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        rescale = torch.exp(maximum - new_maximum)
        probabilities = torch.exp(scores - new_maximum.unsqueeze(-1))
        # The denominator sums the probabilities as they are; the value product takes them rounded.
        denominator = denominator * rescale + probabilities.sum(dim=-1)
        numerator = numerator * rescale.unsqueeze(-1) + to_bf16(probabilities).to(compute) @ rows
        maximum = new_maximum
    # Without a valid row the maximum is still -1e30, the sink's term is infinite, and the result is zero.
    denominator = denominator + torch.exp(sink - maximum)
    return to_bf16(numerator / denominator.unsqueeze(-1))


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """o = Σ exp(a_i − M)·kv_i / (Σ exp(a_i − M) + exp(sink − M)), a_i = q·kv_i · scale (numerics.md 6, item 5).

    bf16 q [B,T,H,d], kv [B,N,d] (key = value, shared by all heads), int32 indices [B,T,n] with -1 for none, fp32 sink
    [H] -> bf16 [B,T,H,d].  A duplicate index counts twice.
    """
    gathered = max(1, q.shape[0] * LIST_BLOCK * max(q.shape[-1], q.shape[-2]))
    step = max(1, GATHERED_ELEMENTS // gathered)
    pieces = [
        _attend(q_piece, kv, indices_piece, sink, scale, compute)
        for q_piece, indices_piece in zip(torch.split(q, step, dim=1), torch.split(indices, step, dim=1), strict=True)
    ]
    return torch.cat(pieces, dim=1)
