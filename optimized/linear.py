"""Linear layers as kernels: FP8 and FP4 weights with block scales, bf16 and fp32 weights (numerics.md 3).

Activations are quantised by a kernel of their own, so that no output tile repeats it.  Codes times powers of two are
exact in bf16, so that both sides are dequantised in registers and multiplied by the bf16 matrix instruction with an
fp32 accumulator: the only roundings are those of the fp32 sum.

Few rows leave most of a GPU idle when each program walks all of K, so K is then split, and the partial sums are added
in a fixed order: results do not depend on the timing.
"""

from __future__ import annotations

from optimized.device import INTERPRETED, TARGET_PROGRAMS, for_device

# ruff: isort: split
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from optimized.checks import require_bf16, require_codes, require_shape
from optimized.codecs import decode_e4m3, decode_e8m0, unpack_pairs
from optimized.quantize import FP4_E8M0_GROUP, WEIGHT_DTYPES, WEIGHT_TILE, quantize_fp8

SPLIT_ROWS = 64
"""Up to this many rows K is split."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's share: rows, output features, inputs a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As the launch of a kernel takes them."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }

    def splits(self, rows: int, columns: int, depth: int) -> int:
        """How many programs share the sum of one output tile."""
        if INTERPRETED or rows > SPLIT_ROWS:
            return 1
        programs = triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)
        return max(1, min(TARGET_PROGRAMS // programs, depth // (4 * self.depth)))


# For up to 16 rows, up to SPLIT_ROWS, and more.
SCALED_TILES = (Tiles(16, 64, 128, 4, 3), Tiles(64, 64, 128, 8, 3), Tiles(128, 128, 64, 8, 3))
# The matrix instruction of these takes both operands from registers, so that a dequantised tile must be smaller.
SCALED_TILES_IN_REGISTERS = (*SCALED_TILES[:2], Tiles(128, 128, 32, 8, 3))
TILES = {
    "scaled": for_device(
        {"sm_80": SCALED_TILES_IN_REGISTERS, "sm_120": SCALED_TILES_IN_REGISTERS, "any": SCALED_TILES},
    ),
    "plain": (Tiles(16, 64, 64, 4, 4), Tiles(64, 64, 64, 4, 4), Tiles(128, 128, 64, 8, 3)),
    # Cosines and sines pass through shared memory too, of which sm_120 has least.
    "turned": for_device(
        {
            "sm_120": (Tiles(16, 64, 128, 4, 3), Tiles(64, 64, 64, 4, 3), Tiles(128, 128, 32, 8, 3)),
            "any": (Tiles(16, 64, 128, 4, 3), Tiles(64, 64, 64, 4, 4), Tiles(128, 128, 64, 8, 3)),
        },
    ),
    # NVIDIA has no matrix instruction for fp32.
    "precise": (Tiles(16, 64, 64, 4, 3), Tiles(64, 32, 32, 4, 3), Tiles(64, 32, 32, 4, 3)),
}


def tiles_for(kind: str, rows: int) -> Tiles:
    """Tiles of a kind of product by the number of rows; the interpreter pays by the program and wants few."""
    if INTERPRETED:
        return Tiles(max(16, min(128, triton.next_power_of_2(rows))), 256, 128, 4, 1)
    few, some, many = TILES[kind]
    return few if rows <= few.rows else some if rows <= SPLIT_ROWS else many


@triton.jit
def scaled_activations(x, x_scale, row, depth, present_rows, k, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """A tile of quantised activations, dequantised: bf16 [ROWS, DEPTH] at inputs k..."""
    inputs = k + tl.arange(0, DEPTH)
    inside = present_rows[:, None] & (inputs < depth)[None, :]
    codes = tl.load(x + row[:, None] * depth + inputs[None, :], mask=inside, other=0)
    groups = k // 32 + tl.arange(0, DEPTH // 32)
    in_row = tl.cdiv(depth, 32)
    present = present_rows[:, None] & (groups < in_row)[None, :]
    scale = decode_e8m0(tl.load(x_scale + row[:, None] * in_row + groups[None, :], mask=present, other=127))
    values = tl.reshape(decode_e4m3(codes), (ROWS, DEPTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(values, (ROWS, DEPTH)).to(tl.bfloat16)


@triton.jit
def scaled_weights(
    weight,
    weight_scale,
    column,
    depth,
    present_columns,
    k,
    WEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of the weight, dequantised: bf16 [COLUMNS, DEPTH] at inputs k..."""
    in_row = tl.cdiv(depth, 32)
    groups = k // 32 + tl.arange(0, DEPTH // 32)
    present = present_columns[:, None] & (groups < in_row)[None, :]
    if WEIGHT == "fp8":
        inputs = k + tl.arange(0, DEPTH)
        inside = present_columns[:, None] & (inputs < depth)[None, :]
        values = decode_e4m3(tl.load(weight + column[:, None] * depth + inputs[None, :], mask=inside, other=0))
        scales = weight_scale + (column // 32)[:, None] * in_row + groups[None, :]
    else:
        pairs = k // 2 + tl.arange(0, DEPTH // 2)
        inside = present_columns[:, None] & (pairs < depth // 2)[None, :]
        values = unpack_pairs(tl.load(weight + column[:, None] * (depth // 2) + pairs[None, :], mask=inside, other=0))
        scales = weight_scale + column[:, None] * in_row + groups[None, :]
    scale = decode_e8m0(tl.load(scales, mask=present, other=127))
    scaled = tl.reshape(values, (COLUMNS, DEPTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(scaled, (COLUMNS, DEPTH)).to(tl.bfloat16)


@triton.jit
def _scaled_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    out,
    rows,
    columns,
    depth,
    depth_of_split,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out[split, row, column]: the sum over the split's share of the inputs."""
    split = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    present_rows, present_columns = row < rows, column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, depth_of_split, DEPTH):
        k = split * depth_of_split + step
        left = scaled_activations(x, x_scale, row, depth, present_rows, k, DEPTH, ROWS)
        right = scaled_weights(weight, weight_scale, column, depth, present_columns, k, WEIGHT, DEPTH, COLUMNS)
        total = tl.dot(left, tl.trans(right), total)
    offsets = (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=present_rows[:, None] & present_columns[None, :])


@triton.jit
def _plain_kernel(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    depth_of_split,
    PRECISE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The same without scales; `PRECISE` multiplies in fp32, which bf16 operands do not need."""
    split = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    present_rows, present_columns = row < rows, column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, depth_of_split, DEPTH):
        inputs = split * depth_of_split + step + tl.arange(0, DEPTH)
        inside = inputs < depth
        left = tl.load(
            x + row[:, None] * depth + inputs[None, :], mask=present_rows[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            weight + column[:, None] * depth + inputs[None, :],
            mask=present_columns[:, None] & inside[None, :],
            other=0.0,
        )
        if PRECISE:
            # tf32 would keep 10 of the fraction's bits.
            left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        else:
            total = tl.dot(left, tl.trans(right), total)
    offsets = (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=present_rows[:, None] & present_columns[None, :])


@triton.jit
def _add_splits_kernel(partial, out, elements, splits, BLOCK: tl.constexpr):
    """Partial sums in the order of their inputs."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(0, splits):
        total += tl.load(partial + split * elements + offsets, mask=inside, other=0.0)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Launch:
    """How one product is laid out over programs."""

    tiles: Tiles
    grid: tuple[int, int, int]
    depth_of_split: int
    partial: torch.Tensor
    """The output itself, or one fp32 partial sum a split."""


def plan_launch(kind: str, out: torch.Tensor, rows: int, columns: int, depth: int, groups: int = 1) -> Launch:
    """Of `groups` products side by side, each [rows, depth] times [columns, depth]; their results stand so in `out`."""
    tiles = tiles_for(kind, rows)
    splits = tiles.splits(rows, groups * columns, depth)
    share = triton.cdiv(triton.cdiv(depth, tiles.depth), splits) * tiles.depth
    splits = max(1, triton.cdiv(depth, share)) if share else 1
    grid = (triton.cdiv(rows, tiles.rows), groups * triton.cdiv(columns, tiles.columns), splits)
    partial = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    return Launch(tiles, grid, share, partial)


def gather_splits(launch: Launch, out: torch.Tensor) -> None:
    """Add up what a launch has left in its partial sums."""
    if launch.partial is not out:
        block = 1024
        _add_splits_kernel[(triton.cdiv(out.numel(), block),)](
            launch.partial, out, out.numel(), launch.grid[2], BLOCK=block
        )


def _shapes(x: torch.Tensor, weight: torch.Tensor, packing: int) -> tuple[int, int, int]:
    """Rows, output features and inputs of a product.  A weight of packed pairs takes an even number of inputs.

    Raises:
        ValueError: the weight is not a matrix of as many inputs as x has.
    """
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] * packing != x.shape[-1]:
        raise ValueError(f"weight: expected [N, {x.shape[-1] // packing}] for x {list(x.shape)}: {list(weight.shape)}")
    return x.shape[:-1].numel(), weight.shape[0], x.shape[-1]


def scaled_product(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Quantised activations times a quantised weight: E4M3 [..., K], E8M0 [..., K/32] -> [..., N].

    `kind` is "fp8" (E4M3 [N, K], an E8M0 scale a 32x32 tile) or "fp4" (packed uint8 [N, K/2], E8M0 [N, K/32]);
    `out_dtype` fp32 leaves the sum unrounded.
    """
    rows, columns, depth = _shapes(codes, weight, 1 if kind == "fp8" else 2)
    tile = WEIGHT_TILE if kind == "fp8" else 1
    groups = triton.cdiv(depth, FP4_E8M0_GROUP)
    weight = require_codes("weight", weight, WEIGHT_DTYPES[kind])
    scale = require_codes("scale", scale, torch.float8_e8m0fnu)
    scale = require_shape("scale", scale, triton.cdiv(columns, tile), groups)
    x_codes = require_codes("codes", codes, torch.float8_e4m3fn)
    x_scale = require_codes("x_scale", x_scale, torch.float8_e8m0fnu)
    x_scale = require_shape("x_scale", x_scale, *codes.shape[:-1], groups)
    out = torch.empty(*codes.shape[:-1], columns, dtype=out_dtype, device=codes.device)
    if not out.numel():
        return out
    launch = plan_launch("scaled", out, rows, columns, depth)
    _scaled_kernel[launch.grid](
        x_codes,
        x_scale,
        weight,
        scale,
        launch.partial,
        rows,
        columns,
        depth,
        launch.depth_of_split,
        WEIGHT=kind,
        **launch.tiles.options,
    )
    gather_splits(launch, out)
    return out


def _plain_product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"{name}: expected bf16 or fp32, got {operand.dtype}")
    rows, columns, depth = _shapes(x, weight, 1)
    out = torch.empty(*x.shape[:-1], columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    precise = torch.float32 in (x.dtype, weight.dtype)
    launch = plan_launch("precise" if precise else "plain", out, rows, columns, depth)
    _plain_kernel[launch.grid](
        x.contiguous(),
        weight.contiguous(),
        launch.partial,
        rows,
        columns,
        depth,
        launch.depth_of_split,
        PRECISE=precise,
        **launch.tiles.options,
    )
    gather_splits(launch, out)
    return out


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Q8 of the input times an FP8 weight: bf16 [..., K], E4M3 [N, K], E8M0 tiles -> bf16 [..., N] (numerics.md 3)."""
    return scaled_product(*quantize_fp8(x), weight, scale, "fp8")


def linear_fp4(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Q8 of the input times an FP4 weight: bf16 [..., K], packed uint8 [N, K/2], E8M0 [N, K/32] -> bf16 [..., N].

    (numerics.md 3)
    """
    return scaled_product(*quantize_fp8(x), weight, scale, "fp4")


def linear_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [..., K], bf16 [N, K] -> bf16 [..., N], the sum in fp32 (numerics.md 3)."""
    return _plain_product(require_bf16("x", x), require_bf16("weight", weight), torch.bfloat16)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Input and weight promoted: bf16 or fp32 [..., K] and [N, K] -> fp32 [..., N], not rounded (numerics.md 3)."""
    return _plain_product(x, weight, torch.float32)
