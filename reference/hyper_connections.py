"""Hyper-connections: how a sublayer reads and writes the residual streams (numerics.md 5, model.py 907–994)."""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.precision import to_bf16


def sinkhorn(c: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """Make the mixing matrix nearly doubly stochastic: fp32 [..., S, S] -> fp32 [..., S, S] (numerics.md 5).

    The first round's row step is a softmax; every later round divides by row sums, then by column sums.
    """
    c = torch.exp(c - c.amax(dim=-1, keepdim=True))
    c = c / c.sum(dim=-1, keepdim=True) + eps
    c = c / (c.sum(dim=-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + eps)
        c = c / (c.sum(dim=-2, keepdim=True) + eps)
    return c


def hyper_connection_coefficients(
    config: Config,
    h: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of one sublayer from the flattened residual (numerics.md 5).

    bf16 h [B,T,S,D], fp32 fn [(2+S)S, S·D], scale [3], base [(2+S)S] -> fp32 pre, post [B,T,S] and comb [B,T,S,S],
    comb as [summed stream, written stream].
    """
    streams = config.hc_mult
    flat = h.flatten(-2).to(compute)
    inverse_rms = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + config.norm_eps)
    mixes = functional.linear(flat, fn.to(compute)) * inverse_rms
    sections = [streams, streams, streams * streams]
    repeated_scale = scale.to(compute).repeat_interleave(torch.tensor(sections))
    pre, post, comb = torch.split(mixes * repeated_scale + base.to(compute), sections, dim=-1)
    pre = torch.sigmoid(pre) + config.hc_eps
    post = 2.0 * torch.sigmoid(post)
    comb = sinkhorn(torch.unflatten(comb, -1, (streams, streams)), config.hc_sinkhorn_iters, config.hc_eps)
    return pre, post, comb


def hyper_connection_read(h: torch.Tensor, pre: torch.Tensor, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """x = Σ_j pre[j] · h[j]: bf16 h [B,T,S,D], fp32 pre [B,T,S] -> bf16 [B,T,D] (numerics.md 5)."""
    h, pre = h.to(compute), pre.to(compute)
    return to_bf16((pre.unsqueeze(-1) * h).sum(dim=-2))


def hyper_connection_write(
    y: torch.Tensor, h: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """h'[k] = post[k] · y + Σ_j comb[j,k] · h[j]: the sum runs over the first index of comb (numerics.md 5).

    bf16 y [B,T,D], bf16 h [B,T,S,D], fp32 post [B,T,S], comb [B,T,S,S] -> bf16 [B,T,S,D].
    """
    y, h, post, comb = y.to(compute), h.to(compute), post.to(compute), comb.to(compute)
    mixed = torch.zeros_like(h)
    for stream in range(h.shape[-2]):
        mixed = mixed + comb[..., stream, :, None] * h[..., stream, None, :]
    return to_bf16(post.unsqueeze(-1) * y.unsqueeze(-2) + mixed)


def one_hot_mix(config: Config, batch_size: int, length: int, *, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """The mix with which the first layer reads, (1, 0, …, 0): fp32 [B,T,S] (numerics.md 5)."""
    pre = torch.zeros(batch_size, length, config.hc_mult, dtype=compute)
    pre[..., 0] = 1.0
    return pre
