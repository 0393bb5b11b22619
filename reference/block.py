"""One layer: Engram where it has one, attention, mixture of experts (numerics.md 5)."""

from __future__ import annotations

from typing import Protocol

import torch

from reference.attention import Attention
from reference.config import Config
from reference.engram import LookBack, engram_write, hash_ids, look_back_ids
from reference.hyper_connections import (
    hyper_connection_coefficients,
    hyper_connection_read,
    hyper_connection_write,
)
from reference.moe import moe_taps
from reference.norm import rms_norm
from reference.parameters import Scoped, Weights
from reference.runtime import Runtime


class BlockAttention(Protocol):
    """What a block needs of its attention."""

    def step(self, x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        """bf16 x [B,T,D], int64 start_pos [B] -> `attn_out` bf16 [B,T,D] and other taps."""

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on."""

    def state(self) -> dict[str, torch.Tensor]:
        """The state by name."""


class Block:
    """One layer with the state of its attention and, before an Engram, the last tokens of each request."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`token_map` int32 [vocabulary] maps ids to compressed ids; a layer without Engram does without."""
        if config.has_engram(layer_id) and token_map is None:
            raise ValueError(f"layer {layer_id} has an Engram and needs a token_map")
        self.config = config
        self.layer_id = layer_id
        self.weights = weights
        self.token_map = token_map
        self.compute = compute
        self.attention: BlockAttention = Attention(
            config, layer_id, Scoped(weights, "attn"), runtime, batch_size, compute=compute
        )
        self.look_back = LookBack(config, batch_size)

    def step(
        self,
        h: torch.Tensor,
        pre: torch.Tensor,
        input_ids: torch.Tensor,
        start_pos: torch.Tensor,
        image_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """One call: `h_out`, `pre_out` and every intermediate by tap name (numerics.md 5).

        bf16 h [B,T,S,D], fp32 pre [B,T,S] (the mix to read with), int32 input_ids [B,T], int64 start_pos [B], bool
        image_mask [B,T] or None.  The mix is one sublayer late: the attention reads with `pre`, the mixture with the
        attention's, and the mixture's own is handed on.
        """
        taps: dict[str, torch.Tensor] = {}
        if self.config.has_engram(self.layer_id):
            taps |= self._engram(h, input_ids, start_pos, image_mask)
            h = taps["engram_out"]
        taps |= {"h_in": h, "pre_in": pre}

        attn_pre, post, comb = self._coefficients(h, "attn")
        taps |= {"attn_pre": attn_pre, "attn_post": post, "attn_comb": comb}
        taps |= self.attention.step(self._read(h, pre, "attn_norm"), start_pos)
        h = hyper_connection_write(taps["attn_out"], h, post, comb, compute=self.compute)
        taps["h_mid"] = h

        ffn_pre, post, comb = self._coefficients(h, "ffn")
        taps |= {"ffn_pre": ffn_pre, "ffn_post": post, "ffn_comb": comb}
        taps["ffn_in"] = self._read(h, attn_pre, "ffn_norm")
        taps |= self._moe(taps["ffn_in"], image_mask)
        h = hyper_connection_write(taps["ffn_out"], h, post, comb, compute=self.compute)
        return taps | {"h_out": h, "pre_out": ffn_pre}

    def _engram(
        self,
        h: torch.Tensor,
        input_ids: torch.Tensor,
        start_pos: torch.Tensor,
        image_mask: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Engram acts on the residual before the layer's coefficients are computed (numerics.md 5 and 8)."""
        assert self.token_map is not None
        ids, barrier = self.look_back.extend(input_ids, start_pos, image_mask)
        rows = hash_ids(self.config, self.layer_id, look_back_ids(self.config, self.token_map, ids, barrier))
        return {"engram_in": h, "engram_hash": rows, "engram_out": self._write_engram(h, rows, image_mask)}

    def _write_engram(self, h: torch.Tensor, rows: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        weights = Scoped(self.weights, "engram")
        return engram_write(self.config, self.layer_id, weights, h, rows, image_mask, compute=self.compute)

    def _coefficients(self, h: torch.Tensor, sublayer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fn, scale, base = (self.weights[f"hc_{sublayer}_{name}"] for name in ("fn", "scale", "base"))
        return hyper_connection_coefficients(self.config, h, fn, scale, base, compute=self.compute)

    def _read(self, h: torch.Tensor, pre: torch.Tensor, norm: str) -> torch.Tensor:
        x = hyper_connection_read(h, pre, compute=self.compute)
        return rms_norm(x, self.weights[f"{norm}.weight"], self.config.norm_eps, compute=self.compute)

    def _moe(self, x: torch.Tensor, image_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The mixture sees tokens without their order: [B,T,D] as [B·T,D]."""
        mask = None if image_mask is None else image_mask.flatten()
        taps = moe_taps(self.config, Scoped(self.weights, "ffn"), x.flatten(0, 1), mask, compute=self.compute)
        return taps | {"ffn_out": taps["ffn_out"].view(x.shape)}

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1)."""
        self.attention.roll_back(end)
        if self.config.has_engram(self.layer_id):
            self.look_back.roll_back(end)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of the attention."""
        return self.attention.state()
