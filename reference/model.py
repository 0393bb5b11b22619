"""The whole text model (numerics.md 9)."""

from __future__ import annotations

import torch

from reference.config import Config
from reference.hyper_connections import hyper_connection_read, one_hot_mix
from reference.linear import linear_fp32
from reference.norm import rms_norm
from reference.parameters import Weights
from reference.precision import to_bf16
from reference.runtime import Runtime
from reference.sampling import greedy
from reference.stack import Stack


def embed(weight: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Embedding rows: bf16 [V,D], int32 [B,T] -> bf16 [B,T,D] (numerics.md 9)."""
    return weight[input_ids.long()]


def collapse(
    config: Config, weights: Weights, h: torch.Tensor, pre: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Read the streams with the last mix and norm: bf16 h [B,T,S,D], fp32 pre [B,T,S] -> bf16 [B,T,D]."""
    x = hyper_connection_read(h, pre, compute=compute)
    return rms_norm(x, weights["norm.weight"], config.norm_eps, compute=compute)


def head(
    config: Config, weights: Weights, h: torch.Tensor, pre: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 h [B,T,S,D], fp32 pre [B,T,S] -> final norm bf16 [B,T,D], logits fp32 [B,T,V] (numerics.md 9).

    `weights`: `norm.weight`, `head.weight`.
    """
    final_norm = collapse(config, weights, h, pre, compute=compute)
    return final_norm, linear_fp32(final_norm, weights["head.weight"], compute=compute)


def place_image(
    embedded: torch.Tensor, image_mask: torch.Tensor | None, image_features: torch.Tensor | None
) -> torch.Tensor:
    """Put image features where image_mask is True: bf16 [B,T,D], bool [B,T], bf16 [B,T,D] -> bf16 [B,T,D]."""
    if image_mask is None or image_features is None:
        return embedded
    return torch.where(image_mask.unsqueeze(-1), image_features, embedded)


def main_hidden(config: Config, residuals: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """What the draft head sees of the model: bf16 residuals [B,T,n_layers,S,D] -> bf16 [B,T,L·D] (numerics.md 10).

    The mean over the streams of the residual that enters each of the L layers in `dspark_target_layer_ids`, after the
    layer's Engram and before its block.
    """
    tapped = residuals[:, :, list(config.dspark_target_layer_ids)]
    return to_bf16(tapped.to(compute).mean(dim=-2)).flatten(-2)


class Model:
    """Embedding, all layers, head.  `weights` are under checkpoint names."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        runtime: Runtime,
        token_map: torch.Tensor | None,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.weights = weights
        self.compute = compute
        self.stack = Stack(config, range(config.n_layers), weights, runtime, token_map, batch_size, compute=compute)

    def step(
        self,
        input_ids: torch.Tensor,
        start_pos: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        image_features: torch.Tensor | None = None,
        *,
        all_positions: bool = False,
        all_taps: bool = True,
    ) -> dict[str, torch.Tensor]:
        """One call: `logits` fp32 [B,V] of the last position, `output_ids` int32 [B], and every tap.

        int32 input_ids [B,T], int64 start_pos [B], bool image_mask [B,T] or None, bf16 image_features [B,T,D] or None
        (used where the mask is True).  `all_positions` makes the logits [B,T,V] and the ids [B,T]; `all_taps=False`
        keeps no layer's taps, which bounds the memory of long calls.
        """
        config = self.config
        taps = {"embed": embed(self.weights["embed.weight"], input_ids)}
        placed = place_image(taps["embed"], image_mask, image_features)
        h = placed.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        pre = one_hot_mix(config, *input_ids.shape, compute=self.compute)
        targets = config.dspark_target_layer_ids
        kept_taps = None if all_taps else ("h_in",) if targets else ()
        of_layers = self.stack.step(h, pre, input_ids, start_pos, image_mask, kept_taps=kept_taps)
        h, pre = of_layers["h_out"], of_layers["pre_out"]
        if targets:
            residuals = torch.stack([of_layers[f"layer{layer}/h_in"] for layer in range(config.n_layers)], dim=2)
            taps["main_hidden"] = main_hidden(config, residuals, compute=self.compute)
        if all_taps:
            taps |= of_layers

        taps["final_norm"] = collapse(config, self.weights, h, pre, compute=self.compute)
        read = taps["final_norm"] if all_positions else taps["final_norm"][:, -1]
        taps["logits"] = linear_fp32(read, self.weights["head.weight"], compute=self.compute)
        taps["output_ids"] = greedy(taps["logits"])
        return taps

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the tokens of the last call from position `end` on: int64 [B] (numerics.md 10.1)."""
        self.stack.roll_back(end)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of every layer as `layer{l}/{name}`."""
        return self.stack.state()
