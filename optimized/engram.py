"""Engram as kernels: the hash on the device and the fused write (numerics.md 8)."""

from __future__ import annotations

from optimized.device import DEVICE, INTERPRETED

# ruff: isort: split
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_codes, require_shape
from optimized.codecs import decode_e4m3, decode_e8m0
from optimized.config import Config
from optimized.hyper_connections import sigmoid
from optimized.linear import linear_fp8

MULTIPLIER_SEED = 10007
SMALLEST_DOT = tl.constexpr(1e-6)
TOKENS_PER_PROGRAM = 256 if INTERPRETED else 32
ROWS_PER_PROGRAM = 256 if INTERPRETED else 4


def _sieve(first: int, count: int) -> np.ndarray:
    """Which of `count` numbers from `first` on are prime."""
    prime = np.ones(count, dtype=bool)
    prime[: max(0, min(count, 2 - first))] = False
    for divisor in range(2, int((first + count) ** 0.5) + 1):
        start = max(divisor * divisor, -(-first // divisor) * divisor)
        prime[start - first :: divisor] = False
    return prime


@lru_cache(maxsize=32)
def _layout(config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    needed = len(config.engram_layer_ids) * sizes * heads
    first, span = config.engram_vocab_size, 1024
    # The search begins anew for every n-gram size, but no prime is used twice: so the primes come in order.
    while True:
        primes = first + np.flatnonzero(_sieve(first, span))
        if len(primes) >= needed:
            break
        span *= 2
    shape = (len(config.engram_layer_ids), sizes, heads)
    primes = primes[:needed].astype(np.int64).reshape(shape)
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    multipliers = np.stack(
        [
            np.random.default_rng(MULTIPLIER_SEED * layer).integers(0, bound, size=config.engram_max_ngram_size) * 2 + 1
            for layer in config.engram_layer_ids
        ]
    )
    columns = primes.reshape(shape[0], -1)
    offsets = columns.cumsum(axis=1) - columns
    return torch.from_numpy(multipliers), torch.from_numpy(primes), torch.from_numpy(offsets)


def engram_layout(config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multipliers [L, max_ngram], primes [L, max_ngram - 1, heads], column offsets [L, columns], all int64 (8)."""
    multipliers, primes, offsets = _layout(config)
    return multipliers.clone(), primes.clone(), offsets.clone()


@triton.jit
def _hash_kernel(
    token_map,
    ids,
    barrier,
    multipliers,
    primes,
    offsets,
    out,
    tokens,
    length,
    pad_id,
    LOOK_BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Table rows of each token from its own and the LOOK_BACK ids before it, which stand before the call's."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    own = (token // length) * (length + LOOK_BACK) + token % length + LOOK_BACK
    pad = tl.load(token_map + pad_id).to(tl.int64)
    head = tl.arange(0, PADDED)
    known = inside[:, None] & (head < HEADS)[None, :]
    blocked = tl.zeros((TOKENS,), tl.int32)
    hashed = tl.zeros((TOKENS,), tl.int64)
    for distance in tl.static_range(LOOK_BACK + 1):
        # A look-back stops for good: what lies beyond a barrier is never read.
        blocked = blocked | tl.load(barrier + own - distance, mask=inside, other=1).to(tl.int32)
        token_id = tl.load(ids + own - distance, mask=inside, other=0)
        compressed = tl.load(token_map + token_id, mask=inside, other=0).to(tl.int64)
        compressed = tl.where(blocked != 0, pad, compressed)
        hashed = hashed ^ (compressed * tl.load(multipliers + distance))
        if distance > 0:
            column = (distance - 1) * HEADS + head
            prime = tl.load(primes + column, mask=head < HEADS, other=1)[None, :]
            # The remainder has the sign of the hash.
            rest = hashed[:, None] % prime
            rest = tl.where(rest < 0, rest + prime, rest)
            row = rest + tl.load(offsets + column, mask=head < HEADS, other=0)[None, :]
            tl.store(out + token[:, None] * (LOOK_BACK * HEADS) + column[None, :], row, mask=known)


@triton.jit
def _fetch_kernel(table, scale, rows, out, fetched, width, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Rows of the table, dequantised to bf16."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + place, mask=place < fetched, other=0)
    feature = tl.arange(0, PADDED)
    inside = (place < fetched)[:, None] & (feature < width)[None, :]
    codes = tl.load(table + row[:, None] * width + feature[None, :], mask=inside, other=0)
    factor = tl.load(scale + row[:, None] * tl.cdiv(width, 32) + feature[None, :] // 32, mask=inside, other=127)
    values = decode_e4m3(codes) * decode_e8m0(factor)
    tl.store(out + place[:, None] * width + feature[None, :], values.to(tl.bfloat16), mask=inside)


@triton.jit
def _write_kernel(
    h,
    projected,
    q_weight,
    k_weight,
    image_mask,
    out,
    eps,
    root,
    width: tl.constexpr,
    STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    IMAGES: tl.constexpr,
):
    """One stream of one token: its gate from its key, then the shared value."""
    place = tl.program_id(0).to(tl.int64)
    token, stream = place // STREAMS, place % STREAMS
    feature = tl.arange(0, PADDED)
    inside = feature < width
    own = tl.load(h + place * width + feature, mask=inside, other=0.0).to(tl.float32)
    start = projected + token * ((STREAMS + 1) * width)
    key = tl.load(start + stream * width + feature, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(start + STREAMS * width + feature, mask=inside, other=0.0).to(tl.float32)
    query_factor = tl.load(q_weight + stream * width + feature, mask=inside, other=0.0).to(tl.float32)
    key_factor = tl.load(k_weight + stream * width + feature, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(own * query_factor * key_factor * key, axis=0)
    dot = dot * tl.rsqrt(tl.sum(own * own, axis=0) / width + eps)
    dot = dot * tl.rsqrt(tl.sum(key * key, axis=0) / width + eps) * root
    size = tl.sqrt_rn(tl.maximum(tl.abs(dot), SMALLEST_DOT))
    # The sign of zero is zero.
    signed = tl.where(dot > 0.0, size, tl.where(dot < 0.0, -size, 0.0 * dot))
    gate = sigmoid(signed)
    if IMAGES:
        gate = tl.where(tl.load(image_mask + token) != 0, 0.0, gate)
    tl.store(out + place * width + feature, (own + gate * value).to(tl.bfloat16), mask=inside)


@lru_cache(maxsize=32)
def _layer_layout(config: Config, layer_id: int) -> tuple[torch.Tensor, ...]:
    """Multipliers, primes and offsets of one layer on the device, so that a step moves nothing there.

    Raises:
        ValueError: the layer has no Engram.
    """
    if layer_id not in config.engram_layer_ids:
        raise ValueError(f"layer_id: layer {layer_id} has no Engram, layers {list(config.engram_layer_ids)} have")
    layer = config.engram_layer_ids.index(layer_id)
    return tuple(table[layer].to(DEVICE).contiguous() for table in _layout(config))


def barriers(input_ids: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
    """What stops a look-back among the tokens of a call: uint8 [B,T], 1 at image tokens (numerics.md 8)."""
    if image_mask is None:
        return torch.zeros(input_ids.shape, dtype=torch.uint8, device=input_ids.device)
    return require_shape("image_mask", image_mask, *input_ids.shape).to(torch.uint8)


def engram_hash(
    config: Config,
    layer_id: int,
    token_map: torch.Tensor,
    input_ids: torch.Tensor,
    image_mask: torch.Tensor | None,
) -> torch.Tensor:
    """int32 token_map [vocabulary], int32 ids [B,T] of positions 0... -> table rows int64 [B,T,columns].

    Column offsets included, columns ordered by n-gram size, then head (numerics.md 8).
    """
    look_back = config.engram_max_ngram_size - 1
    # Before a request's first token stand barriers.
    ids = torch.nn.functional.pad(input_ids.to(torch.int32), (look_back, 0))
    barrier = torch.nn.functional.pad(barriers(input_ids, image_mask), (look_back, 0), value=1)
    return hash_behind(config, layer_id, token_map, ids, barrier)


def hash_behind(
    config: Config, layer_id: int, token_map: torch.Tensor, ids: torch.Tensor, barrier: torch.Tensor
) -> torch.Tensor:
    """Table rows of a call's tokens, given those before it: int32 ids and uint8 barriers [B,max_ngram−1+T] (8)."""
    look_back = config.engram_max_ngram_size - 1
    multipliers, primes, offsets = _layer_layout(config, layer_id)
    batch, length = ids.shape[0], ids.shape[1] - look_back
    out = torch.empty(batch, length, offsets.numel(), dtype=torch.int64, device=ids.device)
    if not out.numel():
        return out
    heads = config.engram_n_heads
    _hash_kernel[(triton.cdiv(batch * length, TOKENS_PER_PROGRAM),)](
        token_map.to(torch.int32).contiguous(),
        ids.contiguous(),
        barrier.contiguous(),
        multipliers,
        primes,
        offsets,
        out,
        batch * length,
        length,
        config.engram_pad_id,
        LOOK_BACK=look_back,
        HEADS=heads,
        PADDED=triton.next_power_of_2(heads),
        TOKENS=TOKENS_PER_PROGRAM,
    )
    return out


def engram_write(
    config: Config,
    layer_id: int,
    weights: Mapping[str, torch.Tensor],
    h: torch.Tensor,
    rows: torch.Tensor,
    image_mask: torch.Tensor | None,
) -> torch.Tensor:
    """bf16 h [B,T,S,D] and int64 table rows [B,T,columns] -> bf16 h [B,T,S,D].

    `weights`: `embed.weight`, `embed.scale`, `wkv.weight`, `wkv.scale`, `q_weight`, `k_weight`  (numerics.md 8)
    """
    h = require_bf16("h", h)
    table = require_codes("embed.weight", weights["embed.weight"], torch.float8_e4m3fn)
    scale = require_codes("embed.scale", weights["embed.scale"], torch.float8_e8m0fnu)
    width, streams, dim = table.shape[1], *h.shape[-2:]
    q_weight = require_shape("q_weight", weights["q_weight"], streams, dim)
    k_weight = require_shape("k_weight", weights["k_weight"], streams, dim)
    require_shape("rows", rows, *h.shape[:2], rows.shape[-1])
    if image_mask is not None:
        require_shape("image_mask", image_mask, *h.shape[:2])
    fetched = torch.empty(*rows.shape, width, dtype=torch.bfloat16, device=h.device)
    out = torch.empty_like(h)
    if not out.numel():
        return out
    _fetch_kernel[(triton.cdiv(rows.numel(), ROWS_PER_PROGRAM),)](
        table,
        scale,
        rows.contiguous(),
        fetched,
        rows.numel(),
        width,
        PADDED=triton.next_power_of_2(width),
        ROWS=ROWS_PER_PROGRAM,
    )
    projected = linear_fp8(fetched.flatten(-2), weights["wkv.weight"], weights["wkv.scale"])
    _write_kernel[(h.shape[:-1].numel(),)](
        h,
        projected,
        q_weight,
        k_weight,
        out if image_mask is None else image_mask.contiguous().view(torch.uint8),
        out,
        config.norm_eps,
        dim**-0.5,
        dim,
        STREAMS=streams,
        PADDED=triton.next_power_of_2(dim),
        IMAGES=image_mask is not None,
        num_warps=8,
    )
    return out
