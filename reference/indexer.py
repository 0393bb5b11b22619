"""The indexer: which compressed positions a query attends to (numerics.md 6.3)."""

from __future__ import annotations

from typing import Literal

import torch

from reference.config import Config
from reference.linear import linear_bf16, linear_fp8
from reference.norm import rms_norm
from reference.parameters import Weights
from reference.precision import to_bf16
from reference.quantize import fake_quantize_fp4_e8m0
from reference.rotary import rotate

Ties = Literal["library", "earliest"]
"""Which of several equal scores a top-k keeps; the model does not define it (numerics.md 6.4, topk-ties).

`library` is whatever torch.topk does, as in the published code: it depends on how many positions there are, so a prompt
in one call and the same prompt in chunks may keep different ones.  `earliest` keeps the first positions, always.
"""

SCORED_ELEMENTS = 1 << 21
"""Bound on the elements of the per-head scores held at once; more queries than fit are worked off in turn."""


def index_keys(
    config: Config,
    layer_id: int,
    weights: Weights,
    latent: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """k = RMSNorm(wk latent), rotated, fake Q4-E8M0 (numerics.md 6.3).

    bf16 latent [B,n,d] before rotation, int64 positions [B,n] of each group's first token -> bf16
    [B,n,index_head_dim].  `weights` are those of the attention.
    """
    keys = linear_bf16(latent, weights["indexer.wk.weight"], compute=compute)
    keys = rms_norm(keys, weights["indexer.k_norm.weight"], config.norm_eps, compute=compute)
    return fake_quantize_fp4_e8m0(rotate(config, layer_id, keys, positions, compute=compute))


def index_queries(
    config: Config,
    layer_id: int,
    weights: Weights,
    q_latent: torch.Tensor,
    positions: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """wq_b of the query latent by heads, rotated, fake Q4-E8M0 (numerics.md 6.3).

    bf16 q_latent [B,T,q_lora_rank], int64 [B,T] -> bf16 [B,T,index_n_heads,index_head_dim].
    """
    queries = linear_fp8(q_latent, weights["indexer.wq_b.weight"], weights["indexer.wq_b.scale"], compute=compute)
    queries = torch.unflatten(queries, -1, (config.index_n_heads, config.index_head_dim))
    return fake_quantize_fp4_e8m0(rotate(config, layer_id, queries, positions, compute=compute))


def index_weights(
    config: Config, layer_id: int, weights: Weights, x: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """w = (weights_proj x) · index_head_dim^(−1/2) · index_n_heads^(−1/2): bf16 [B,T,D] -> bf16 [B,T,index_n_heads].

    Rounded once before and once after the factor (numerics.md 6.3).
    """
    projected = linear_bf16(x, weights["indexer.weights_proj.weight"], compute=compute)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return to_bf16(projected.to(compute) * factor)


def visible_positions(config: Config, layer_id: int, positions: torch.Tensor) -> torch.Tensor:
    """Compressed positions that a token sees, ⌊(t+1)/r⌋: int64 [B,T] -> int64 [B,T] (numerics.md 6.3)."""
    return (positions + 1) // config.ratio(layer_id)


def _score_heads(
    queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """Σ_h w[t,h] · relu(q[t,h]·k[j]), each step rounded: [B,T,H,d], [B,T,H], [B,C,d] -> bf16 [B,T,C]."""
    dots = to_bf16(queries.to(compute) @ keys.to(compute).unsqueeze(1).transpose(-1, -2))
    weighted = to_bf16(torch.relu(dots).to(compute) * head_weights.to(compute).unsqueeze(-1))
    return to_bf16(weighted.to(compute).sum(dim=2))


def index_scores(
    config: Config,
    layer_id: int,
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of all compressed positions, −inf where not visible or not among the candidates (numerics.md 6.3).

    bf16 queries [B,T,H,d], weights [B,T,H], keys [B,C,d], int64 positions [B,T], bool candidates [B,T,C] or None ->
    bf16 [B,T,C].
    """
    step = max(1, SCORED_ELEMENTS // max(1, queries.shape[0] * queries.shape[2] * keys.shape[1]))
    pieces = zip(torch.split(queries, step, dim=1), torch.split(head_weights, step, dim=1), strict=True)
    scores = torch.cat([_score_heads(q_piece, w_piece, keys, compute) for q_piece, w_piece in pieces], dim=1)
    visible = torch.arange(keys.shape[1]) < visible_positions(config, layer_id, positions).unsqueeze(-1)
    if candidates is not None:
        visible = visible & candidates
    return scores.masked_fill(~visible, -torch.inf)


def best(scores: torch.Tensor, count: int, ties: Ties) -> torch.Tensor:
    """Indices of the `count` largest scores, in no particular order: [..., n] -> int64 [..., count]."""
    if ties == "library":
        return scores.topk(count, dim=-1).indices
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def select_positions(
    config: Config, layer_id: int, scores: torch.Tensor, positions: torch.Tensor, *, ties: Ties = "library"
) -> torch.Tensor:
    """The index_topk best positions in ascending order, then −1: bf16 [B,T,C] -> int32 [B,T,min(index_topk,C)].

    What is selected but not visible becomes −1 (numerics.md 6.3).
    """
    selected = best(scores, min(config.index_topk, scores.shape[-1]), ties).sort(dim=-1).values
    visible = visible_positions(config, layer_id, positions).unsqueeze(-1)
    return selected.masked_fill(selected >= visible, -1).to(torch.int32)
