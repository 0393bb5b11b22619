"""Engram: layout and hash exactly, the write on values with error bounds (numerics.md 8)."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded
from conformance.judge.components.hyper_connections import sigmoid
from conformance.judge.components.linear import Parameters, quantized

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
GATE_FLOOR = 1e-6


def multipliers(config: ModelConfig, layer: int) -> Ints:
    """Odd multipliers of the layer, one a shift: int64 [max n-gram size]."""
    limit = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, limit, size=config.engram_max_ngram_size)
    return np.asarray(draws, dtype=np.int64) * 2 + 1


def primes(config: ModelConfig) -> Ints:
    """Moduli [engram layers, n-gram sizes, heads]: the next unused prime each time, restarting for each n-gram size."""
    used: set[int] = set()
    table = np.zeros((len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads), np.int64)
    for row in table:
        for heads in row:
            candidate = config.engram_vocab_size - 1
            for head in range(config.engram_n_heads):
                candidate = _next_unused_prime(candidate, used)
                used.add(candidate)
                heads[head] = candidate
    return table


def _next_unused_prime(above: int, used: set[int]) -> int:
    candidate = above + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


@cache
def _is_prime(number: int) -> bool:
    """Trial division: the moduli are below 2^25."""
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def offsets(config: ModelConfig) -> Ints:
    """First table row of each column: [engram layers, columns]."""
    moduli = primes(config).reshape(len(config.engram_layer_ids), -1)
    return np.cumsum(moduli, axis=1) - moduli


def table_rows(config: ModelConfig, layer: int, token_map: Ints, ids: Ints, image_mask: Bools | None) -> Ints:
    """Table rows of ids [B,T] at positions 0...T-1: int64 [B,T,columns].

    Position p looks back at most n - 1 tokens and stops for good at the start and at an image token, itself included;
    whatever is missing is the compressed pad id.
    """
    which = config.engram_layer_ids.index(layer)
    factor, moduli, first_rows = multipliers(config, layer), primes(config)[which], offsets(config)[which]
    batch, length = ids.shape
    compressed = token_map[ids]
    pad = int(token_map[config.engram_pad_id])
    stopped = np.zeros((batch, length), dtype=np.bool_) if image_mask is None else image_mask.copy()
    hashed = np.zeros((batch, length), dtype=np.int64)
    columns = []
    for shift in range(config.engram_max_ngram_size):
        if shift:
            stopped = stopped | (np.arange(length) < shift)
            if image_mask is not None:
                stopped[:, shift:] |= image_mask[:, :-shift]
        behind = np.zeros_like(compressed)
        behind[:, shift:] = compressed[:, : length - shift]
        hashed = hashed ^ (np.where(stopped, pad, behind) * factor[shift])
        if shift:
            columns.append(hashed[..., None] % moduli[shift - 1])
    rows: Ints = np.concatenate(columns, -1) + first_rows
    return rows


def write(config: ModelConfig, weights: Parameters, h: Bounded, rows: Ints, image_mask: Bools | None) -> Bounded:
    """h [B,T,S,D] plus the gated value of table rows [B,T,columns], before the last rounding."""
    batch, length, streams, width = h.shape
    memory = Bounded.exact(_fetch(weights, rows)).rounded(BF16).reshape(batch, length, -1)
    projected = quantized(memory, weights["wkv.weight"]).rounded(BF16).reshape(batch, length, streams + 1, width)
    key, value = projected[:, :, :streams], projected[:, :, streams:]
    weighted = h * Bounded.exact(weights["q_weight"]) * Bounded.exact(weights["k_weight"]) * key
    similarity = weighted.sum(-1, keepdims=True) * _inverse_rms(config, h) * _inverse_rms(config, key) * width**-0.5
    gate = sigmoid(similarity.monotone(lambda dot: np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), GATE_FLOOR))))
    if image_mask is not None:
        gate = gate.scaled(np.where(image_mask, 0.0, 1.0)[..., None, None])
    return h + gate * value


def _inverse_rms(config: ModelConfig, x: Bounded) -> Bounded:
    mean = (x * x).sum(-1, keepdims=True) * (1.0 / x.shape[-1])
    return (mean + config.norm_eps).rsqrt()


def _fetch(weights: Parameters, rows: Ints) -> npt.NDArray[np.float64]:
    """Decode just the rows that are needed: the tables are the largest tensors of the model."""
    codes, scales = weights.rows("embed.weight", rows), weights.rows("embed.scale", rows)
    return np.asarray(codes.values() * np.repeat(scales.values(), 32, axis=-1)[..., : codes.shape[-1]])
