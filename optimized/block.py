"""One layer: Engram where it has one, attention, mixture of experts (numerics.md 5)."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch

from optimized.attention import Attention
from optimized.config import Config
from optimized.engram import barriers, engram_write, hash_behind
from optimized.hyper_connections import (
    hyper_connection_coefficients,
    hyper_connection_read,
    hyper_connection_write,
)
from optimized.moe import Mixture
from optimized.runtime import Batch, Runtime

Weights = Mapping[str, torch.Tensor]
Taps = MutableMapping[str, torch.Tensor]
"""Where a step leaves its intermediates, by name, for whoever looks."""


def within(weights: Weights, unit: str) -> dict[str, torch.Tensor]:
    """The weights of a unit, under names relative to it."""
    return {name.removeprefix(f"{unit}."): weights[name] for name in weights if name.startswith(f"{unit}.")}


def look_back(
    config: Config, ring: torch.Tensor, batch: Batch, input_ids: torch.Tensor, image_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put a call's tokens behind those that a slot remembers, and remember them (numerics.md 8).

    int32 ring [slots, n] of the token at each position modulo n, -1 at an image, in place; int32 ids [B,T] -> int32 ids
    and uint8 barriers [B,max_ngram−1+T].
    """
    size, reach = ring.shape[1], config.engram_max_ngram_size - 1
    before = batch.start.unsqueeze(1) - reach + torch.arange(reach, device=ring.device)
    remembered = ring[batch.slots.unsqueeze(1), before % size]
    stopped = (before < 0) | (remembered < 0)
    barrier = barriers(input_ids, image_mask)
    kept = slice(max(0, batch.length - size), None)
    tokens = torch.where(barrier != 0, -1, input_ids.to(torch.int32))
    ring[batch.slots.unsqueeze(1), batch.positions[:, kept] % size] = tokens[:, kept]
    ids = torch.cat((remembered.clamp(min=0), input_ids.to(torch.int32)), dim=1)
    return ids, torch.cat((stopped.to(torch.uint8), barrier), dim=1)


def _selected(runtime: Runtime, batch: Batch, ratio: int) -> Taps:
    """A copy of what an index source has published: `selected` int32 [B,T,n], n as many as there can be; or nothing."""
    there_are = min(runtime.config.index_topk, batch.furthest // ratio)
    published = runtime.selected[: batch.positions.numel(), :there_are].clone()
    return {"selected": published.view(batch.size, batch.length, there_are)} if there_are else {}


class Block:
    """The weights of one layer, laid out once.  What a request leaves behind is in the runtime."""

    def __init__(self, config: Config, layer_id: int, weights: Weights, token_map: torch.Tensor | None) -> None:
        """`token_map` int32 [vocabulary] maps ids to compressed ids; a layer without Engram does without.

        Raises:
            ValueError: an Engram without a token map.
        """
        if config.has_engram(layer_id) and token_map is None:
            raise ValueError(f"token_map: layer {layer_id} has an Engram and needs one")
        self.config, self.layer_id = config, layer_id
        self.token_map = token_map if config.has_engram(layer_id) else None
        self.attention = Attention(config, layer_id, within(weights, "attn"))
        self.mixture = Mixture.of(config, within(weights, "ffn"))
        self.engram = within(weights, "engram")
        units = ("attn", "ffn")
        self.norms = {unit: weights[f"{unit}_norm.weight"] for unit in units}
        self.mixes = {unit: tuple(weights[f"hc_{unit}_{part}"] for part in ("fn", "scale", "base")) for unit in units}

    def step(
        self,
        runtime: Runtime,
        batch: Batch,
        h: torch.Tensor,
        pre: torch.Tensor,
        input_ids: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One call: bf16 h [B,T,S,D], fp32 pre [B,T,S], int32 input_ids [B,T] -> h and the mix to read it with (5).

        The mix is one sublayer late: the attention reads with `pre`, the mixture with the attention's, and the
        mixture's own is handed on.  bool image_mask [B,T], or None without images.
        """
        seen: Taps = {} if taps is None else taps
        if self.token_map is not None:
            seen["engram_in"] = h
            h = seen["engram_out"] = self._engram(runtime, batch, h, input_ids, image_mask, self.token_map, seen)
        seen["h_in"], seen["pre_in"] = h, pre

        attn_pre, post, comb = hyper_connection_coefficients(self.config, h, *self.mixes["attn"])
        seen["attn_pre"], seen["attn_post"], seen["attn_comb"] = attn_pre, post, comb
        x = seen["attn_in"] = hyper_connection_read(h, pre, self.norms["attn"], self.config.norm_eps)
        y = seen["attn_out"] = self.attention.step(runtime, batch, x)
        if taps is not None and self.config.selects(self.layer_id):
            taps.update(_selected(runtime, batch, self.config.ratio(self.layer_id)))
        h = seen["h_mid"] = hyper_connection_write(y, h, post, comb)

        ffn_pre, post, comb = hyper_connection_coefficients(self.config, h, *self.mixes["ffn"])
        seen["ffn_pre"], seen["ffn_post"], seen["ffn_comb"] = ffn_pre, post, comb
        x = seen["ffn_in"] = hyper_connection_read(h, attn_pre, self.norms["ffn"], self.config.norm_eps)
        y = seen["ffn_out"] = self._mix(x, image_mask, seen)
        h = seen["h_out"] = hyper_connection_write(y, h, post, comb)
        seen["pre_out"] = ffn_pre
        return h, ffn_pre

    def _engram(
        self,
        runtime: Runtime,
        batch: Batch,
        h: torch.Tensor,
        input_ids: torch.Tensor,
        image_mask: torch.Tensor | None,
        token_map: torch.Tensor,
        seen: Taps,
    ) -> torch.Tensor:
        """Engram acts on the residual before the layer's coefficients are computed (numerics.md 5 and 8)."""
        ring = runtime.layers[self.layer_id].look_back
        if ring is None:
            raise ValueError(f"runtime: layer {self.layer_id} has no room for a look-back")
        ids, barrier = look_back(self.config, ring, batch, input_ids, image_mask)
        rows = seen["engram_hash"] = hash_behind(self.config, self.layer_id, token_map, ids, barrier)
        return engram_write(self.config, self.layer_id, self.engram, h, rows, image_mask)

    def _mix(self, x: torch.Tensor, image_mask: torch.Tensor | None, seen: Taps) -> torch.Tensor:
        """The mixture sees tokens without their order: [B,T,D] as [B·T,D]."""
        tokens = x.flatten(0, 1)
        mask = None if image_mask is None else image_mask.flatten()
        routing, indices = self.mixture.route(self.config, tokens, mask)
        seen["gate_weights"], seen["gate_indices"] = routing, indices
        return self.mixture.experts.mix(self.config, tokens, routing, indices).view(x.shape)
