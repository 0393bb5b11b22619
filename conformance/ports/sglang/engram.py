"""Engram: SGLang's layout, its hash, gather and gate kernels, its FP8 linear between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from conformance.interface import Array, Config, Unsupported, Weights
from conformance.ports.sglang.indexing import Indexing
from conformance.ports.sglang.parts import KERNELS, LAYERS, SGLANG

ENGRAM = f"{LAYERS}.engram"
EMBEDDINGS = f"{KERNELS}.embeddings"
GATE_FLOOR = 1e-6
"""As SGLang's layer has it."""


class Engrams(Indexing):
    """Layout, hashes and the write."""

    def engram_layout(self, config: Config) -> tuple[Array, Array, Array]:
        """Drawn from the configuration."""
        layout, multipliers, offsets = _layout(config)
        return multipliers, torch.tensor(layout.primes), offsets

    def engram_hash(
        self, config: Config, layer_id: int, token_map: Array, input_ids: Array, image_mask: Array | None
    ) -> Array:
        """The hash kernel, all requests from position 0 in one batch."""
        hash_ids, extend = (
            SGLANG.function(f"{EMBEDDINGS}.engram_hash", "engram_hash_ids"),
            SGLANG.function(f"{EMBEDDINGS}.engram_hash", "MODE_EXTEND"),
        )
        layout, multipliers, offsets = _layout(config)
        batch, length = input_ids.shape
        # SGLang knows an image token by its id: one that no token has, mapped to anything.
        image = len(token_map)
        ids = input_ids if image_mask is None else input_ids.masked_fill(image_mask, image)
        hashes, _ = hash_ids(
            ids.reshape(-1),
            torch.arange(length).repeat(batch),
            mode=extend,
            history=torch.zeros(batch, layout.max_ngram_size - 1, dtype=torch.int32),
            token_map=torch.cat([token_map, token_map[:1]]),
            multipliers=multipliers,
            primes=torch.tensor(layout.primes),
            offsets=offsets,
            pad_id=int(token_map[config["engram_pad_id"]]),
            row=torch.arange(batch).repeat_interleave(length),
            starts=torch.arange(batch) * length,
            image_token_id=image,
            mm_pad_shift=image + 1,
        )
        result: Array = hashes[:, config["engram_layer_ids"].index(layer_id)].reshape(batch, length, -1)
        return result

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """The gather kernel, the FP8 linear, the gate kernel."""
        streams, width = h.shape[-2:]
        tokens = h.shape[0] * h.shape[1]
        embedded = _gather(weights["embed.weight"], weights["embed.scale"], rows.reshape(-1))
        kv = self.linear_fp8(embedded.reshape(tokens, -1), weights["wkv.weight"], weights["wkv.scale"])
        gate = SGLANG.function(f"{EMBEDDINGS}.engram_gate", "_engram_gate_kernel")
        out = torch.empty_like(h, memory_format=torch.contiguous_format)
        ids = None if image_mask is None else image_mask.reshape(-1).int()
        block = 1 << (width - 1).bit_length()
        gate[(tokens * streams,)](
            h.contiguous(),
            kv.contiguous(),
            weights["q_weight"],
            weights["k_weight"],
            ids,
            out,
            1,
            width,
            streams,
            config["norm_eps"],
            GATE_FLOOR,
            block,
            ids is not None,
        )
        return out


def _layout(config: Config) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """SGLang's layout of a configuration, multipliers [L, max_ngram], first rows of the columns [L, columns]."""
    settings = SimpleNamespace(**config)
    layout = SGLANG.function(ENGRAM, "EngramLayout").from_config(settings)
    if layout is None:
        raise Unsupported("sglang: a layout of no layers")
    multipliers = SGLANG.function(ENGRAM, "compute_hash_multipliers")(
        layout.layer_ids, layout.max_ngram_size, config["engram_compressed_vocab_size"]
    )
    offsets = torch.tensor([layout.column_bounds(index)[:-1] for index in range(len(layout.layer_ids))])
    return layout, multipliers, offsets


def _gather(weight: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bf16 [N, d] of a table's rows at int64 ids [N]: the kernel, which takes the table by its address."""
    module = SGLANG.module(f"{EMBEDDINGS}.engram_gather")
    weight, scale = weight.contiguous(), scale.contiguous()
    rows, width = weight.shape
    out = torch.empty(len(ids), width, dtype=torch.bfloat16)
    module._engram_gather_kernel[(len(ids),)](
        weight.data_ptr(),
        scale.data_ptr(),
        ids,
        ids,
        out,
        0,
        rows,
        DIM=width,
        BLK=width // scale.shape[1],
        E8M0_ZERO=module._E8M0_ZERO,
        HAS_DST=False,
    )
    return out
