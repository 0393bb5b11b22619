"""The experts of the mixture as grouped kernels (numerics.md 7).

A tile of rows belongs to one expert, and an expert without tokens moves nothing.  Three kernels: gate and up with the
clamped SwiGLU, the routing weight and the quantiser of the result; down; and the sum over a token's experts, in the
order of its choices.
"""

from __future__ import annotations

from optimized.device import INTERPRETED  # noqa: F401  (decides how Triton is imported)

# ruff: isort: split
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.codecs import encode_e4m3
from optimized.config import Config
from optimized.expert_stack import ExpertStack, routed_stack, stack_experts
from optimized.expert_tiles import RowTiles, fitted, row_tile, tiles_for
from optimized.hyper_connections import sigmoid
from optimized.linear import scaled_activations, scaled_weights
from optimized.quantize import quantize_fp8, scale_fp8

SUMMED = 1024
"""Features that a program of the last sum takes."""


@triton.jit
def _up_kernel(
    x,
    x_scale,
    gate_weight,
    gate_scale,
    up_weight,
    up_scale,
    routing,
    hidden,
    hidden_scale,
    tile_experts,
    tile_starts,
    row_ends,
    order,
    choices,
    depth,
    inner,
    weight_stride,
    scale_stride,
    limit,
    WEIGHT: tl.constexpr,
    ROUTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """hidden[slot] = Q8(silu(min(gate, limit)) · clamp(up) · routing weight) of each row of a tile."""
    none, expert, present, token, slot = row_tile(tile_experts, tile_starts, row_ends, order, choices, ROWS)
    if none:
        # Beyond the last tile: nothing of the weights is read.
        return
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    known = column < inner
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, depth, DEPTH):
        left = scaled_activations(x, x_scale, token, depth, present, k, DEPTH, ROWS)
        right = scaled_weights(
            gate_weight + expert * weight_stride,
            gate_scale + expert * scale_stride,
            column,
            depth,
            known,
            k,
            WEIGHT,
            DEPTH,
            COLUMNS,
        )
        gate = tl.dot(left, tl.trans(right), gate)
        right = scaled_weights(
            up_weight + expert * weight_stride,
            up_scale + expert * scale_stride,
            column,
            depth,
            known,
            k,
            WEIGHT,
            DEPTH,
            COLUMNS,
        )
        up = tl.dot(left, tl.trans(right), up)
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    # Comparisons, so that NaN stays NaN; the gate is not clamped from below.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    values = gate * sigmoid(gate) * up
    if ROUTED:
        values = values * tl.load(routing + slot, mask=present, other=0.0)[:, None]
    values = values.to(tl.bfloat16).to(tl.float32)
    scaled, code, _ = scale_fp8(tl.reshape(values, (ROWS * (COLUMNS // 32), 32)))
    inside = present[:, None] & known[None, :]
    codes = tl.reshape(encode_e4m3(scaled), (ROWS, COLUMNS))
    tl.store(hidden + slot[:, None] * inner + column[None, :], codes, mask=inside)
    in_row = tl.cdiv(inner, 32)
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    tl.store(
        hidden_scale + slot[:, None] * in_row + group[None, :],
        tl.reshape(code.to(tl.uint8), (ROWS, COLUMNS // 32)),
        mask=present[:, None] & (group < in_row)[None, :],
    )


@triton.jit
def _down_kernel(
    hidden,
    hidden_scale,
    weight,
    scale,
    out,
    tile_experts,
    tile_starts,
    row_ends,
    order,
    inner,
    width,
    weight_stride,
    scale_stride,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[slot] = w2 · hidden[slot], bf16."""
    none, expert, present, _, slot = row_tile(tile_experts, tile_starts, row_ends, order, 1, ROWS)
    if none:
        # Beyond the last tile: nothing of the weights is read.
        return
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    known = column < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, inner, DEPTH):
        left = scaled_activations(hidden, hidden_scale, slot, inner, present, k, DEPTH, ROWS)
        right = scaled_weights(
            weight + expert * weight_stride,
            scale + expert * scale_stride,
            column,
            inner,
            known,
            k,
            WEIGHT,
            DEPTH,
            COLUMNS,
        )
        total = tl.dot(left, tl.trans(right), total)
    inside = present[:, None] & known[None, :]
    tl.store(out + slot[:, None] * width + column[None, :], total.to(tl.bfloat16), mask=inside)


@triton.jit
def _sum_kernel(routed, shared, out, choices, width, SHARED: tl.constexpr, FEATURES: tl.constexpr):
    """The fp32 sum of a token's experts, the shared one last."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < width
    total = tl.zeros((FEATURES,), tl.float32)
    for choice in range(0, choices):
        offsets = (token * choices + choice) * width + feature
        total += tl.load(routed + offsets, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * width + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + feature, total.to(tl.bfloat16), mask=inside)


def grouped_experts(
    config: Config, stack: ExpertStack, x: torch.Tensor, place: torch.Tensor, routing: torch.Tensor | None
) -> torch.Tensor:
    """Each token's experts, not yet summed: bf16 x [N,D], int32 place [N,k] -> bf16 [N,k,D].

    fp32 routing [N,k] enters before the down projection; None for a shared expert.
    """
    x = require_bf16("x", x)
    if x.dim() != 2 or place.dim() != 2 or len(place) != len(x):
        raise ValueError(f"x, choices: expected [N, D] and [N, k], got {list(x.shape)} and {list(place.shape)}")
    tokens, choices = place.shape
    if routing is not None:
        routing = require_shape("routing", routing, tokens, choices)
    (w1, s1), (w2, s2), (w3, s3) = (stack.matrices[name] for name in ("w1", "w2", "w3"))
    depth, inner = x.shape[1], w1.shape[1]
    if w1.shape[2] * (2 if stack.kind == "fp4" else 1) != depth:
        raise ValueError(f"x: {depth} features, but the experts' w1 is {list(w1.shape[1:])} of {stack.kind}")
    out = torch.empty(tokens, choices, w2.shape[1], dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    codes, scales = quantize_fp8(x)
    tiles = tiles_for(place.numel(), w1.shape[0])
    cut = RowTiles.of(place, w1.shape[0], tiles.rows)
    hidden = torch.empty(tokens * choices, inner, dtype=torch.uint8, device=x.device)
    hidden_scale = torch.empty(tokens * choices, triton.cdiv(inner, 32), dtype=torch.uint8, device=x.device)
    columns, step = fitted(tiles, inner, depth)
    _up_kernel[(cut.experts.numel(), triton.cdiv(inner, columns))](
        codes.view(torch.uint8),
        scales.view(torch.uint8),
        w1,
        s1,
        w3,
        s3,
        hidden_scale if routing is None else routing,
        hidden,
        hidden_scale,
        *cut,
        choices,
        depth,
        inner,
        w1.stride(0),
        s1.stride(0),
        config.swiglu_limit,
        WEIGHT=stack.kind,
        ROUTED=routing is not None,
        ROWS=tiles.rows,
        COLUMNS=columns,
        DEPTH=step,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    columns, step = fitted(tiles, w2.shape[1], inner)
    _down_kernel[(cut.experts.numel(), triton.cdiv(w2.shape[1], columns))](
        hidden,
        hidden_scale,
        w2,
        s2,
        out,
        *cut,
        inner,
        w2.shape[1],
        w2.stride(0),
        s2.stride(0),
        WEIGHT=stack.kind,
        ROWS=tiles.rows,
        COLUMNS=columns,
        DEPTH=step,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def expert(
    config: Config, weights: Mapping[str, torch.Tensor], x: torch.Tensor, routing_weight: torch.Tensor | None
) -> torch.Tensor:
    """One expert, FP4 (routed) or FP8 (shared): bf16 x [N,D], fp32 routing_weight [N] or None -> bf16 [N,D] (7)."""
    single = {f"only.{name}": tensor for name, tensor in weights.items()}
    stack = stack_experts(single, {0: "only"}, 1)
    place = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    routing = None if routing_weight is None else routing_weight.unsqueeze(1)
    return grouped_experts(config, stack, x, place, routing).squeeze(1)


@dataclass(frozen=True)
class LayerExperts:
    """All experts of a layer, laid out once."""

    routed: ExpertStack
    shared: ExpertStack | None

    @classmethod
    def of(cls, config: Config, weights: Mapping[str, torch.Tensor]) -> LayerExperts:
        """From `experts.{i}.w1.weight`, `shared_experts.w1.weight`, ..."""
        shared = stack_experts(weights, {0: "shared_experts"}, 1) if config.n_shared_experts else None
        return cls(routed_stack(config, weights), shared)

    def mix(
        self, config: Config, x: torch.Tensor, routing_weights: torch.Tensor, expert_indices: torch.Tensor
    ) -> torch.Tensor:
        """Routed experts as chosen plus the shared one: bf16 x [N,D], [N,k], int32 [N,k] -> bf16 [N,D] (7)."""
        place = self.routed.place[expert_indices.long()]
        routed = grouped_experts(config, self.routed, x, place, routing_weights)
        tokens, choices, width = routed.shape
        out = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
        if not out.numel():
            return out
        shared = routed
        if self.shared is not None:
            only = torch.zeros(tokens, 1, dtype=torch.int32, device=x.device)
            shared = grouped_experts(config, self.shared, x, only, None)
        _sum_kernel[(tokens, triton.cdiv(width, SUMMED))](
            routed, shared, out, choices, width, SHARED=self.shared is not None, FEATURES=SUMMED
        )
        return out


def experts(
    config: Config,
    weights: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    routing_weights: torch.Tensor,
    expert_indices: torch.Tensor,
) -> torch.Tensor:
    """Routed experts as chosen plus the shared expert: bf16 x [N,D], [N,k], int32 [N,k] -> bf16 [N,D] (numerics.md 7).

    `weights`: `experts.{i}.w1.weight`, `shared_experts.w1.weight`, ...
    """
    return LayerExperts.of(config, weights).mix(config, x, routing_weights, expert_indices)
