"""Mixture of experts: gate and experts together (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optimized.config import Config
from optimized.experts import LayerExperts
from optimized.gate import gate


@dataclass(frozen=True)
class Mixture:
    """The mixture of a layer with its weights laid out once."""

    gate: Mapping[str, torch.Tensor]
    """`weight`, `bias`, `bias_vl`."""
    experts: LayerExperts

    @classmethod
    def of(cls, config: Config, weights: Mapping[str, torch.Tensor]) -> Mixture:
        """From the weights of the layer's `ffn`."""
        own_gate = {name.removeprefix("gate."): weights[name] for name in weights if name.startswith("gate.")}
        return cls(own_gate, LayerExperts.of(config, weights))

    def route(
        self, config: Config, x: torch.Tensor, image_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 x [N,D], bool image_mask [N] or None -> routing weights fp32 [N,k], expert indices int32 [N,k]."""
        return gate(config, self.gate, x, image_mask)


def moe(
    config: Config, weights: Mapping[str, torch.Tensor], x: torch.Tensor, image_mask: torch.Tensor | None
) -> torch.Tensor:
    """bf16 x [N,D], bool image_mask [N] or None -> bf16 [N,D].  `weights` are those of the layer's `ffn`."""
    mixture = Mixture.of(config, weights)
    return mixture.experts.mix(config, x, *mixture.route(config, x, image_mask))
