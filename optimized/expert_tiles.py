"""Rows ordered by expert and cut into tiles of one expert each (numerics.md 7).

An expert without rows has no tile.  How many tiles there are is known on the device only: launches have as many
programs as the most that so many rows can need, and those beyond the last tile end at once.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, for_device

# ruff: isort: split
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from optimized.linear import Tiles

FEW_ROWS = Tiles(16, 64, 128, 4, 3)
# The matrix instruction of these takes both operands from registers: a step must be smaller for nothing to spill.
MANY_ROWS_IN_REGISTERS = Tiles(64, 64, 32, 4, 2)
# For up to 16 rows an expert on average, and for more: 64 rows read the weights of an expert a quarter as often.
TILES = for_device(
    {
        "interpreted": (Tiles(16, 256, 256, 4, 1), Tiles(64, 256, 256, 4, 1)),
        "sm_80": (FEW_ROWS, MANY_ROWS_IN_REGISTERS),
        "sm_120": (FEW_ROWS, MANY_ROWS_IN_REGISTERS),
        # Stages ahead are held in registers.
        "gfx": (Tiles(16, 64, 128, 4, 2), Tiles(64, 64, 128, 8, 2)),
        "any": (FEW_ROWS, Tiles(64, 64, 128, 8, 3)),
    }
)


def tiles_for(rows: int, experts: int) -> Tiles:
    """Tiles for so many rows of so many experts, by the mean: how many each one has is not known on the host."""
    few, many = TILES
    return few if rows <= few.rows * experts else many


def fitted(tiles: Tiles, columns: int, depth: int) -> tuple[int, int]:
    """Output features and inputs of a tile; the interpreter pays for every element of it, also beyond the matrix."""
    if not INTERPRETED:
        return tiles.columns, tiles.depth
    return min(tiles.columns, triton.next_power_of_2(columns)), min(tiles.depth, triton.next_power_of_2(depth))


class RowTiles(NamedTuple):
    """Each tile: its expert, its first row in the order of experts, and the end of the expert's rows.

    A tile beyond the last one starts at the end of its expert's rows or after it.
    """

    experts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    """int64 [tiles] each."""
    order: torch.Tensor
    """int64 [rows]: the slot (token · choices + choice) of each row."""

    @classmethod
    def of(cls, place: torch.Tensor, experts: int, rows: int) -> RowTiles:
        """int32 place [N, k] in a stack of experts -> tiles of so many rows, without asking the device for a number."""
        flat = place.flatten().long()
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
        row_ends = counts.cumsum(0)
        tile_ends = ((counts + rows - 1) // rows).cumsum(0)
        # The most: every expert has a row, and each further tile takes as many rows as fill one.
        chosen = min(experts, flat.numel())
        tile = torch.arange(chosen + (flat.numel() - chosen) // rows, device=flat.device)
        expert = torch.searchsorted(tile_ends, tile, right=True).clamp(max=experts - 1)
        first_tile = tile_ends[expert] - (counts[expert] + rows - 1) // rows
        starts = row_ends[expert] - counts[expert] + (tile - first_tile) * rows
        return cls(expert, starts, row_ends[expert], order)


@triton.jit
def row_tile(tile_experts, tile_starts, row_ends, order, choices, ROWS: tl.constexpr):
    """This program's tile: whether it has none, its expert, which rows exist, and each row's token and slot."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    start, end = tl.load(tile_starts + tile), tl.load(row_ends + tile)
    row = start + tl.arange(0, ROWS)
    present = row < end
    slot = tl.load(order + row, mask=present, other=0).to(tl.int64)
    return start >= end, expert, present, slot // choices, slot
