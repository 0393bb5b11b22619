"""Engram: hashed n-gram tables that write to the residual (numerics.md 8)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from reference.config import Config
from reference.linear import linear_fp8
from reference.parameters import Weights
from reference.precision import to_bf16
from reference.quantize import dequantize_fp8_rows

MULTIPLIER_SEED = 10007
SMALLEST_DOT = 1e-6


def is_prime(number: int) -> bool:
    """Trial division."""
    if number < 2:
        return False
    divisors = np.arange(2, int(number**0.5) + 1)
    return bool(np.all(number % divisors))


def next_prime(number: int, used: set[int]) -> int:
    """The smallest prime above `number` that is not in `used`."""
    number += 1
    while number in used or not is_prime(number):
        number += 1
    return number


@lru_cache(maxsize=32)
def _layout(config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    size = config.engram_max_ngram_size
    multipliers = [
        np.random.default_rng(MULTIPLIER_SEED * layer_id).integers(0, bound, size=size) * 2 + 1
        for layer_id in config.engram_layer_ids
    ]
    used: set[int] = set()
    primes = np.zeros((len(config.engram_layer_ids), config.engram_look_back, config.engram_n_heads), dtype=np.int64)
    for layer, ngram in np.ndindex(*primes.shape[:2]):
        prime = config.engram_vocab_size - 1
        for head in range(config.engram_n_heads):
            prime = next_prime(prime, used)
            used.add(prime)
            primes[layer, ngram, head] = prime
    columns = torch.from_numpy(primes).flatten(1)
    offsets = columns.cumsum(dim=1) - columns
    return torch.from_numpy(np.stack(multipliers)), torch.from_numpy(primes), offsets


def engram_layout(config: Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multipliers [L,max_ngram], primes [L,max_ngram−1,heads], column offsets [L,columns], all int64 (numerics.md 8).

    The search for primes begins anew for every layer and n-gram size, and no prime is used twice.  A column's offset
    is the sum of the primes before it within the layer.
    """
    multipliers, primes, offsets = _layout(config)
    return multipliers.clone(), primes.clone(), offsets.clone()


def look_back_ids(
    config: Config, token_map: torch.Tensor, input_ids: torch.Tensor, barrier: torch.Tensor
) -> torch.Tensor:
    """Compressed ids of each position and of those before it (numerics.md 8).

    int32 token_map [vocabulary], int [B,L] ids and bool [B,L] barriers, the first max_ngram−1 of which precede this
    call -> int64 [B,T,max_ngram], T = L − max_ngram + 1, by distance.  At and beyond the first barrier, the position
    itself included, every id is the pad.
    """
    look_back = config.engram_look_back
    length = input_ids.shape[1] - look_back
    compressed = token_map[input_ids.long()].long()
    pad = token_map[config.engram_pad_id].long()
    ids, blocked = [], torch.zeros_like(barrier[:, :length])
    for distance in range(look_back + 1):
        there = slice(look_back - distance, look_back - distance + length)
        blocked = blocked | barrier[:, there]
        ids.append(torch.where(blocked, pad, compressed[:, there]))
    return torch.stack(ids, dim=-1)


def hash_ids(config: Config, layer_id: int, ids: torch.Tensor) -> torch.Tensor:
    """h_n = h_(n−1) xor id_(n−1) · m_(n−1), then modulo each column's prime plus its offset (numerics.md 8).

    int64 [B,T,max_ngram] by distance -> table rows int64 [B,T,columns], ordered by n-gram size, then head.
    """
    layer = config.engram_layer_ids.index(layer_id)
    multipliers, primes, offsets = (table[layer] for table in _layout(config))
    terms = ids * multipliers
    hashed = terms[..., 0]
    columns = []
    for ngram in range(2, config.engram_max_ngram_size + 1):
        hashed = hashed ^ terms[..., ngram - 1]
        columns.append(hashed.unsqueeze(-1) % primes[ngram - 2])
    return torch.cat(columns, dim=-1) + offsets


class LookBack:
    """The last max_ngram−1 tokens of each request; before a request's first token stand barriers."""

    def __init__(self, config: Config, batch_size: int) -> None:
        self.config = config
        self.input_ids = torch.zeros(batch_size, config.engram_look_back, dtype=torch.int32)
        self.barrier = torch.ones(batch_size, config.engram_look_back, dtype=torch.bool)
        self._last_call: tuple[torch.Tensor, ...] = ()

    def extend(
        self, input_ids: torch.Tensor, start_pos: torch.Tensor, image_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put this call's tokens behind the remembered ones: int [B,T] -> ids and barriers [B,max_ngram−1+T]."""
        barrier = torch.zeros(input_ids.shape, dtype=torch.bool) if image_mask is None else image_mask
        remembered = self.barrier | (start_pos == 0).unsqueeze(1)
        ids = torch.cat((self.input_ids, input_ids.to(torch.int32)), dim=1)
        barrier = torch.cat((remembered, barrier), dim=1)
        length = input_ids.shape[1]
        self.input_ids, self.barrier = ids[:, length:], barrier[:, length:]
        self._last_call = (start_pos, ids, barrier)
        return ids, barrier

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1)."""
        start_pos, ids, barrier = self._last_call
        remembered = (end - start_pos).unsqueeze(1) + torch.arange(self.config.engram_look_back)
        self.input_ids, self.barrier = ids.gather(1, remembered), barrier.gather(1, remembered)


def engram_hash(
    config: Config,
    layer_id: int,
    token_map: torch.Tensor,
    input_ids: torch.Tensor,
    image_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Table rows of a request from its first token on: int32 [B,T], bool [B,T] or None -> int64 [B,T,columns].

    Column offsets included (numerics.md 8).
    """
    start_pos = torch.zeros(input_ids.shape[0], dtype=torch.int64)
    ids, barrier = LookBack(config, input_ids.shape[0]).extend(input_ids, start_pos, image_mask)
    return hash_ids(config, layer_id, look_back_ids(config, token_map, ids, barrier))


def engram_gate(
    config: Config,
    h: torch.Tensor,
    key: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> torch.Tensor:
    """σ(sign(dot)·sqrt(max(|dot|, 1e-6))) of the normed residual and key, per stream (numerics.md 8).

    fp32 h and key [B,T,S,D], q_weight and k_weight [S,D] -> fp32 [B,T,S].
    """
    dot = (h * q_weight * k_weight * key).sum(dim=-1)
    dot = dot * torch.rsqrt(h.square().mean(dim=-1) + config.norm_eps)
    dot = dot * torch.rsqrt(key.square().mean(dim=-1) + config.norm_eps) * h.shape[-1] ** -0.5
    return torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=SMALLEST_DOT)))


def engram_write(
    config: Config,
    layer_id: int,
    weights: Weights,
    h: torch.Tensor,
    rows: torch.Tensor,
    image_mask: torch.Tensor | None,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """h + gate · value, keys and value projected from the fetched table rows; gate 0 at image tokens (numerics.md 8).

    bf16 h [B,T,S,D], int64 rows [B,T,columns], bool image_mask [B,T] or None -> bf16 [B,T,S,D].  `weights`:
    `embed.weight`, `embed.scale`, `wkv.weight`, `wkv.scale`, `q_weight`, `k_weight`.
    """
    table, scale = weights["embed.weight"], weights["embed.scale"]
    # Rows are fetched as bytes: not every kind of indexing exists for 8-bit floats.
    fetched = table.view(torch.uint8)[rows].view(table.dtype)
    fetched_scale = scale.view(torch.uint8)[rows].view(scale.dtype)
    features = dequantize_fp8_rows(fetched, fetched_scale).flatten(-2)
    projected = linear_fp8(features, weights["wkv.weight"], weights["wkv.scale"], compute=compute).to(compute)
    streams, dim = h.shape[-2:]
    key, value = torch.split(projected, [streams * dim, dim], dim=-1)
    key = torch.unflatten(key, -1, (streams, dim))
    h = h.to(compute)
    gate = engram_gate(config, h, key, weights["q_weight"].to(compute), weights["k_weight"].to(compute))
    if image_mask is not None:
        gate = gate.masked_fill(image_mask.unsqueeze(-1), 0.0)
    return to_bf16(h + gate.unsqueeze(-1) * value.unsqueeze(-2))
