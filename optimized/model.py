"""The whole text model: embedding, all layers, head (numerics.md 9)."""

from __future__ import annotations

import torch

from optimized.block import Taps, Weights
from optimized.config import Config
from optimized.hyper_connections import hyper_connection_read
from optimized.linear import linear_fp32
from optimized.runtime import Batch, Runtime
from optimized.sampling import greedy
from optimized.stack import Stack


def embed(weight: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Embedding rows: bf16 [V,D], int32 [B,T] -> bf16 [B,T,D] (numerics.md 9)."""
    return torch.nn.functional.embedding(input_ids, weight)


def head(config: Config, weights: Weights, h: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 h [B,T,S,D], fp32 pre [B,T,S] -> final norm bf16 [B,T,D], logits fp32 [B,T,V] (numerics.md 9).

    `weights`: `norm.weight`, `head.weight`.
    """
    final_norm = hyper_connection_read(h, pre, weights["norm.weight"], config.norm_eps)
    return final_norm, linear_fp32(final_norm, weights["head.weight"])


class Model:
    """The weights of the text path, laid out once.  `weights` are under checkpoint names."""

    def __init__(self, config: Config, weights: Weights, token_map: torch.Tensor | None) -> None:
        self.config = config
        self.ends = {name: weights[name] for name in ("embed.weight", "norm.weight", "head.weight")}
        self.stack = Stack(config, range(config.n_layers), weights, token_map)

    def step(
        self,
        runtime: Runtime,
        batch: Batch,
        input_ids: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        image_features: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """One call: int32 input_ids [B,T] -> logits of each request's last position, fp32 [B,V] (numerics.md 9).

        bf16 image_features [B,T,D] stand in for embeddings where bool image_mask [B,T] is True; both may be None.
        """
        config = self.config
        placed = embed(self.ends["embed.weight"], input_ids)
        if taps is not None:
            taps["embed"] = placed
        if image_mask is not None and image_features is not None:
            placed = torch.where(image_mask.unsqueeze(-1), image_features, placed)
        h = placed.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        # The first layer reads the first stream alone.
        pre = torch.zeros(*input_ids.shape, config.hc_mult, dtype=torch.float32, device=h.device)
        pre[..., 0] = 1.0
        h, pre = self.stack.step(runtime, batch, h, pre, input_ids, image_mask, taps)
        return head(config, self.ends, h[:, -1:], pre[:, -1:])[1].squeeze(1)

    def generate(self, runtime: Runtime, batch: Batch, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        """Go on greedily from the newest tokens int32 [B] of a batch of one-token calls -> int32 [B, steps].

        Tokens stay on the device from step to step.  Afterwards the batch stands behind the last token that was put in.

        Raises:
            ValueError: a batch of longer calls, or a request would exceed the runtime's capacity.
        """
        if batch.length != 1:
            raise ValueError(f"batch: expected calls of 1 token, got {batch.length}")
        chosen = []
        for step in range(steps):
            if step:
                runtime.advance(batch)
            tokens = greedy(self.step(runtime, batch, tokens.unsqueeze(1)))
            chosen.append(tokens)
        return torch.stack(chosen, dim=1)
