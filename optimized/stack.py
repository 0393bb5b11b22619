"""Consecutive layers over one runtime (numerics.md 5 and 6.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimized.block import Block, Taps, Weights, within
from optimized.config import Config
from optimized.runtime import Batch, Runtime


class Stack:
    """Layers in ascending order.  `weights` are under checkpoint names."""

    def __init__(
        self, config: Config, layer_ids: Sequence[int], weights: Weights, token_map: torch.Tensor | None
    ) -> None:
        self.blocks = {
            layer_id: Block(config, layer_id, within(weights, f"layers.{layer_id}"), token_map)
            for layer_id in layer_ids
        }

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
        """One call through all layers; arguments and results as `Block.step`, taps as `layer{l}/{tap}`."""
        for layer_id, block in self.blocks.items():
            of_layer: Taps | None = None if taps is None else {}
            h, pre = block.step(runtime, batch, h, pre, input_ids, image_mask, of_layer)
            if taps is not None and of_layer is not None:
                taps.update({f"layer{layer_id}/{name}": tap for name, tap in of_layer.items()})
        return h, pre
