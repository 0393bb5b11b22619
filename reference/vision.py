"""The vision tower and its aligner (numerics.md 11).

Several images may be given at once: their patches follow one another, and `grids` int64 [images, 2] says how many rows
and columns of patches each of them has.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from reference.config import Config
from reference.linear import linear_bf16
from reference.norm import rms_norm
from reference.parameters import Scoped, Shape, Weights
from reference.precision import to_bf16

NORM_EPS = 1e-6


def vision_shapes(config: Config) -> dict[str, Shape]:
    """Weights of the tower, of the aligner and of the delimiters under checkpoint names (numerics.md 11)."""
    width, inner, dim = config.vision_dim, config.vision_inter_dim, config.dim
    shapes: dict[str, Shape] = {
        "vision.patch_embed.proj.weight": (width, 3 * config.vision_patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (dim, width * config.vision_downsample_ratio**2),
        "aligner.w1.bias": (dim,),
        "aligner.w2.weight": (dim, dim),
        "aligner.w2.bias": (dim,),
        "image_start": (dim,),
        "image_newline": (dim,),
        "image_end": (dim,),
    }
    block: dict[str, Shape] = {
        "norm1.weight": (width,),
        "attn.wqkv.weight": (3 * width, width),
        "attn.wqkv.bias": (3 * width,),
        "attn.wo.weight": (width, width),
        "attn.wo.bias": (width,),
        "norm2.weight": (width,),
        "mlp.w1.weight": (2 * inner, width),
        "mlp.w2.weight": (width, inner),
    }
    for number in range(config.vision_n_layers):
        shapes |= {f"vision.blocks.{number}.{name}": shape for name, shape in block.items()}
    return shapes


def linear_with_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """bf16 [..., K], [N, K], [N] -> bf16 [..., N]: the bias joins the fp32 sum, one rounding (numerics.md 11)."""
    return to_bf16(functional.linear(x.to(compute), weight.to(compute), bias.to(compute)))


def patch_embedding(
    config: Config, weights: Weights, patches: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """bf16 patches [n, 3, P, P] flattened as (channel, y, x) and projected -> bf16 [n, vision_dim] (numerics.md 11).

    `weights`: `proj.weight`, `proj.bias`.
    """
    return linear_with_bias(patches.flatten(1), weights["proj.weight"], weights["proj.bias"], compute=compute)


def patch_coordinates(grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every patch in its own image, row-major: int64 [images, 2] -> int64 [n] each."""
    rows = [torch.arange(height).repeat_interleave(width) for height, width in grids.tolist()]
    columns = [torch.arange(width).repeat(height) for height, width in grids.tolist()]
    return torch.cat(rows), torch.cat(columns)


def vision_angles(config: Config, grids: torch.Tensor) -> torch.Tensor:
    """Angles of every patch: fp32 [n, d/2] for heads of width d (numerics.md 11).

    The first d/4 go by row, the other d/4 by column, with the same frequencies theta^(-2i/(d/2)).
    """
    half = config.vision_dim // config.vision_n_heads // 2
    exponent = torch.arange(0, half, 2, dtype=torch.float32) / half
    frequencies = (
        1.0 / torch.pow(torch.tensor(config.vision_rope_theta, dtype=torch.float64), exponent.double()).float()
    )
    row, column = patch_coordinates(grids)
    return torch.cat((row.unsqueeze(-1) * frequencies, column.unsqueeze(-1) * frequencies), dim=-1)


def vision_rotate(
    config: Config, x: torch.Tensor, grids: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Turn the pairs (x[i], x[i + d/2]) of every head: bf16 [n, H, d] -> bf16, same shape (numerics.md 11)."""
    angles = vision_angles(config, grids).unsqueeze(1).to(compute)
    cos, sin = torch.cos(angles), torch.sin(angles)
    first, second = x.to(compute).chunk(2, dim=-1)
    return to_bf16(torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1))


def vision_attention(
    config: Config, weights: Weights, x: torch.Tensor, grids: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """Every patch attends to all patches of its own image: bf16 [n, vision_dim] -> bf16 (numerics.md 11).

    `weights`: `wqkv.weight`, `wqkv.bias`, `wo.weight`, `wo.bias`.  Probabilities are not rounded.
    """
    heads = (config.vision_n_heads, config.vision_dim // config.vision_n_heads)
    qkv = linear_with_bias(x, weights["wqkv.weight"], weights["wqkv.bias"], compute=compute)
    q, k, v = (torch.unflatten(part, -1, heads) for part in qkv.chunk(3, dim=-1))
    q = vision_rotate(config, q, grids, compute=compute)
    k = vision_rotate(config, k, grids, compute=compute)
    lengths = grids.prod(dim=-1).tolist()
    images = zip(torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True)
    out = torch.cat([_attend(*image, heads[1] ** -0.5, compute) for image in images])
    return linear_with_bias(out.flatten(1), weights["wo.weight"], weights["wo.bias"], compute=compute)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, compute: torch.dtype) -> torch.Tensor:
    """Softmax attention inside one image: bf16 [n, H, d] each -> bf16 [n, H, d]."""
    q, k, v = (part.transpose(0, 1).to(compute) for part in (q, k, v))
    probabilities = torch.softmax((q @ k.mT) * scale, dim=-1)
    return to_bf16(probabilities @ v).transpose(0, 1)


def vision_mlp(
    config: Config, weights: Weights, x: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """silu(gate) times up, each rounded: bf16 [n, vision_dim] -> bf16 (numerics.md 11).

    `weights`: `w1.weight` (gate, then up), `w2.weight`.
    """
    gate, up = linear_bf16(x, weights["w1.weight"], compute=compute).chunk(2, dim=-1)
    activated = to_bf16(functional.silu(gate.to(compute)))
    hidden = to_bf16(activated.to(compute) * up.to(compute))
    return linear_bf16(hidden, weights["w2.weight"], compute=compute)


def vision_block(
    config: Config, weights: Weights, x: torch.Tensor, grids: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """x + attention(norm1 x), then + mlp(norm2 x): bf16 [n, vision_dim] -> bf16 (numerics.md 11).

    `weights`: `norm1.weight`, `attn.wqkv.weight`, ..., `norm2.weight`, `mlp.w1.weight`, ...
    """
    normed = rms_norm(x, weights["norm1.weight"], NORM_EPS, compute=compute)
    attended = vision_attention(config, Scoped(weights, "attn"), normed, grids, compute=compute)
    x = to_bf16(x.to(compute) + attended.to(compute))
    normed = rms_norm(x, weights["norm2.weight"], NORM_EPS, compute=compute)
    return to_bf16(x.to(compute) + vision_mlp(config, Scoped(weights, "mlp"), normed, compute=compute).to(compute))


def vision(
    config: Config,
    weights: Weights,
    patches: torch.Tensor,
    grids: torch.Tensor,
    *,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The tower: bf16 patches [n, 3, P, P] -> bf16 [n, vision_dim] after the final norm (numerics.md 11).

    `weights`: `patch_embed.proj.weight`, `blocks.{i}.norm1.weight`, ..., `norm.weight`.
    """
    x = patch_embedding(config, Scoped(weights, "patch_embed"), patches, compute=compute)
    for block in range(config.vision_n_layers):
        x = vision_block(config, Scoped(weights, f"blocks.{block}"), x, grids, compute=compute)
    return rms_norm(x, weights["norm.weight"], NORM_EPS, compute=compute)


def aligner(
    config: Config, weights: Weights, x: torch.Tensor, grids: torch.Tensor, *, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """r x r neighbours become one feature of the language model: bf16 [n, vision_dim] -> bf16 [m, D] (numerics.md 11).

    A grid whose sides are no multiples of r = vision_downsample_ratio gets zeros at its right and lower edge.  The m
    rows of all images follow one another, each in reading order.  `weights`: `w1.weight`, `w1.bias`, `w2.weight`,
    `w2.bias`.
    """
    images = zip(torch.split(x, grids.prod(dim=-1).tolist()), grids.tolist(), strict=True)
    unfolded = torch.cat([_unfold(config, image, *grid) for image, grid in images])
    hidden = linear_with_bias(unfolded, weights["w1.weight"], weights["w1.bias"], compute=compute)
    hidden = to_bf16(functional.gelu(hidden.to(compute)))
    return linear_with_bias(hidden, weights["w2.weight"], weights["w2.bias"], compute=compute)


def _unfold(config: Config, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """One image, [height * width, C] -> [rows * columns, C * r * r], flattened as (channel, dy, dx)."""
    ratio = config.vision_downsample_ratio
    grid = torch.unflatten(x, 0, (height, width)).movedim(-1, 0)
    grid = functional.pad(grid, (0, -width % ratio, 0, -height % ratio))
    cells = torch.unflatten(torch.unflatten(grid, 1, (-1, ratio)), 3, (-1, ratio))
    return cells.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
