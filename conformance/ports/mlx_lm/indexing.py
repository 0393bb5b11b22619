"""Scoring and choosing by mlx-lm's indexer, which does everything in one call, with inputs put in its middle.

mlx-lm's `Indexer` projects, rotates and quantises queries, scores, masks, pools candidate blocks and takes the top-k.
Submodules that answer with given values make it begin where a component of the suite begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.interface import Unsupported
from conformance.ports.mlx_lm.arrays import Given, mx, to_mlx, to_torch
from conformance.ports.mlx_lm.loading import D
from conformance.ports.watching import Seen, Watched, replaced, seen, stop


def queries(indexer: Any, rope: Any, q_latent: Any, positions: Any) -> Any:
    """bf16 q_latent [N,1,q_lora_rank] of tokens at int positions [N] -> quantised queries [N,1,H,d]."""
    nothing = mx.zeros((q_latent.shape[0], 1, indexer.head_dim), mx.bfloat16)
    with replaced(D, _fake_quant_fp4=_stop_after(D._fake_quant_fp4)):
        return seen(
            lambda: indexer(q_latent, q_latent, index_k=nothing, candidates=None, rope=rope, start_pos=positions)
        )


def scores(indexer: Any, queries: Any, head_weights: Any, keys: Any, start: int, candidates: Any) -> Any:
    """Masked fp32 scores [B,T,C] of bf16 queries [B,T,H,d], weights [B,T,H] and keys [B,C,d].

    The head weights come scaled, so the indexer is told of one head of one feature, for which its factors are 1.
    """
    with (
        _scoring(indexer, queries, head_weights),
        replaced(D, mx=Watched(mx, argpartition=stop), _fake_quant_fp4=lambda x, **_: queries),
        replaced(indexer, is_candidate_source=False),
    ):
        return -seen(lambda: _run(indexer, keys, candidates, start, queries.shape[:2]))


def choices(indexer: Any, scores: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the indexer makes of scores [B,T,C]: selected positions int32 [B,T,k], and candidates bool [B,T,C] if any.

    Two heads, of weight 1 and -1, with queries 1 and -1, give back a key of one feature as its score, -inf included.
    """
    batch, length, rows = scores.shape
    selected, candidates = [], []
    queries = mx.broadcast_to(mx.array([[1.0], [-1.0]]), (batch, 1, 2, 1))
    for t in range(length):
        keys = to_mlx(scores[:, t].float())[..., None]
        with (
            _scoring(indexer, queries, mx.broadcast_to(mx.array([1.0, -1.0]), (batch, 1, 2))),
            replaced(D, _fake_quant_fp4=lambda x, **_: queries),
        ):
            chosen, mask = _run(indexer, keys, None, one_position(positions[:, t]), (batch, 1))
        selected.append(to_torch(chosen))
        candidates += [] if mask is None else [to_torch(mx.broadcast_to(mask, (batch, 1, rows)))]
    return in_order(torch.cat(selected, dim=1)), torch.cat(candidates, dim=1) if candidates else None


def in_order(selected: torch.Tensor) -> torch.Tensor:
    """Selected positions ascending, then -1: mlx-lm leaves them in the order of its partition."""
    last = torch.iinfo(selected.dtype).max
    ordered = torch.where(selected < 0, last, selected).sort(dim=-1).values
    return torch.where(ordered == last, -1, ordered)


def one_position(start_pos: torch.Tensor) -> int:
    """The position that all requests share: mlx-lm has one offset for a batch.

    Raises:
        Unsupported: they are at different ones.
    """
    first = int(start_pos.flatten()[0])
    if not bool((start_pos == first).all()):
        raise Unsupported("mlx-lm: one position for all requests of a batch")
    return first


@contextmanager
def _scoring(indexer: Any, queries: Any, head_weights: Any) -> Iterator[None]:
    placeholder = Given(mx.zeros((*queries.shape[:2], 1)))
    with replaced(
        indexer,
        q_b_proj=placeholder,
        weights_proj=Given(head_weights),
        num_heads=1,
        head_dim=1,
        rope_dim=0,
    ):
        yield


def _run(indexer: Any, keys: Any, candidates: Any, start: int, shape: tuple[int, int]) -> Any:
    nothing = mx.zeros((*shape, 1))
    return indexer(nothing, nothing, index_k=keys, candidates=candidates, rope=None, start_pos=start)


def _stop_after(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        raise Seen(function(*args, **options))

    return call
