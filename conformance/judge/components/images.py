"""Image preprocessing and placement (numerics.md 11): sizes and places exactly, pixels on values with error bounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded, Floats

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

TYPES = {"text": -1, "start": 0, "image": 1, "newline": 2, "end": 3}
GREY = 127


class Sizes(NamedTuple):
    """Rows and columns, int64 [2] each: pixels of the canvas, patches, cells of the aligner."""

    canvas: Ints
    patch_grid: Ints
    aligner_grid: Ints

    @property
    def tokens(self) -> int:
        """The span's length: every cell, a newline a row, start and end."""
        rows, columns = self.aligner_grid
        return int(rows * columns + rows + 2)


def sizes(config: ModelConfig, pixels: Ints) -> Sizes:
    """Sizes for an image of `pixels` = (rows, columns).

    numpy's float64 throughout: IEEE arithmetic fixes every rounding, so this is exact although it is not in integers.
    """
    sides = np.asarray(pixels, dtype=np.float64)
    widest = config.vision_max_wh_ratio
    if widest and sides[1] > sides[0] * widest:
        sides[1] = sides[0] * widest
    if sides.prod() < config.vision_min_pixels:
        sides = np.trunc(sides * np.sqrt(config.vision_min_pixels / sides.prod()))
    found = of_patches(config, np.ceil(sides / config.vision_patch_size))
    if found.tokens <= config.vision_max_n_token:
        return found
    return of_patches(config, _reduced(config, sides))


def of_patches(config: ModelConfig, patches: Floats) -> Sizes:
    """Sizes that follow from a grid of whole patches [2]."""
    counts = patches.astype(np.int64)
    return Sizes(counts * config.vision_patch_size, counts, -(-counts // config.vision_downsample_ratio))


def _reduced(config: ModelConfig, sides: Floats) -> Floats:
    """Patches [2] of the largest size of this aspect whose span fits.

    c columns of cells and c a rows take c a (c + 1) + 2 tokens: a c^2 + a c = room, whose root is c.
    """
    ratio, room = config.vision_downsample_ratio, config.vision_max_n_token - 2
    aspect = sides[0] / sides[1]
    columns = np.sqrt(room / aspect + 0.25) - 0.5
    cells = np.array([columns * aspect, columns])
    if columns < 1:
        return np.array([room // 2 * ratio, ratio], dtype=np.float64)
    if cells[0] < 1:
        return np.array([ratio, (room - 1) * ratio], dtype=np.float64)
    cell = ratio * config.vision_patch_size
    shrink = (np.floor(cells) * cell / sides).min()
    return np.asarray(np.floor(sides * shrink / config.vision_patch_size))


def inside(pixels: tuple[int, int], canvas: Ints) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size of an image fitted into the canvas, and its upper left corner, both as (rows, columns).

    The side that is free is rounded to the nearest number, and so is half the room beside it; halves go to even.
    """
    rows, columns = int(canvas[0]), int(canvas[1])
    own, wanted = pixels[1] / pixels[0], columns / rows
    size = (rows, columns)
    if own > wanted:
        size = (int(np.rint(pixels[0] / pixels[1] * columns)), columns)
    elif own < wanted:
        size = (rows, int(np.rint(pixels[1] / pixels[0] * rows)))
    return size, (int(np.rint((rows - size[0]) / 2)), int(np.rint((columns - size[1]) / 2)))


def on_canvas(picture: Bytes, corner: tuple[int, int], canvas: Ints) -> Bytes:
    """A picture [h,w,3] on grey: uint8 [rows,columns,3]."""
    result = np.full((int(canvas[0]), int(canvas[1]), 3), GREY, dtype=np.uint8)
    result[corner[0] : corner[0] + picture.shape[0], corner[1] : corner[1] + picture.shape[1]] = picture
    return result


def patches(config: ModelConfig, canvas: Bytes) -> Bounded:
    """(x/255 - 1/2) / (1/2) of a canvas, cut into patches [n,3,P,P] row by row, before the rounding."""
    size = config.vision_patch_size
    pieces = [
        canvas[row : row + size, column : column + size].transpose(2, 0, 1)
        for row in range(0, canvas.shape[0], size)
        for column in range(0, canvas.shape[1], size)
    ]
    return ((Bounded.exact(np.stack(pieces)) / 255.0) - 0.5).scaled(2.0)


def spans(config: ModelConfig, prompt: Ints, patch_grids: Ints) -> tuple[Ints, Ints]:
    """Ids and token types of a prompt [N] whose image tokens stand for images of these patch grids, in order."""
    ids, types = [], []
    grids = iter(-(-patch_grids // config.vision_downsample_ratio))
    for token in prompt:
        if token != config.image_token_id:
            ids.append([token])
            types.append([TYPES["text"]])
            continue
        rows, columns = next(grids)
        inner = np.full((rows, columns + 1), TYPES["image"])
        inner[:, -1] = TYPES["newline"]
        types.append([TYPES["start"], *inner.ravel(), TYPES["end"]])
        ids.append([token] * (inner.size + 2))
    return np.concatenate(ids).astype(np.int64), np.concatenate(types).astype(np.int64)


def merged(embedded: Floats, token_types: Ints, features: Floats, delimiters: dict[str, Floats]) -> Floats:
    """Embeddings [B,T,D] with the rows `features` [m,D] and the delimiters at their places."""
    result, rows = embedded.copy(), iter(features)
    names = {number: name for name, number in TYPES.items()}
    for place in np.ndindex(token_types.shape):
        name = names[int(token_types[place])]
        if name == "image":
            result[place] = next(rows)
        elif name != "text":
            result[place] = delimiters[name]
    return result
