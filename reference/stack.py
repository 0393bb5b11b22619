"""Consecutive layers (numerics.md 5 and 6.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference.block import Block
from reference.config import Config
from reference.parameters import Scoped, Weights
from reference.runtime import Runtime


class Stack:
    """Layers in ascending order over one runtime.  `weights` are under checkpoint names."""

    def __init__(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.blocks = {
            layer_id: Block(
                config,
                layer_id,
                Scoped(weights, f"layers.{layer_id}"),
                runtime,
                token_map,
                batch_size,
                compute=compute,
            )
            for layer_id in layer_ids
        }

    def step(
        self,
        h: torch.Tensor,
        pre: torch.Tensor,
        input_ids: torch.Tensor,
        start_pos: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        *,
        kept_taps: Sequence[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """One call through all layers: `h_out`, `pre_out`, and each layer's taps as `layer{l}/{tap}`.

        Arguments as `Block.step`.  `kept_taps` names the taps to keep of each layer; None keeps all.
        """
        taps: dict[str, torch.Tensor] = {}
        for layer_id, block in self.blocks.items():
            of_layer = block.step(h, pre, input_ids, start_pos, image_mask)
            h, pre = of_layer["h_out"], of_layer["pre_out"]
            taps |= {
                f"layer{layer_id}/{name}": tap
                for name, tap in of_layer.items()
                if kept_taps is None or name in kept_taps
            }
        return taps | {"h_out": h, "pre_out": pre}

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1)."""
        for block in self.blocks.values():
            block.roll_back(end)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of every layer as `layer{l}/{name}`."""
        return {
            f"layer{layer_id}/{name}": tensor
            for layer_id, block in self.blocks.items()
            for name, tensor in block.state().items()
        }
