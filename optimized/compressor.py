"""The compressor: groups of tokens pooled into one row, which is cached packed (numerics.md 6.2)."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from optimized.checks import require_shape, require_state
from optimized.config import Config
from optimized.linear import linear_bf16, linear_fp32
from optimized.norm import normalised, rms_norm
from optimized.rotary import rotate
from optimized.runtime import Batch, LayerState

GROUPS_PER_PROGRAM = 32 if INTERPRETED else 1


def compressed_rows(config: Config, layer_id: int, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bf16 latent [B,n,d], int64 positions [B,n] of each group's first token -> bf16 cached rows (numerics.md 6.2)."""
    return rotate(config, layer_id, latent, positions, form="fp4_e4m3")


@triton.jit
def _member(
    call, carry, group, number, first, slot, length, ring, feature, inside, RATIO: tl.constexpr, WIDTH: tl.constexpr
):
    """Token `number` of each group, from this call or from the carry: fp32 [GROUPS, PADDED]."""
    position = group * RATIO + number
    ours = (position >= first) & (position < first + length)
    of_call = tl.load(
        call + (position - first)[:, None] * WIDTH + feature[None, :], mask=ours[:, None] & inside, other=0.0
    )
    kept = carry + (slot * ring + position % ring)[:, None] * WIDTH + feature[None, :]
    before = tl.load(kept, mask=(position < first)[:, None] & inside, other=0.0)
    return tl.where(ours[:, None], of_call, before)


@triton.jit
def _pool_kernel(
    kv,
    score,
    carry_kv,
    carry_score,
    norm_weight,
    slots,
    start,
    latent,
    length,
    groups_of_request,
    ring,
    kept,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Groups of one request: softmax over their tokens, weighted sum, RMSNorm.  The first program keeps the carry."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    first = tl.load(start + request)
    slot = tl.load(slots + request)
    group = first // RATIO + row
    exists = (row < groups_of_request) & (group < (first + length) // RATIO)
    feature = tl.arange(0, PADDED)
    known = feature < WIDTH
    inside = exists[:, None] & known[None, :]
    own_kv, own_score = kv + request * length * WIDTH, score + request * length * WIDTH

    largest = tl.full((GROUPS, PADDED), float("-inf"), tl.float32)
    for number in tl.static_range(RATIO):
        gate = _member(own_score, carry_score, group, number, first, slot, length, ring, feature, inside, RATIO, WIDTH)
        largest = tl.maximum(largest, gate)
    total = tl.zeros((GROUPS, PADDED), tl.float32)
    for number in tl.static_range(RATIO):
        gate = _member(own_score, carry_score, group, number, first, slot, length, ring, feature, inside, RATIO, WIDTH)
        total += tl.exp(gate - largest)
    pooled = tl.zeros((GROUPS, PADDED), tl.float32)
    for number in tl.static_range(RATIO):
        gate = _member(own_score, carry_score, group, number, first, slot, length, ring, feature, inside, RATIO, WIDTH)
        value = _member(own_kv, carry_kv, group, number, first, slot, length, ring, feature, inside, RATIO, WIDTH)
        pooled += value * (tl.exp(gate - largest) / total)
    # Rounded before the norm, as it would be by a kernel of its own; rows that do not exist are zero.
    pooled = tl.where(inside, pooled, 0.0).to(tl.bfloat16).to(tl.float32)
    weight = tl.load(norm_weight + feature, mask=known, other=0.0).to(tl.float32)
    normed = normalised(pooled, weight, eps, WIDTH).to(tl.bfloat16)
    place = (request * groups_of_request + row)[:, None] * WIDTH + feature[None, :]
    tl.store(latent + place, normed, mask=(row < groups_of_request)[:, None] & known[None, :])

    if tl.program_id(1) == 0:
        # Only this program's groups reach back into the carry, and it has read them.
        tl.debug_barrier()
        for back in range(1, kept + 1):
            token = length - back
            source = token * WIDTH + feature
            target = (slot * ring + (first + token) % ring) * WIDTH + feature
            tl.store(carry_kv + target, tl.load(own_kv + source, mask=known, other=0.0), mask=known)
            tl.store(carry_score + target, tl.load(own_score + source, mask=known, other=0.0), mask=known)


def pool(
    kv: torch.Tensor,
    score: torch.Tensor,
    ratio: int,
    state: LayerState,
    batch: Batch,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Pool the groups that a call completes, norm them, and keep its last tokens for the next (numerics.md 6.2).

    fp32 kv and score [B,T,d], the projected tokens; the carry of `state` is read and written in place -> latent bf16
    [B,⌈T/ratio⌉,d], row j for the group ⌊start / ratio⌋ + j, zero where that is not complete.

    Raises:
        ValueError: shapes that do not belong together, or a layer without a carry.
    """
    if state.carry_kv is None or state.carry_score is None:
        raise ValueError("state: the layer keeps no carry")
    width = state.carry_kv.shape[-1]
    kv = require_shape("kv", kv, batch.size, batch.length, width)
    score = require_shape("score", score, batch.size, batch.length, width)
    carry_kv = require_state("carry_kv", state.carry_kv, torch.float32, width)
    carry_score = require_state("carry_score", state.carry_score, torch.float32, width)
    norm_weight = require_shape("norm_weight", norm_weight, width)
    groups, ring = triton.cdiv(batch.length, ratio), carry_kv.shape[1]
    latent = torch.empty(batch.size, groups, width, dtype=torch.bfloat16, device=kv.device)
    _pool_kernel[(batch.size, triton.cdiv(groups, GROUPS_PER_PROGRAM))](
        kv,
        score,
        carry_kv,
        carry_score,
        norm_weight,
        batch.slots,
        batch.start,
        latent,
        batch.length,
        groups,
        ring,
        min(batch.length, ring),
        eps,
        RATIO=ratio,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        GROUPS=GROUPS_PER_PROGRAM,
    )
    return latent


class Compressor:
    """The compressor of one KV source: its weights.  What waits for the rest of its group is in the runtime."""

    def __init__(self, config: Config, layer_id: int, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are those of the attention."""
        self.ratio, self.eps = config.ratio(layer_id), config.norm_eps
        self.layer_id = layer_id
        self.wkv, self.norm = weights["compressor.wkv.weight"], weights["compressor.norm.weight"]
        self.wgate = weights["compressor.wgate.weight"] if self.ratio > 1 else None

    def step(self, state: LayerState, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        """bf16 x [B,T,D] -> latent bf16 [B,⌈T/ratio⌉,d], before rotation (numerics.md 6.2).

        Row j stands for the group ⌊start / ratio⌋ + j of its request, and is zero where the call does not complete it.
        """
        if self.wgate is None:
            return rms_norm(linear_bf16(x, self.wkv), self.norm, self.eps)
        kv, score = linear_fp32(x, self.wkv), linear_fp32(x, self.wgate)
        return pool(kv, score, self.ratio, state, batch, self.norm, self.eps)
