"""Hyper-connections as kernels: coefficients, read and write of the residual streams (numerics.md 5).

The coefficients read the streams once: projection and mean square in one pass, in which several programs share the
features of a token.  What each has is added in a fixed order: nothing depends on the timing.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, TARGET_PROGRAMS, for_device

# ruff: isort: split
from typing import Any

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.config import Config
from optimized.norm import normalised

MOST_TOKENS = 128 if INTERPRETED else 64
FEWEST_TOKENS = 16
"""Tokens of a program: many where there are many, since each program reads the whole of its part of `fn`."""
CHUNK = for_device({"interpreted": 256, "sm_80": 64, "sm_120": 64, "any": 128})
"""Features that a program reads at a time."""
MOST_SPLITS = 2 if INTERPRETED else 16
"""Programs that share the features of a token; the kernel that adds up what they have reads all of it."""
SINKHORN_TOKENS = 1024 if INTERPRETED else 32


@triton.jit
def sigmoid(z):
    """1 / (1 + e^-z) with a true division."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-z))


@triton.jit
def exact_product(values, matrix, total):
    """total + values · matrixᵀ: bf16 [M, K], fp32 [N, K], fp32 [M, N].

    A number of 24 bits is the sum of three of 8, and their products with 8 bits are exact: bf16 matrix instructions
    then give what fp32 ones, which few devices have, would give.
    """
    high = matrix.to(tl.bfloat16)
    rest = matrix - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(values, tl.trans(low), total)
    total = tl.dot(values, tl.trans(middle), total)
    return tl.dot(values, tl.trans(high), total)


@triton.jit
def _mixes_kernel(
    h,
    fn,
    mixes,
    squares,
    tokens,
    width,
    MIXES: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """fn · h[token] and Σ h[token]² over every so manieth chunk of the features, fp32."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mix = tl.arange(0, PADDED)
    projected = tl.zeros((TOKENS, PADDED), tl.float32)
    square = tl.zeros((TOKENS,), tl.float32)
    for start in range(tl.program_id(1) * CHUNK, width, tl.num_programs(1) * CHUNK):
        feature = start + tl.arange(0, CHUNK)
        inside = (token < tokens)[:, None] & (feature < width)[None, :]
        values = tl.load(h + token[:, None] * width + feature[None, :], mask=inside, other=0.0)
        present = (mix < MIXES)[:, None] & (feature < width)[None, :]
        matrix = tl.load(fn + mix[:, None] * width + feature[None, :], mask=present, other=0.0)
        projected = exact_product(values, matrix, projected)
        wide = values.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
    own = tl.program_id(1) * tokens + token
    tl.store(squares + own, square, mask=token < tokens)
    tl.store(
        mixes + own[:, None] * MIXES + mix[None, :], projected, mask=(token < tokens)[:, None] & (mix < MIXES)[None, :]
    )


@triton.jit
def _coefficients_kernel(
    mixes,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    tokens,
    width,
    splits,
    norm_eps,
    eps,
    ROUNDS: tl.constexpr,
    STREAMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Gates and the Sinkhorn matrix of each token; PADDED is STREAMS up to a power of two."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    stream = tl.arange(0, PADDED)
    known = stream < STREAMS
    inside = (token < tokens)[:, None] & known[None, :]
    entry = stream[:, None] * STREAMS + stream[None, :]
    known_entry = known[:, None] & known[None, :]
    inside_entry = (token < tokens)[:, None, None] & known_entry[None, :, :]

    square = tl.zeros((TOKENS,), tl.float32)
    pre_mix = tl.zeros((TOKENS, PADDED), tl.float32)
    post_mix = tl.zeros((TOKENS, PADDED), tl.float32)
    matrix = tl.zeros((TOKENS, PADDED, PADDED), tl.float32)
    for split in range(splits):
        own = split * tokens + token
        row = mixes + own * ((2 + STREAMS) * STREAMS)
        square += tl.load(squares + own, mask=token < tokens, other=0.0)
        pre_mix += tl.load(row[:, None] + stream[None, :], mask=inside, other=0.0)
        post_mix += tl.load(row[:, None] + STREAMS + stream[None, :], mask=inside, other=0.0)
        matrix += tl.load(row[:, None, None] + 2 * STREAMS + entry[None, :, :], mask=inside_entry, other=0.0)
    inverse = tl.rsqrt(square / width + norm_eps)

    place = token[:, None] * STREAMS + stream[None, :]
    shift = tl.load(base + stream, mask=known, other=0.0)[None, :]
    gate = pre_mix * inverse[:, None] * tl.load(scale) + shift
    tl.store(pre + place, sigmoid(gate) + eps, mask=inside)
    shift = tl.load(base + STREAMS + stream, mask=known, other=0.0)[None, :]
    gate = post_mix * inverse[:, None] * tl.load(scale + 1) + shift
    tl.store(post + place, 2.0 * sigmoid(gate), mask=inside)

    shift = tl.load(base + 2 * STREAMS + entry, mask=known_entry, other=0.0)
    matrix = matrix * inverse[:, None, None] * tl.load(scale + 2) + shift[None, :, :]
    matrix = tl.where(known_entry[None, :, :], matrix, float("-inf"))
    matrix = tl.exp(matrix - tl.max(tl.where(known[None, None, :], matrix, float("-inf")), axis=2)[:, :, None])
    matrix = tl.where(known_entry[None, :, :], matrix, 0.0)
    # The padding is divided by one and stays zero.
    rows = tl.where(known[None, :], tl.sum(matrix, axis=2), 1.0)
    matrix = tl.where(known_entry[None, :, :], tl.div_rn(matrix, rows[:, :, None]) + eps, 0.0)
    columns = tl.where(known[None, :], tl.sum(matrix, axis=1) + eps, 1.0)
    matrix = tl.div_rn(matrix, columns[:, None, :])
    for _ in range(ROUNDS - 1):
        rows = tl.where(known[None, :], tl.sum(matrix, axis=2) + eps, 1.0)
        matrix = tl.div_rn(matrix, rows[:, :, None])
        columns = tl.where(known[None, :], tl.sum(matrix, axis=1) + eps, 1.0)
        matrix = tl.div_rn(matrix, columns[:, None, :])
    tl.store(comb + token[:, None, None] * (STREAMS * STREAMS) + entry[None, :, :], matrix, mask=inside_entry)


@triton.jit
def _read_kernel(
    h,
    pre,
    weight,
    out,
    tokens,
    eps,
    width: tl.constexpr,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
):
    """The mix of the streams, and with NORM the sublayer's RMSNorm of it."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for stream in tl.static_range(STREAMS):
        share = tl.load(pre + token * STREAMS + stream, mask=token < tokens, other=0.0)
        offsets = (token[:, None] * STREAMS + stream) * width + feature[None, :]
        total += share[:, None] * tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
    total = total.to(tl.bfloat16)
    if NORM:
        factor = tl.load(weight + feature, mask=feature < width, other=0.0).to(tl.float32)
        total = normalised(total.to(tl.float32), factor, eps, width).to(tl.bfloat16)
    tl.store(out + token[:, None] * width + feature[None, :], total, mask=inside)


@triton.jit
def _write_kernel(
    y, h, post, comb, out, tokens, width, STREAMS: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    update = tl.load(y + token[:, None] * width + feature[None, :], mask=inside, other=0.0).to(tl.float32)
    # Every stream is read once, and held while all are written.
    streams = ()
    for summed in tl.static_range(STREAMS):
        offsets = (token[:, None] * STREAMS + summed) * width + feature[None, :]
        values = tl.load(h + offsets, mask=inside, other=0.0).to(tl.float32)
        streams += (values,)  # type: ignore[assignment]
    for written in tl.static_range(STREAMS):
        mixed = tl.zeros((TOKENS, FEATURES), tl.float32)
        for summed in tl.static_range(STREAMS):
            entry = tl.load(comb + (token * STREAMS + summed) * STREAMS + written, mask=token < tokens, other=0.0)
            mixed += entry[:, None] * streams[summed]
        share = tl.load(post + token * STREAMS + written, mask=token < tokens, other=0.0)
        offsets = (token[:, None] * STREAMS + written) * width + feature[None, :]
        tl.store(out + offsets, (share[:, None] * update + mixed).to(tl.bfloat16), mask=inside)


def hyper_connection_coefficients(
    config: Config, h: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 h [B,T,S,D], fp32 fn [(2+S)S, S·D], scale [3], base [(2+S)S] -> fp32 pre, post [B,T,S], comb [B,T,S,S].

    comb is [summed stream, written stream] (numerics.md 5).
    """
    h = require_bf16("h", h)
    streams, lead = h.shape[-2], h.shape[:-2]
    width, tokens, mixes = streams * h.shape[-1], h.shape[:-2].numel(), (2 + streams) * streams
    fn = require_shape("fn", fn, mixes, width)
    scale, base = require_shape("scale", scale, 3), require_shape("base", base, mixes)
    floats: Any = {"dtype": torch.float32, "device": h.device}
    pre, post = torch.empty(*lead, streams, **floats), torch.empty(*lead, streams, **floats)
    comb = torch.empty(*lead, streams, streams, **floats)
    if not tokens:
        return pre, post, comb
    rows = min(MOST_TOKENS, max(FEWEST_TOKENS, triton.next_power_of_2(tokens)))
    programs = triton.cdiv(tokens, rows)
    splits = max(1, min(MOST_SPLITS, triton.cdiv(width, CHUNK), TARGET_PROGRAMS // programs))
    mixed, squares = torch.empty(splits, tokens, mixes, **floats), torch.empty(splits, tokens, **floats)
    _mixes_kernel[(programs, splits)](
        h,
        fn,
        mixed,
        squares,
        tokens,
        width,
        MIXES=mixes,
        PADDED=max(16, triton.next_power_of_2(mixes)),
        TOKENS=rows,
        CHUNK=CHUNK,
    )
    _coefficients_kernel[(triton.cdiv(tokens, SINKHORN_TOKENS),)](
        mixed,
        squares,
        scale,
        base,
        pre,
        post,
        comb,
        tokens,
        width,
        splits,
        config.norm_eps,
        config.hc_eps,
        ROUNDS=config.hc_sinkhorn_iters,
        STREAMS=streams,
        PADDED=triton.next_power_of_2(streams),
        TOKENS=SINKHORN_TOKENS,
    )
    return pre, post, comb


def hyper_connection_read(
    h: torch.Tensor, pre: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """bf16 h [B,T,S,D], fp32 pre [B,T,S] -> bf16 [B,T,D] (numerics.md 5); with a weight [D] its RMSNorm (3)."""
    h = require_bf16("h", h)
    streams, width, tokens = h.shape[-2], h.shape[-1], h.shape[:-2].numel()
    pre = require_shape("pre", pre, *h.shape[:-1])
    if norm_weight is not None:
        norm_weight = require_shape("norm_weight", norm_weight, width)
    out = torch.empty(*h.shape[:-2], width, dtype=torch.bfloat16, device=h.device)
    if not out.numel():
        return out
    tokens_per_program = 32 if INTERPRETED else 1
    _read_kernel[(triton.cdiv(tokens, tokens_per_program),)](
        h,
        pre,
        out if norm_weight is None else norm_weight,
        out,
        tokens,
        eps,
        width,
        STREAMS=streams,
        WIDTH=triton.next_power_of_2(width),
        TOKENS=tokens_per_program,
        NORM=norm_weight is not None,
        num_warps=8,
    )
    return out


def hyper_connection_write(y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """bf16 y [B,T,D], bf16 h [B,T,S,D], fp32 post [B,T,S], comb [B,T,S,S] -> bf16 [B,T,S,D] (numerics.md 5)."""
    y, h = require_bf16("y", y), require_bf16("h", h)
    streams, width, tokens = h.shape[-2], h.shape[-1], h.shape[:-2].numel()
    y = require_shape("y", y, *h.shape[:-2], width)
    post = require_shape("post", post, *h.shape[:-1])
    comb = require_shape("comb", comb, *h.shape[:-1], streams)
    out = torch.empty_like(h)
    if not out.numel():
        return out
    tokens_per_program, features = (64, min(1024, triton.next_power_of_2(width))) if INTERPRETED else (4, 256)
    _write_kernel[(triton.cdiv(tokens, tokens_per_program), triton.cdiv(width, features))](
        y,
        h,
        post,
        comb,
        out,
        tokens,
        width,
        STREAMS=streams,
        FEATURES=features,
        TOKENS=tokens_per_program,
    )
    return out
