"""The draft head (numerics.md 10) on values with error bounds.

`config` is that of the draft blocks, window only and with experts of their own number, except for `main_hidden`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge.bounded import Bounded, concatenate
from conformance.judge.components import attention, sparse_attention, window
from conformance.judge.components.linear import Parameters, product, quantized
from conformance.judge.components.norm import rms_norm

Ints = npt.NDArray[np.int64]


def main_hidden(config: ModelConfig, residuals: Bounded) -> Bounded:
    """Means over the streams of the tapped ones of the model's residuals [B,T,layers,S,D]: [B,T,L*D], not rounded."""
    tapped = residuals[:, :, list(config.dspark_target_layer_ids)]
    batch, length, layers, streams, width = tapped.shape
    return (tapped.sum(-2) * (1.0 / streams)).reshape(batch, length, layers * width)


def main_projection(config: ModelConfig, weights: Parameters, hidden: Bounded) -> Bounded:
    """main_x [B,T,D] before its rounding, of hidden [B,T,L*D], with the parameters of the first draft block."""
    projected = quantized(hidden, weights["main_proj.weight"]).rounded(BF16)
    return rms_norm(projected, weights["main_norm.weight"], config.norm_eps)


def ring(config: ModelConfig, layer: int, weights: Parameters, main_x: Bounded) -> Bounded:
    """The ring [B,W,d] after main_x [B,P,D] of positions 0...P-1; slots never written are zero."""
    positions = np.broadcast_to(np.arange(main_x.shape[1]), main_x.shape[:2])
    rows = window.window_rows(config, layer, weights, main_x, positions)
    held = window.ring_positions(main_x.shape[1], config.window_size)
    return rows[:, np.maximum(held, 0)].scaled(np.where(held >= 0, 1.0, 0.0)[None, :, None])


def draft_heads(
    config: ModelConfig, layer: int, weights: Parameters, x: Bounded, kept: Bounded, start: int
) -> tuple[Bounded, Bounded]:
    """q_latent [B,n,q_lora_rank] and heads [B,n,H,d] before their roundings, of drafts x [B,n,D].

    `kept` [B,W,d] is the ring and `start` the first draft's position.  All drafts are seen by all.
    """
    batch, drafts = x.shape[:2]
    positions: Ints = np.broadcast_to(start + np.arange(drafts), (batch, drafts))
    latent = attention.query_latent(config, weights, x)
    queries = attention.queries(config, layer, weights, latent.rounded(BF16), positions).rounded(BF16)
    own = window.window_rows(config, layer, weights, x, positions)
    seen = min(config.window_size, start)
    rows = concatenate([kept[:, :seen], own], 1)
    counts = np.ones((batch, drafts, rows.shape[1]))
    return latent, sparse_attention.attend(queries, rows, counts, None, weights["attn_sink"], config.head_dim**-0.5)


def draft_output(config: ModelConfig, layer: int, weights: Parameters, o: Bounded, start: int) -> Bounded:
    """attn_out [B,n,D] before its rounding, of heads o [B,n,H,d] as rounded."""
    positions = np.broadcast_to(start + np.arange(o.shape[1]), o.shape[:2])
    return attention.output(config, layer, weights, o, positions)


def base_logits(config: ModelConfig, weights: Parameters, head: npt.NDArray[np.float64], hidden: Bounded) -> Bounded:
    """Logits [B,n,V] without the Markov bias, of hidden [B,n,D] as rounded; `head` [V,D] is the model's."""
    normed = rms_norm(hidden, weights["norm.weight"], config.norm_eps).rounded(BF16)
    return product(normed, head)


def markov_bias(weights: Parameters, previous: Ints) -> Bounded:
    """The Markov head's bias [...,V] after the tokens `previous` [...]."""
    embedding = Bounded.exact(weights["markov_head.embed.weight"][previous])
    return product(embedding, weights["markov_head.head.weight"])


def confidence(weights: Parameters, hidden: Bounded, previous: Ints) -> Bounded:
    """The raw confidence [...] of hidden [...,D] as rounded, after the tokens `previous` [...]."""
    embedding = Bounded.exact(weights["markov_head.embed.weight"][previous])
    features = concatenate([hidden, embedding], -1)
    return product(features, weights["confidence_head.proj.weight"])[..., 0]
