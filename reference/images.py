"""From pixels to patches, and from patches to the places of an image in a prompt (numerics.md 11).

Only the resampling of pixels needs a library: Pillow, whose bicubic filter the published code uses.  Everything else is
here, so an image that needs no resampling needs no Pillow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from reference.config import Config
from reference.parameters import Weights
from reference.precision import to_bf16

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
"""Token types."""

GREY = 127


class ResizePlan(NamedTuple):
    """Sizes as (rows, columns): of the canvas in pixels, of the patch grid, of the aligner's grid; and the tokens."""

    canvas: tuple[int, int]
    patch_grid: tuple[int, int]
    aligner_grid: tuple[int, int]
    tokens: int


def span_length(rows: int, columns: int) -> int:
    """Tokens of an image with an aligner grid: a newline a row, a start and an end (numerics.md 11)."""
    return rows * (columns + 1) + 2


def image_resize_plan(config: Config, width: int, height: int) -> ResizePlan:
    """The canvas that an image of width x height pixels is fitted into (numerics.md 11).

    Everything is float64 in the order written; the published code leaves its rounding to that.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image: {width}x{height} pixels")
    wide: float = width
    tall: float = height
    if config.vision_max_wh_ratio is not None and wide > tall * config.vision_max_wh_ratio:
        wide = tall * config.vision_max_wh_ratio
    if wide * tall < config.vision_min_pixels:
        growth = math.sqrt(config.vision_min_pixels / (wide * tall))
        wide, tall = int(wide * growth), int(tall * growth)
    patch = config.vision_patch_size
    canvas = math.ceil(tall / patch) * patch, math.ceil(wide / patch) * patch
    plan = _plan(config, canvas)
    return plan if plan.tokens <= config.vision_max_n_token else _plan(config, largest_canvas(config, tall, wide))


def _plan(config: Config, canvas: tuple[int, int]) -> ResizePlan:
    rows, columns = (side // config.vision_patch_size for side in canvas)
    grid = math.ceil(rows / config.vision_downsample_ratio), math.ceil(columns / config.vision_downsample_ratio)
    return ResizePlan(canvas, (rows, columns), grid, span_length(*grid))


def largest_canvas(config: Config, height: float, width: float) -> tuple[int, int]:
    """The largest canvas (rows, columns of pixels) of about this aspect whose span fits (numerics.md 11).

    An aligner grid of c columns and c * aspect rows takes c * aspect * (c + 1) + 2 tokens, which bounds c.
    """
    patch, cell = config.vision_patch_size, config.vision_patch_size * config.vision_downsample_ratio
    room = config.vision_max_n_token - 2
    aspect = height / width
    columns = math.sqrt(room / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1.0:
        return room // 2 * cell, cell
    if rows < 1.0:
        return cell, (room - 1) * cell
    shrink = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(height * shrink / patch) * patch, math.floor(width * shrink / patch) * patch


def fitted_size(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """The largest size (rows, columns) of an image's aspect inside a canvas; the free side is rounded half to even."""
    (height, width), (tall, wide) = size, canvas
    if width / height > wide / tall:
        return round(height / width * wide), wide
    if width / height < wide / tall:
        return tall, round(width / height * tall)
    return canvas


def fit(pixels: torch.Tensor, canvas: tuple[int, int], stretch: bool) -> torch.Tensor:
    """Pixels on the canvas: uint8 [h, w, 3] -> uint8 [rows, columns, 3] (numerics.md 11).

    With `stretch` both sides are resampled; otherwise the picture keeps its aspect, stands in the middle and is
    surrounded by grey.  Half a pixel is rounded to even.
    """
    height, width = canvas if stretch else fitted_size((pixels.shape[0], pixels.shape[1]), canvas)
    picture = resample(pixels, height, width)
    top, left = round((canvas[0] - height) * 0.5), round((canvas[1] - width) * 0.5)
    placed = torch.full((*canvas, 3), GREY, dtype=torch.uint8)
    placed[top : top + height, left : left + width] = picture
    return placed


def resample(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Pillow's bicubic filter: uint8 [h, w, 3] -> uint8 [height, width, 3]; nothing happens at the same size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    from PIL import Image

    resized = Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.BICUBIC)
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(height, width, 3)


def image_patches(config: Config, pixels: torch.Tensor) -> torch.Tensor:
    """RGB pixels uint8 [h, w, 3] -> bf16 patches [n, 3, P, P], row-major over the patch grid (numerics.md 11)."""
    height, width = pixels.shape[:2]
    plan = image_resize_plan(config, width, height)
    limit = config.vision_max_wh_ratio
    canvas = fit(pixels, plan.canvas, stretch=limit is not None and width >= limit * height)
    scaled = (canvas.float() / 255 - 0.5) / 0.5
    size = config.vision_patch_size
    patches = torch.unflatten(torch.unflatten(scaled, 0, (-1, size)), 2, (-1, size))
    return to_bf16(patches.permute(0, 2, 4, 1, 3).flatten(0, 1))


def image_spans(
    config: Config, input_ids: torch.Tensor, patch_grids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every image of a prompt its span (numerics.md 11).

    int32 input_ids [N] with one image token an image, int64 patch_grids [images, 2] in the same order -> input_ids and
    token types, int32 [T] each.
    """
    ids: list[int] = []
    types: list[int] = []
    grids = iter(patch_grids.tolist())
    for token in input_ids.tolist():
        if token != config.image_token_id:
            ids.append(token)
            types.append(TEXT)
            continue
        rows, columns = (math.ceil(side / config.vision_downsample_ratio) for side in next(grids))
        span = [START, *([IMAGE] * columns + [NEWLINE]) * rows, END]
        ids += [token] * len(span)
        types += span
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(types, dtype=torch.int32)


def merge_images(
    config: Config, weights: Weights, embedded: torch.Tensor, token_types: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Put aligner rows and delimiters at their places: bf16 [B,T,D], int32 [B,T], bf16 [m,D] -> bf16 [B,T,D].

    The rows of all images follow one another in the order of their places, request by request (numerics.md 11).
    `weights`: `image_start`, `image_newline`, `image_end`.
    """
    merged = embedded.clone()
    merged[token_types == IMAGE] = features
    for token_type, name in ((START, "image_start"), (NEWLINE, "image_newline"), (END, "image_end")):
        merged[token_types == token_type] = weights[name]
    return merged
