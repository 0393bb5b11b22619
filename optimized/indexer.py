"""The indexer as kernels: keys, queries, head weights, scores and selection (numerics.md 6.3)."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.config import Config
from optimized.linear import linear_bf16, linear_fp8
from optimized.norm import rms_norm
from optimized.rotary import rotate
from optimized.selection import best_positions

POSITION_BLOCK = 512 if INTERPRETED else 64

Weights = Mapping[str, torch.Tensor]


@triton.jit
def weighted_scores(q, share, k):
    """Σ_h w_h · relu(q_h · k_j): bf16 q [HEADS, d], fp32 w [HEADS], bf16 k [POSITIONS, d] -> fp32 [POSITIONS].

    Two roundings to bf16; the caller's store is the third.
    """
    products = tl.dot(q, tl.trans(k)).to(tl.bfloat16).to(tl.float32)
    # Written as a comparison, so that NaN stays NaN.
    positive = tl.where(products < 0.0, 0.0, products)
    return tl.sum((positive * share[:, None]).to(tl.bfloat16).to(tl.float32), axis=0)


@triton.jit
def load_query(queries, head_weights, query, heads, WIDTH: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr):
    """The heads of a query, bf16 [HEADS, PADDED], and their weights, fp32 [HEADS]."""
    head = tl.arange(0, HEADS)
    feature = tl.arange(0, PADDED)
    known = (head < heads)[:, None] & (feature < WIDTH)[None, :]
    q = tl.load(queries + (query * heads + head)[:, None] * WIDTH + feature[None, :], mask=known, other=0.0)
    return q, tl.load(head_weights + query * heads + head, mask=head < heads, other=0.0).to(tl.float32)


@triton.jit
def _scores_kernel(
    queries,
    head_weights,
    keys,
    visible,
    candidates,
    scores,
    queries_of_batch,
    heads,
    positions,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    RESTRICTED: tl.constexpr,
):
    """Scores of one query against a block of positions."""
    query = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    feature = tl.arange(0, PADDED)
    q, share = load_query(queries, head_weights, query, heads, WIDTH, PADDED, HEADS)
    batch = query // queries_of_batch
    inside = position < positions
    k = tl.load(
        keys + (batch * positions + position)[:, None] * WIDTH + feature[None, :],
        mask=inside[:, None] & (feature < WIDTH)[None, :],
        other=0.0,
    )
    score = weighted_scores(q, share, k)
    seen = position < tl.load(visible + query)
    if RESTRICTED:
        seen = seen & (tl.load(candidates + query * positions + position, mask=inside, other=0) != 0)
    score = tl.where(seen, score, float("-inf"))
    tl.store(scores + query * positions + position, score.to(tl.bfloat16), mask=inside)


def visible_positions(config: Config, layer_id: int, positions: torch.Tensor) -> torch.Tensor:
    """Compressed positions that a token sees, ⌊(t+1)/r⌋: int64 [B,T] -> int64 [B,T] (numerics.md 6.3)."""
    return (positions + 1) // config.ratio(layer_id)


def index_keys(
    config: Config, layer_id: int, weights: Weights, latent: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 latent [B,n,d], positions [B,n] of first tokens -> bf16 [B,n,index_head_dim] (numerics.md 6.3)."""
    keys = linear_bf16(latent, weights["indexer.wk.weight"])
    keys = rms_norm(keys, weights["indexer.k_norm.weight"], config.norm_eps)
    return rotate(config, layer_id, keys, positions, form="fp4_e8m0")


def index_queries(
    config: Config, layer_id: int, weights: Weights, q_latent: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """bf16 q_latent [B,T,q_lora_rank] -> bf16 [B,T,index_n_heads,index_head_dim] (numerics.md 6.3)."""
    queries = linear_fp8(q_latent, weights["indexer.wq_b.weight"], weights["indexer.wq_b.scale"])
    queries = torch.unflatten(queries, -1, (config.index_n_heads, config.index_head_dim))
    return rotate(config, layer_id, queries, positions, form="fp4_e8m0")


def index_weights(config: Config, layer_id: int, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """bf16 x [B,T,D] -> scaled head weights bf16 [B,T,index_n_heads] (numerics.md 6.3)."""
    projected = linear_bf16(x, weights["indexer.weights_proj.weight"])
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return (projected.float() * factor).bfloat16()


def index_scores(
    config: Config,
    layer_id: int,
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    candidates: torch.Tensor | None,
) -> torch.Tensor:
    """bf16 queries [B,T,H,d], weights [B,T,H], keys [B,C,d], bool candidates [B,T,C] or None -> bf16 [B,T,C].

    -inf where a position is not visible to the query or not among the candidates (numerics.md 6.3).
    """
    queries, keys = require_bf16("queries", queries), require_bf16("keys", keys)
    batch, length, heads, width = queries.shape
    count = keys.shape[1]
    keys = require_shape("keys", keys, batch, count, width)
    head_weights = require_shape("head_weights", require_bf16("head_weights", head_weights), batch, length, heads)
    positions = require_shape("positions", positions, batch, length)
    if candidates is not None:
        candidates = require_shape("candidates", candidates, batch, length, count)
    scores = torch.empty(batch, length, count, dtype=torch.bfloat16, device=queries.device)
    if not scores.numel():
        return scores
    block = min(POSITION_BLOCK, max(16, triton.next_power_of_2(count)))
    _scores_kernel[(batch * length, triton.cdiv(count, block))](
        queries,
        head_weights,
        keys,
        visible_positions(config, layer_id, positions).contiguous(),
        scores if candidates is None else candidates.view(torch.uint8),
        scores,
        length,
        heads,
        count,
        WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)),
        HEADS=max(16, triton.next_power_of_2(heads)),
        POSITIONS=block,
        RESTRICTED=candidates is not None,
    )
    return scores


def select_positions(config: Config, layer_id: int, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bf16 scores [B,T,C] -> int32 [B,T,min(index_topk,C)], ascending, then -1 (numerics.md 6.3)."""
    wanted = min(config.index_topk, scores.shape[-1])
    return best_positions(scores, wanted, visible_positions(config, layer_id, positions))
