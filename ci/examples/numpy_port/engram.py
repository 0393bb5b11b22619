"""Engram: hashed n-grams of token ids and what their table rows add to the residual (numerics.md 8)."""

import math
from functools import cache

import numpy as np

import linear
from hyper_connections import sigmoid
from quantize import E4M3_VALUES, E8M0_VALUES, bf16


def is_prime(n):
    """By trial division; the tables have some 16 million rows."""
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


@cache
def layout(layer_ids, ngram, heads, table_size, vocabulary):
    """Multipliers, primes and column offsets of every Engram layer."""
    used = set()
    primes = np.zeros((len(layer_ids), ngram - 1, heads), np.int64)
    for layer, size in np.ndindex(len(layer_ids), ngram - 1):
        prime = table_size - 1
        for head in range(heads):
            prime += 1
            while prime in used or not is_prime(prime):
                prime += 1
            used.add(prime)
            primes[layer, size, head] = prime
    columns = primes.reshape(len(layer_ids), -1)
    offsets = np.cumsum(columns, axis=1) - columns
    largest = max(1, (2**63 - 1) // vocabulary // 2)
    multipliers = np.stack(
        [np.random.default_rng(10007 * layer).integers(0, largest, size=ngram) * 2 + 1 for layer in layer_ids]
    )
    return multipliers, primes, offsets


def engram_layout(config):
    """The layout that a configuration gives rise to."""
    return layout(
        tuple(config["engram_layer_ids"]),
        config["engram_max_ngram_size"],
        config["engram_n_heads"],
        config["engram_vocab_size"],
        config["engram_compressed_vocab_size"],
    )


def engram_hash(config, layer_id, token_map, input_ids, image_mask=None):
    """Table rows of every position, offsets included; a look-back ends at the start and at an image token."""
    multipliers, primes, offsets = (part[config["engram_layer_ids"].index(layer_id)] for part in engram_layout(config))
    ids = token_map[input_ids].astype(np.int64)
    image = np.zeros(ids.shape, bool) if image_mask is None else image_mask
    pad, length = np.int64(token_map[config["engram_pad_id"]]), ids.shape[1]
    reached = np.ones(ids.shape, bool)
    hashed = np.zeros(ids.shape, np.int64)
    columns = []
    for back in range(config["engram_max_ngram_size"]):
        before = np.full(ids.shape, pad)
        before[:, back:] = ids[:, : max(length - back, 0)]
        ended = np.ones(ids.shape, bool)
        ended[:, back:] = image[:, : max(length - back, 0)]
        reached &= ~ended
        hashed = hashed ^ (np.where(reached, before, pad) * multipliers[back])
        if back:
            columns.append(hashed[..., None] % primes[back - 1])
    return np.concatenate(columns, axis=-1) + offsets


def engram_write(config, layer_id, weights, h, rows, image_mask=None):
    """Keys and a value from the table's rows; each stream takes the value as far as its key agrees with it."""
    streams, width = h.shape[-2:]
    embedded = E4M3_VALUES[weights["embed.weight"][rows]]
    scales = E8M0_VALUES[weights["embed.scale"][rows]]
    values = bf16(embedded.reshape(*scales.shape, -1) * scales[..., None])
    projected = linear.linear_fp8(
        values.reshape(*rows.shape[:2], -1), weights["wkv.weight"], weights["wkv.scale"]
    ).reshape(*rows.shape[:2], streams + 1, width)
    keys, value = projected[..., :streams, :], projected[..., streams:, :]
    eps = np.float32(config["norm_eps"])
    dot = (h * weights["q_weight"] * weights["k_weight"] * keys).sum(axis=-1)
    for normed in (h, keys):
        dot = dot / np.sqrt(np.square(normed).mean(axis=-1) + eps)
    dot = dot * np.float32(width**-0.5)
    opened = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), np.float32(1e-6))))
    if image_mask is not None:
        opened = np.where(image_mask[..., None], np.float32(0), opened)
    return bf16(h + opened[..., None] * value)
