"""Engram's hash: which table rows a token fetches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.bench.problem import Arguments, Counts, Ints, Problem, Sizes, configured, draws, lazily, one_method
from conformance.judge.components.engram import table_rows
from conformance.judge.expectations import Exact, Verdict
from conformance.tensors import Tensor

REQUEST_POOL = 16
LAYER = 14
ID_BYTES, ROW_BYTES = 4, 8


def engram_hash(sizes: Sizes) -> Problem:
    """Table rows of `requests` requests of `tokens` ids; the pool is one of requests, since a token looks back."""
    mapping, config = configured()
    requests, tokens = sizes["requests"], sizes["tokens"]
    bind, taps = one_method("engram_hash")
    generator = draws("engram_hash")
    token_map = generator.integers(0, config.engram_compressed_vocab_size, config.vocab_size).astype(np.int64)
    ids = generator.integers(0, config.vocab_size, (REQUEST_POOL, tokens)).astype(np.int64)
    images = generator.random((REQUEST_POOL, tokens)) < 1 / 8
    expected = lazily(lambda: Tensor("I64", table_rows(config, LAYER, token_map, ids, images)))

    def own(call: int, which: Ints) -> Arguments:
        return {"input_ids": Tensor("I32", ids[which].astype(np.int32)), "image_mask": Tensor("BOOL", images[which])}

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Exact("engram_hash", expected()[which], ("row", "position", "column")).judge(results)]

    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    all_tokens = requests * tokens
    return Problem(
        (requests,),
        REQUEST_POOL,
        own,
        judge,
        # A product, an exclusive or, a remainder and a sum a column and shift.
        Counts(4.0 * all_tokens * columns, all_tokens * (2 * ID_BYTES + 1 + ROW_BYTES * columns)),
        bind,
        taps,
        {"config": mapping, "layer_id": LAYER, "token_map": Tensor("I32", token_map.astype(np.int32))},
    )
