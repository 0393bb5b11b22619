"""Launchers that work on the packed state of requests, at the released sizes, on tensors without data."""

from __future__ import annotations

from functools import partial

from launches import BATCH, CONFIG, DECODE, DEEP_CONTEXT, LAYER, PREFILL, Plan, bf16, fp32

# ruff: isort: split
import torch

from optimized import compressor, packed_attention, rows
from optimized.runtime import Batch, Runtime

WINDOW_ONLY, PAIRED = 0, CONFIG.kv_source_layers[0]
"""A layer without compressed rows, and a source whose rows stand for two tokens."""
DRAFTS = 4
VERIFIED = DRAFTS + 1
"""Tokens of a verification: the newest and its drafts."""


def _call(requests: int, length: int) -> tuple[Runtime, Batch]:
    """A runtime of the layers above, and a call of so many requests."""
    layers = (WINDOW_ONLY, PAIRED, LAYER)
    runtime = Runtime(CONFIG, requests, DEEP_CONTEXT, requests * length, DRAFTS, layers)
    return runtime, runtime.begin(range(requests), [0] * requests, length)


def _write(kind: str, requests: int, length: int) -> None:
    runtime, batch = _call(requests, length)
    state = runtime.layers[LAYER]
    form, out = {
        "window": (runtime.window_format, state.window),
        "compressed": (runtime.compressed_format, state.compressed),
        "index-keys": (runtime.index_key_format, state.index_keys),
    }[kind]
    assert out is not None
    norm = None if kind == "compressed" else (bf16(form.width), CONFIG.norm_eps)
    x = bf16(requests, length, form.width)
    rows.write_rows(form, x, runtime.rotary(LAYER), batch.slots, batch.start, length, 1, out, norm)


def _write_pairs(requests: int, length: int) -> None:
    runtime, batch = _call(requests, length)
    out = runtime.layers[PAIRED].compressed
    assert out is not None
    x = bf16(requests, -(-length // 2), CONFIG.head_dim)
    tables = runtime.rotary(PAIRED)
    rows.write_rows(runtime.compressed_format, x, tables, batch.slots, batch.start, length, 2, out)


def _pool(requests: int, length: int) -> None:
    runtime, batch = _call(requests, length)
    projected = fp32(requests, length, CONFIG.head_dim)
    norm = bf16(CONFIG.head_dim)
    compressor.pool(projected, projected, 2, runtime.layers[PAIRED], batch, norm, CONFIG.norm_eps)


def _attend(layer_id: int, requests: int, length: int) -> None:
    runtime, batch = _call(requests, length)
    q = bf16(requests, length, CONFIG.n_heads, CONFIG.head_dim)
    call_rows = None
    if length > DRAFTS + 1:
        shape = (requests, length, runtime.window_format.bytes)
        call_rows = torch.empty(shape, dtype=torch.uint8, device=q.device)
    packed_attention.packed_attention(runtime, layer_id, batch, q, fp32(CONFIG.n_heads), call_rows)


def _by_call(name: str, requests: int, length: int) -> list[Plan]:
    return [
        *(
            Plan(f"write_rows/{kind}/{name}", partial(_write, kind, requests, length))
            for kind in ("window", "compressed", "index-keys")
        ),
        Plan(f"write_rows/pairs/{name}", partial(_write_pairs, requests, length)),
        Plan(f"pool/{name}", partial(_pool, requests, length)),
        Plan(f"packed_attention/window-only/{name}", partial(_attend, WINDOW_ONLY, requests, length)),
        Plan(f"packed_attention/compressed/{name}", partial(_attend, LAYER, requests, length)),
    ]


PLANS: tuple[Plan, ...] = (
    *_by_call("prefill", 1, PREFILL),
    *_by_call("batch", BATCH, 1),
    *_by_call("decode", DECODE, 1),
    *_by_call("verify", 1, VERIFIED),
)
