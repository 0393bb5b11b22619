"""DSpark, the draft head: blocks that propose tokens from what the model left behind (numerics.md 10).

The state is one ring a block.  It holds window rows of the model's own positions only, made of `main_x`; the rows of
drafts are attended to by the drafts of the same call and then gone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.attention import attention_output, attention_queries, query_latent
from reference.block import Block
from reference.config import Config
from reference.hyper_connections import hyper_connection_read, one_hot_mix
from reference.linear import linear_fp8, linear_fp32
from reference.model import embed
from reference.norm import rms_norm
from reference.parameters import Scoped, Weights
from reference.runtime import Runtime
from reference.sampling import greedy
from reference.sparse_attention import sparse_attention
from reference.window import RingCall, rolled_back_ring, window_rows, window_update


def main_projection(
    config: Config, weights: Weights, main_hidden: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """RMSNorm(main_proj · main_hidden): bf16 [B,T,L·D] -> bf16 main_x [B,T,D], the same for every draft block.

    `weights` are those of the first draft block: `main_proj.weight`, `main_proj.scale`, `main_norm.weight`.
    """
    projected = linear_fp8(main_hidden, weights["main_proj.weight"], weights["main_proj.scale"], compute=compute)
    return rms_norm(projected, weights["main_norm.weight"], config.norm_eps, compute=compute)


def draft_embedding(config: Config, weight: torch.Tensor, output_ids: torch.Tensor) -> torch.Tensor:
    """Embedding of the model's newest token and of noise tokens after it: bf16 [V,D], int32 [B] -> bf16 [B,n,D]."""
    ids = torch.full((output_ids.shape[0], config.dspark_block_size), config.dspark_noise_token_id)
    ids[:, 0] = output_ids
    return embed(weight, ids)


def draft_indices(config: Config, start_pos: torch.Tensor) -> torch.Tensor:
    """Rows that each draft reads, -1 for none: int64 start_pos [B] -> int32 [B,n,W+n].

    `start_pos` is the position of the first draft.  The ring's slots that hold a position before it come first, then
    all drafts: nothing is causal among them.
    """
    window, drafts = config.window_size, config.dspark_block_size
    slots = torch.arange(window)
    listed = torch.where(slots < start_pos.unsqueeze(1), slots, -1)
    own = (window + torch.arange(drafts)).expand(listed.shape[0], -1)
    return torch.cat((listed, own), dim=1).unsqueeze(1).expand(-1, drafts, -1).to(torch.int32)


def draft_attention_taps(
    config: Config,
    layer_id: int,
    weights: Weights,
    x: torch.Tensor,
    ring: torch.Tensor,
    start_pos: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """`draft_attention` with every intermediate by tap name."""
    positions = start_pos.unsqueeze(1) + torch.arange(x.shape[1])
    taps = {"attn_in": x, "q_latent": query_latent(config, layer_id, weights, x, compute=compute)}
    q = attention_queries(config, layer_id, weights, taps["q_latent"], positions, compute=compute)
    kv = torch.cat((ring, window_rows(config, layer_id, weights, x, positions, compute=compute)), dim=1)
    listed, scale = draft_indices(config, start_pos), config.head_dim**-0.5
    taps["attn_o"] = sparse_attention(q, kv, listed, weights["attn_sink"], scale, compute=compute)
    taps["attn_out"] = attention_output(config, layer_id, weights, taps["attn_o"], positions, compute=compute)
    return taps


def draft_attention(
    config: Config,
    layer_id: int,
    weights: Weights,
    x: torch.Tensor,
    ring: torch.Tensor,
    start_pos: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of the drafts over the ring and over one another: bf16 x [B,n,D], ring [B,W,d] -> bf16 [B,n,D].

    int64 start_pos [B] is the position of the first draft; the ring holds the model's positions before it.
    """
    return draft_attention_taps(config, layer_id, weights, x, ring, start_pos, compute=compute)["attn_out"]


class DraftAttention:
    """The attention of one draft block with its ring, bf16 [B,W,d]."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.layer_id = layer_id
        self.weights = weights
        self.compute = compute
        self.window = torch.zeros(batch_size, config.window_size, config.head_dim, dtype=torch.bfloat16)
        self._last_call: RingCall | None = None

    def seed(self, main_x: torch.Tensor, start_pos: torch.Tensor) -> None:
        """Write the window rows of the model's positions: bf16 main_x [B,T,D], int64 start_pos [B]."""
        positions = start_pos.unsqueeze(1) + torch.arange(main_x.shape[1])
        rows = window_rows(self.config, self.layer_id, self.weights, main_x, positions, compute=self.compute)
        ring_before = self.window.masked_fill((start_pos == 0)[:, None, None], 0.0)
        self.window = window_update(self.config, ring_before, rows, start_pos)
        self._last_call = RingCall(start_pos, ring_before, rows)

    def step(self, x: torch.Tensor, start_pos: torch.Tensor) -> dict[str, torch.Tensor]:
        """bf16 drafts x [B,n,D], int64 start_pos [B] of the first -> `attn_out` bf16 [B,n,D] and other taps."""
        return draft_attention_taps(
            self.config, self.layer_id, self.weights, x, self.window, start_pos, compute=self.compute
        )

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the model's positions of the last call from `end` on: int64 [B]."""
        self.window = rolled_back_ring(self.config, self._last_call, end)

    def state(self) -> dict[str, torch.Tensor]:
        """`window` [B,W,d]."""
        return {"window": self.window}


class DraftBlock:
    """One draft block: a block of the model with the attention of drafts and experts of its own number."""

    def __init__(
        self,
        config: Config,
        layer_id: int,
        weights: Weights,
        batch_size: int,
        *,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`weights` are those of the block."""
        config = config.of_drafts()
        self.attention = DraftAttention(config, layer_id, Scoped(weights, "attn"), batch_size, compute=compute)
        self.block = Block(config, layer_id, weights, Runtime(config, batch_size), None, batch_size, compute=compute)
        self.block.attention = self.attention

    def step(
        self, h: torch.Tensor, pre: torch.Tensor, main_x: torch.Tensor, start_pos: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """One call: `h_out` bf16 [B,n,S,D], `pre_out` fp32 [B,n,S] and every intermediate by tap name.

        bf16 h [B,n,S,D] and fp32 pre [B,n,S] of the drafts, bf16 main_x [B,T,D] of the model's positions from int64
        start_pos [B] on.  A prefill (start_pos 0) only seeds the ring: h and pre pass through.
        """
        self.attention.seed(main_x, start_pos)
        if not start_pos.any():
            return {"main_x": main_x, "attn_out": h, "pre_in": pre, "h_out": h, "pre_out": pre}
        no_ids = torch.zeros(h.shape[:2], dtype=torch.int32)
        return {"main_x": main_x, **self.block.step(h, pre, no_ids, start_pos + main_x.shape[1])}

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the model's positions of the last call from `end` on: int64 [B]."""
        self.attention.roll_back(end)

    def state(self) -> dict[str, torch.Tensor]:
        """`window` [B,W,d]."""
        return self.attention.state()


def markov_embedding(weights: Weights, previous_ids: torch.Tensor) -> torch.Tensor:
    """What the Markov head knows of the token before a draft: int32 [B] -> bf16 [B,r]."""
    return embed(weights["markov_head.embed.weight"], previous_ids)


def markov_bias(weights: Weights, previous_ids: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """What the token before a draft adds to its logits: int32 [B] -> fp32 [B,V].

    `weights` are those of the last draft block: `markov_head.embed.weight`, `markov_head.head.weight`.
    """
    embedding = markov_embedding(weights, previous_ids)
    return linear_fp32(embedding, weights["markov_head.head.weight"], compute=compute)


def draft_confidence(
    weights: Weights, hidden: torch.Tensor, previous_ids: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """fp32 projection of [hidden, Markov embedding], no sigmoid: bf16 hidden [B,D], int32 [B] -> fp32 [B].

    `weights` are those of the last draft block: `confidence_head.proj.weight`, `markov_head.embed.weight`.
    """
    features = torch.cat((hidden, markov_embedding(weights, previous_ids)), dim=-1)
    return linear_fp32(features, weights["confidence_head.proj.weight"], compute=compute).squeeze(-1)


class Drafts(NamedTuple):
    """int32 ids [B,1+n] that begin with the model's own token, fp32 logits [B,n,V], fp32 confidence [B,n]."""

    ids: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


def draft_tokens(
    config: Config,
    weights: Weights,
    head_weight: torch.Tensor,
    h: torch.Tensor,
    pre: torch.Tensor,
    output_ids: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> Drafts:
    """The end of the draft head: each draft is chosen knowing the one before it, at temperature 0.

    bf16 h [B,n,S,D] and fp32 pre [B,n,S] of the last draft block, bf16 head_weight [V,D] of the model, int32 output_ids
    [B].  `weights` are those of the last draft block.
    """
    hidden = hyper_connection_read(h, pre, compute=compute)
    normed = rms_norm(hidden, weights["norm.weight"], config.norm_eps, compute=compute)
    base = linear_fp32(normed, head_weight, compute=compute)
    ids, logits, confidence = [output_ids.to(torch.int32)], [], []
    for draft in range(h.shape[1]):
        previous = ids[-1]
        logits.append(base[:, draft] + markov_bias(weights, previous, compute=compute))
        confidence.append(draft_confidence(weights, hidden[:, draft], previous, compute=compute))
        ids.append(greedy(logits[-1]))
    return Drafts(torch.stack(ids, dim=1), torch.stack(logits, dim=1), torch.stack(confidence, dim=1))


class DSpark:
    """The draft head.  `weights` are under checkpoint names: `embed.weight`, `head.weight`, `mtp.{i}.…`."""

    def __init__(
        self, config: Config, weights: Weights, batch_size: int, *, compute: torch.dtype = torch.float32
    ) -> None:
        if not config.dspark_block_size:
            raise ValueError("config: dspark_block_size is missing, the model has no draft head")
        self.config = config
        self.weights = weights
        self.compute = compute
        self.first, self.last = Scoped(weights, "mtp.0"), Scoped(weights, f"mtp.{config.n_mtp_layers - 1}")
        self.blocks = {
            layer_id: DraftBlock(config, layer_id, Scoped(weights, f"mtp.{index}"), batch_size, compute=compute)
            for index, layer_id in enumerate(config.draft_layers)
        }

    def step(
        self, main_hidden: torch.Tensor, output_ids: torch.Tensor, start_pos: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """One call after the model's: `spec_ids` int32 [B,1+n], `spec_logits` fp32 [B,n,V], `spec_confidence` [B,n].

        bf16 main_hidden [B,T,L·D] and int32 output_ids [B] of the model's call at int64 start_pos [B].  The drafts
        stand at the positions after the call's last.  A prefill (start_pos 0) only seeds the rings and drafts nothing.
        """
        config = self.config
        main_x = main_projection(config, self.first, main_hidden, compute=self.compute)
        embedded = draft_embedding(config, self.weights["embed.weight"], output_ids)
        h = embedded.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()
        pre = one_hot_mix(config, *embedded.shape[:2], compute=self.compute)
        taps: dict[str, torch.Tensor] = {}
        for layer_id, block in self.blocks.items():
            of_layer = block.step(h, pre, main_x, start_pos)
            h, pre = of_layer["h_out"], of_layer["pre_out"]
            taps |= {f"layer{layer_id}/{name}": tap for name, tap in of_layer.items()}
        if not start_pos.any():
            return taps
        head_weight = self.weights["head.weight"]
        drafts = draft_tokens(config, self.last, head_weight, h, pre, output_ids, compute=self.compute)
        return taps | {
            "spec_ids": drafts.ids,
            "spec_logits": drafts.logits,
            "spec_confidence": drafts.confidence,
        }

    def roll_back(self, end: torch.Tensor) -> None:
        """Forget the model's positions of the last call from `end` on: int64 [B]."""
        for block in self.blocks.values():
            block.roll_back(end)

    def state(self) -> dict[str, torch.Tensor]:
        """`layer{l}/window` of every draft block."""
        return {f"layer{layer_id}/window": block.attention.window for layer_id, block in self.blocks.items()}
