"""The grouped projection of what attention has summed up, turned back as it is loaded (numerics.md 6, item 6)."""

from __future__ import annotations

from optimized.device import INTERPRETED  # noqa: F401  (decides how Triton is imported)

# ruff: isort: split
import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_shape
from optimized.linear import gather_splits, plan_launch
from optimized.rotary import turned


@triton.jit
def _turned_back(
    o,
    cos,
    sin,
    start,
    place,
    depth,
    present,
    k,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of heads in a row, turned back and rounded: bf16 [ROWS, DEPTH] at features k...

    `start` are the offsets of a group's first feature, `place` the rows of the tables.
    """
    inputs = k + tl.arange(0, DEPTH)
    inside = present[:, None] & (inputs < depth)[None, :]
    values = tl.load(o + start[:, None] + inputs[None, :], mask=inside, other=0.0).to(tl.float32)
    left, right = tl.split(tl.reshape(values, (ROWS, DEPTH // 2, 2)))
    number = k // 2 + tl.arange(0, DEPTH // 2)
    # Among the pairs of its head that turn; negative for those before them.
    pair = number % (WIDTH // 2) - (WIDTH - TURNING) // 2
    turns = (pair >= 0)[None, :]
    known = present[:, None] & turns & (number < depth // 2)[None, :]
    table = place[:, None] * (TURNING // 2) + pair[None, :]
    cosine = tl.load(cos + table, mask=known, other=1.0)
    sine = tl.load(sin + table, mask=known, other=0.0)
    back_left, back_right = turned(left, right, cosine, -sine)
    # Chosen, not multiplied by one and zero: what stays must not see an infinite neighbour.
    both = tl.join(tl.where(turns, back_left, left), tl.where(turns, back_right, right))
    return tl.reshape(both, (ROWS, DEPTH)).to(tl.bfloat16)


@triton.jit
def _project_kernel(
    o,
    cos,
    sin,
    places,
    weight,
    out,
    rows,
    columns,
    depth,
    depth_of_split,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[split, row, group, column]: the sum over the split's share of the group's features."""
    split = tl.program_id(2)
    blocks = tl.cdiv(columns, COLUMNS)
    group, groups = tl.program_id(1) // blocks, tl.num_programs(1) // blocks
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) % blocks * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    present_rows, present_columns = row < rows, column < columns
    start = (row * groups + group) * depth
    place = tl.load(places + row, mask=present_rows, other=0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, depth_of_split, DEPTH):
        k = split * depth_of_split + step
        left = _turned_back(o, cos, sin, start, place, depth, present_rows, k, WIDTH, TURNING, ROWS, DEPTH)
        inputs = k + tl.arange(0, DEPTH)
        right = tl.load(
            weight + (group * columns + column)[:, None] * depth + inputs[None, :],
            mask=present_columns[:, None] & (inputs < depth)[None, :],
            other=0.0,
        )
        total = tl.dot(left, tl.trans(right), total)
    offsets = ((split * rows + row[:, None]) * groups + group) * columns + column[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=present_rows[:, None] & present_columns[None, :])


def project_turned_back(
    o: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: torch.Tensor, weight: torch.Tensor, groups: int
) -> torch.Tensor:
    """Heads turned back, then each group of them by its own matrix: bf16 o [B,T,H,d] -> bf16 [B,T,groups·N].

    bf16 weight [groups·N, H·d / groups]; fp32 tables [n, R/2] for the last R features of a head; int64 places [B,T]
    below n, which is not checked.
    """
    o, weight = require_bf16("o", o), require_bf16("weight", weight)
    if o.dim() != 4 or o.shape[2] % groups or o.shape[3] % 2:
        raise ValueError(f"o: expected [B, T, H, d] of {groups} groups of heads, d even, got {list(o.shape)}")
    places = require_shape("places", places, *o.shape[:2])
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > o.shape[3]:
        raise ValueError(f"tables: {list(cos.shape)} and {list(sin.shape)} do not go with heads of {o.shape[3]}")
    rows, depth = places.numel(), o.shape[2] // groups * o.shape[3]
    if weight.dim() != 2 or weight.shape[0] % groups or weight.shape[1] != depth:
        raise ValueError(f"weight: expected [{groups} · N, {depth}], got {list(weight.shape)}")
    out = torch.empty(*o.shape[:2], weight.shape[0], dtype=torch.bfloat16, device=o.device)
    if not out.numel():
        return out
    columns = weight.shape[0] // groups
    launch = plan_launch("turned", out, rows, columns, depth, groups)
    _project_kernel[launch.grid](
        o,
        cos.contiguous(),
        sin.contiguous(),
        places,
        weight,
        launch.partial,
        rows,
        columns,
        depth,
        launch.depth_of_split,
        WIDTH=o.shape[3],
        TURNING=2 * cos.shape[1],
        **launch.tiles.options,
    )
    gather_splits(launch, out)
    return out
