"""The gate of the mixture of experts as a kernel (numerics.md 7)."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from optimized.checks import require_shape
from optimized.config import Config
from optimized.linear import linear_fp32

TOKENS_PER_PROGRAM = 256 if INTERPRETED else 4
LINEAR_ABOVE = tl.constexpr(20.0)
"""softplus(z) is z from here on."""


@triton.jit
def softplus(z):
    """log(1 + e^z) without cancellation: log1p of e^-|z| by the correction of the rounded sum."""
    small = tl.exp(-tl.abs(z))
    sum_ = 1.0 + small
    rest = tl.where(sum_ == 1.0, small, tl.log(sum_) * tl.div_rn(small, tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.where(z > LINEAR_ABOVE, z, tl.maximum(z, 0.0) + rest)


@triton.jit
def _gate_kernel(
    logits,
    bias,
    bias_vl,
    image_mask,
    routing,
    indices,
    tokens,
    route_scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    IMAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, PADDED)
    inside = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    z = tl.load(logits + token[:, None] * EXPERTS + expert[None, :], mask=inside, other=0.0)
    score = tl.sqrt_rn(softplus(z))
    offset = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    if IMAGES:
        seen = tl.load(image_mask + token, mask=token < tokens, other=0) != 0
        other = tl.load(bias_vl + expert, mask=expert < EXPERTS, other=0.0)[None, :]
        offset = tl.where(seen[:, None], other, offset)
    biased = tl.where(inside, score + offset, float("-inf"))
    choice = tl.arange(0, CHOSEN_PADDED)
    weight = tl.zeros((TOKENS, CHOSEN_PADDED), tl.float32)
    chosen = tl.zeros((TOKENS, CHOSEN_PADDED), tl.int32)
    free = tl.full((TOKENS, PADDED), 1, tl.int32)
    for place in tl.static_range(CHOSEN):
        # The first of equal scores.  What was chosen is out of the running even where every score is -inf.
        left = tl.where(free != 0, biased, float("-inf"))
        largest = tl.max(left, axis=1)
        candidates = tl.where((free != 0) & (left == largest[:, None]), expert[None, :], PADDED)
        best = tl.min(candidates, axis=1)
        at = expert[None, :] == best[:, None]
        weight = tl.where(choice[None, :] == place, tl.sum(tl.where(at, score, 0.0), axis=1)[:, None], weight)
        chosen = tl.where(choice[None, :] == place, best[:, None], chosen)
        free = tl.where(at, 0, free)
    total = tl.sum(weight, axis=1) + 1e-20
    weight = tl.div_rn(weight, total[:, None]) * route_scale
    offsets = token[:, None] * CHOSEN + choice[None, :]
    known = (token < tokens)[:, None] & (choice < CHOSEN)[None, :]
    tl.store(routing + offsets, weight, mask=known)
    tl.store(indices + offsets, chosen, mask=known)


def gate(
    config: Config, weights: Mapping[str, torch.Tensor], x: torch.Tensor, image_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 x [N,D], bool image_mask [N] -> routing weights fp32 [N,k], expert indices int32 [N,k] (numerics.md 7).

    `weights`: `weight`, `bias`, `bias_vl`.
    """
    logits = linear_fp32(x, weights["weight"])
    tokens, experts = logits.shape
    chosen = config.n_activated_experts
    routing = torch.empty(tokens, chosen, dtype=torch.float32, device=x.device)
    indices = torch.empty(tokens, chosen, dtype=torch.int32, device=x.device)
    if not tokens:
        return routing, indices
    bias = require_shape("bias", weights["bias"].float(), experts)
    bias_vl = bias if image_mask is None else require_shape("bias_vl", weights["bias_vl"].float(), experts)
    if image_mask is not None:
        image_mask = require_shape("image_mask", image_mask, tokens)
    _gate_kernel[(triton.cdiv(tokens, TOKENS_PER_PROGRAM),)](
        logits,
        bias,
        bias_vl,
        bias if image_mask is None else image_mask.view(torch.uint8),
        routing,
        indices,
        tokens,
        config.route_scale,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        CHOSEN=chosen,
        CHOSEN_PADDED=triton.next_power_of_2(chosen),
        TOKENS=TOKENS_PER_PROGRAM,
        IMAGES=image_mask is not None,
    )
    return routing, indices
