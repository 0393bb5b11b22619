"""Sparse attention over listed rows, and the indexer's scores with the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conformance.bench.problem import (
    Arguments,
    Counts,
    Ints,
    Problem,
    Sizes,
    SizesError,
    configured,
    draws,
    lazily,
    made,
    one_method,
)
from conformance.interface import Implementation
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, concatenate
from conformance.judge.choices import Selection
from conformance.judge.components import indexer, sparse_attention as rules_of
from conformance.judge.expectations import Verdict, Within
from conformance.tensors import Tensor

BF16_BYTES, INDEX_BYTES = 2, 4
ATTENDING_POOL = 8
LAYER = 20
PIECE = 1 << 15
"""Index keys whose bounds are computed at a time."""
PACKED_KEY_BYTES = 68
"""An index key of 128 FP4 values and 4 scales, as the model caches it (numerics.md 6.3)."""


def _lists(pool: int, rows: int, listed: int) -> Ints:
    """Different rows in no order, a few of them none (-1), the first list of the pool one that repeats a row."""
    generator = draws("sparse_attention/lists")
    lists = np.stack([generator.permutation(rows)[:listed] for _ in range(pool)]).astype(np.int64)
    lists[generator.random(lists.shape) < 1 / 64] = -1
    lists[0, 1] = lists[0, 0]
    return lists


def sparse_attention(sizes: Sizes) -> Problem:
    """`requests` with `tokens` queries each, over `listed` of `rows` rows.

    One token is a decode step: each request has rows of its own, and the pool is one of requests.  With more it is a
    prefill of one request, whose queries share its rows.
    """
    _, config = configured(n_heads=sizes["heads"])
    requests, tokens, heads, width = sizes["requests"], sizes["tokens"], sizes["heads"], config.head_dim
    rows, listed = sizes["rows"], sizes["listed"]
    if listed > rows or (tokens > 1) == (requests > 1):
        raise SizesError(
            f"requests = {requests}, tokens = {tokens}, listed = {listed} of {rows}: one of the first is 1"
        )
    decode, pool = tokens == 1, ATTENDING_POOL
    bind, taps = one_method("sparse_attention")
    q = made("sparse_attention/q", "input", pool, heads, width)
    kv = made("sparse_attention/kv", "input", pool if decode else 1, rows, width)
    lists, sink, scale = _lists(pool, rows, listed), made("sparse_attention/sink", "sink", heads), width**-0.5
    # Requests of one query, or one request of many.
    split = (pool, 1) if decode else (1, pool)
    expected = lazily(
        lambda: rules_of.attend(
            Bounded.exact(q.values().reshape(*split, heads, width)),
            Bounded.exact(kv.values()),
            rules_of.counts_of(lists.reshape(*split, listed), rows),
            None,
            sink.values(),
            scale,
        ).reshape(pool, heads, width)
    )

    def own(call: int, which: Ints) -> Arguments:
        lead = (requests, tokens)
        return {
            "q": q[which].reshape(*lead, heads, width),
            "indices": Tensor("I32", lists[which].reshape(*lead, listed).astype(np.int32)),
            "kv": kv[which] if decode else kv,
        }

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("attn_o", expected()[which], "BF16", ("row", "head", "feature")).judge(results)]

    queries = requests * tokens
    read = requests * min(rows, tokens * listed) * width * BF16_BYTES
    counts = Counts(
        4.0 * queries * heads * listed * width,
        read + 2 * queries * heads * width * BF16_BYTES + queries * listed * INDEX_BYTES,
    )
    return Problem((requests, tokens), pool, own, judge, counts, bind, taps, {"sink": sink, "scale": scale})


def _score_then_select(implementation: Implementation, arguments: Arguments) -> Callable[[], Any]:
    score, select = implementation.index_scores, implementation.select_positions
    chosen = {name: arguments[name] for name in ("config", "layer_id", "positions")}

    def call() -> Any:
        scores = score(**arguments)
        return scores, select(scores=scores, **chosen)

    return call


def index_select(sizes: Sizes) -> Problem:
    """Scores of `positions` keys for one query of each of `requests` requests, and the best of them."""
    mapping, config = configured()
    requests, count = sizes["requests"], sizes["positions"]
    heads, width, pool = config.index_n_heads, config.index_head_dim, 2
    queries = made("index/q", "input", pool, heads, width)
    head_weights = made("index/weights", "input", pool, heads)
    keys = made("index/keys", "input", count, width)
    # The second of the pool does not see the last positions.
    seen = np.asarray([count - 1, max(0, count - 1 - count // 8)])
    visible = indexer.visibility(config, LAYER, seen[None], count)[0]
    expected = lazily(lambda: _scores(queries, head_weights, keys, visible))

    def own(call: int, which: Ints) -> Arguments:
        return {
            "queries": queries[which][:, None],
            "head_weights": head_weights[which][:, None],
            "positions": Tensor("I64", seen[which][:, None]),
        }

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        scores = results["index_score"]
        stored = deviations.score_format().name
        of_scores = Within("index_score", expected()[which], stored, ("row", "position")).judge(results)
        if not of_scores.passed:
            return [of_scores]
        own_scores = scores.values()[None]
        rule = Selection("selected", own_scores, own_scores, visible[which][None], config.index_topk, ("", "row"))
        return [of_scores, rule.judge({"selected": Tensor(results["selected"].dtype, results["selected"].data[None])})]

    key_bytes, selected = width * BF16_BYTES, min(config.index_topk, count)
    shared = Tensor("BF16", np.broadcast_to(keys.data, (requests, count, width)))
    return Problem(
        (requests, 1),
        pool,
        own,
        judge,
        Counts(
            2.0 * requests * count * heads * (width + 1),
            requests * (count * (key_bytes + BF16_BYTES) + selected * INDEX_BYTES),
            packed=requests * count * PACKED_KEY_BYTES,
        ),
        _score_then_select,
        ("index_score", "selected"),
        {"config": mapping, "layer_id": LAYER, "keys": shared, "candidates": None},
    )


def _scores(queries: Tensor, head_weights: Tensor, keys: Tensor, visible: Any) -> Bounded:
    """Bounds [pool, positions], a piece of the keys at a time."""
    q, w = Bounded.exact(queries.values()[None]), Bounded.exact(head_weights.values()[None])
    pieces = []
    for start in range(0, keys.shape[0], PIECE):
        piece = slice(start, start + PIECE)
        of_keys = Bounded.exact(keys[piece].values()[None])
        pieces.append(indexer.index_scores(q, w, of_keys, visible[None, :, piece])[0])
    return concatenate(pieces, -1)
