"""Hand-made vectors of image preprocessing and placement (numerics.md 11).

Pixels are judged where nothing is resampled, so that a port needs no particular library for them, and on a few small
pictures as Pillow's bicubic filter resamples them: those were stored once (`resampled.json`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.model import released_configuration
from conformance.cases.traces import Ints, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.vision import VISION_CONFIG
from conformance.config import ModelConfig
from conformance.judge.components import images as rules_of
from conformance.judge.components.images import Bytes, Sizes
from conformance.judge.expectations import Exact, Expectation, Within
from conformance.tensors import Tensor

SMALL: Mapping[str, Any] = {**VISION_CONFIG, "vision_patch_size": 4}
"""Patches of 4x4 pixels, cells of 3x3 patches, at least 144 pixels, at most 64 tokens, any width."""
LIMITED: Mapping[str, Any] = {**SMALL, "vision_max_wh_ratio": 3}
"""The same with widths of at most three times the height."""
WIDE_PATCHES: Mapping[str, Any] = {**SMALL, "vision_patch_size": 8}

PIXEL_AXES = ("patch", "channel", "y", "x")
PLAN_TAPS = ("canvas", "patch_grid", "aligner_grid")


@dataclass(frozen=True)
class Plan:
    """Sizes of images as (width, height) with the patch grids (rows, columns) that were worked out by hand."""

    variant: str
    why: str
    flags: tuple[str, ...]
    config: Mapping[str, Any]
    grids: Mapping[tuple[int, int], tuple[int, int]]


RELEASED = released_configuration()

PLANS = (
    Plan(
        "sides-rounded-up",
        "Fails when sides are rounded down or to the nearest multiple of a patch, or width and height are swapped.",
        ("image-plan-rounding", "image-plan-sides"),
        RELEASED,
        {
            (546, 546): (39, 39),
            (547, 560): (40, 40),
            (640, 480): (35, 46),
            (480, 640): (46, 35),
            (799, 601): (43, 58),
            (1274, 728): (52, 91),
        },
    ),
    Plan(
        "small-images-grow",
        "Fails when small images are left alone, grow by the ratio and not by its root, or grow to a rounded side.",
        ("image-plan-growth",),
        RELEASED,
        # 544^2 pixels: both sides times the root of what is missing, the fraction cut off.
        {
            (1, 1): (39, 39),  # 544 x 544
            (100, 100): (39, 39),
            (300, 200): (32, 48),  # 666 x 444
            (320, 260): (35, 44),  # 603 x 490, which is 35 patches exactly
            (20, 500): (195, 8),  # 108 x 2720
            (543, 544): (39, 39),
        },
    ),
    Plan(
        "too-many-tokens",
        "Fails when newlines, start and end are not counted, or the grid is not the largest that keeps the aspect.",
        ("image-plan-limit",),
        RELEASED,
        {
            (1920, 1080): (69, 122),
            (1080, 1920): (122, 69),
            (4032, 3024): (81, 108),
            (600, 3600): (216, 36),  # 12.56 columns of cells, 75.36 rows
            (2048, 2048): (93, 93),
            (1302, 1302): (93, 93),  # 31 x 32 + 2 = 994: fits
            (1316, 1316): (93, 93),  # 32 x 33 + 2 = 1058: does not
            (3010, 588): (42, 215),  # 14 x 73 + 2 = 1024: just fits
        },
    ),
    Plan(
        "one-column-one-row",
        "Fails when a very tall or very wide image does not end as one column or one row of cells.",
        ("image-plan-strip",),
        RELEASED,
        {
            (50, 60000): (1533, 3),  # 511 rows of one cell
            (60000, 50): (3, 3063),  # 1021 cells in one row
            (14, 200000): (1533, 3),
        },
    ),
    Plan(
        "float64-decides",
        "Fails when the plan is computed in fp32, exactly, or in another order: float64 loses a patch at these sizes.",
        ("image-plan-precision",),
        RELEASED,
        {
            (2509, 2504): (92, 92),  # exactly 92 x 93
            (2211, 1173): (68, 128),  # exactly 68 x 129
            (753, 5899): (235, 29),  # exactly 235 x 30
            (4640, 706): (35, 236),  # exactly 36 x 236
        },
    ),
    Plan(
        "width-limited",
        "Fails when the limit of the width is ignored, applies to the height too, or clips the height.",
        ("image-plan-width",),
        LIMITED,
        {
            (48, 12): (3, 9),  # counts as 36 x 12
            (36, 12): (3, 9),
            (12, 48): (12, 3),  # a height is not limited
            (400, 5): (2, 5),  # 15 x 5, grown to 20 x 6
        },
    ),
)


@dataclass(frozen=True)
class Picture:
    """One image that needs no resampling: its pixels, and the configuration."""

    variant: str
    why: str
    flags: tuple[str, ...]
    config: Mapping[str, Any]
    pixels: tuple[Bytes, ...]


def pattern(height: int, width: int) -> Bytes:
    """Pixels [height, width, 3] that look alike nowhere."""
    y, x, channel = np.indices((height, width, 3))
    return np.asarray((37 * y + 91 * x + 53 * channel + 17 * x * y) % 256, dtype=np.uint8)


def every_value() -> Bytes:
    """All 256 values, another order in each channel."""
    value = np.arange(256).reshape(16, 16)
    return np.stack([value, 255 - value, (value * 7 + 3) % 256], -1).astype(np.uint8)


PICTURES = (
    Picture(
        "every-value",
        "Fails when pixels are divided by 256, mean and deviation are exchanged, or bf16 comes before the subtraction.",
        ("image-normalisation", "patch-order", "patch-channels"),
        SMALL,
        (every_value(),),
    ),
    Picture(
        "patches-in-rows",
        "Fails when patches are taken column by column, are transposed inside, or channels come last or as BGR.",
        ("patch-order", "patch-channels"),
        SMALL,
        (pattern(12, 20), pattern(20, 12)),
    ),
    Picture(
        "grey-around",
        "Fails when padding is black or white, all on one side, or its odd half is rounded another way.",
        ("image-padding", "image-padding-side"),
        WIDE_PATCHES,
        (*(pattern(24 - k, 24) for k in range(1, 8)), *(pattern(24, 24 - k) for k in range(1, 8))),
    ),
)


def cases() -> Iterator[Case]:
    """Plans, pictures, spans and merges."""
    for plan in PLANS:
        yield _case(f"plan/{plan.variant}", "exact", plan.why, partial(_plans, plan), plan.flags)
    yield _case(
        "plan/many-sizes",
        "exact",
        "Fails when any branch of the plan is wrong for some size, with and without a limit of the width.",
        _many_plans,
        ("image-plan-rounding", "image-plan-growth", "image-plan-limit", "image-plan-precision"),
    )
    for picture in PICTURES:
        yield _case(f"patches/{picture.variant}", "composed", picture.why, partial(_pictures, picture), picture.flags)
    yield _case(
        "patches/resampled",
        "composed",
        "Fails when another filter than Pillow's bicubic resamples, or the aspect is kept where the width was clipped.",
        _resampled,
        ("image-filter", "image-stretch", "image-padding"),
    )
    yield _case(
        "span/several-images",
        "exact",
        "Fails when images at the start, at the end or side by side lose a delimiter, or grids are taken out of order.",
        _spans,
        ("image-span-layout", "image-span-grid", "image-order"),
    )
    yield _case(
        "merge/several-images",
        "exact",
        "Fails when rows of one image stand in another's places, or a request without images gets some.",
        _merges,
        ("image-merge-place", "image-delimiters", "image-order"),
    )


def _case(behaviour: str, mode: Any, why: str, steps: Any, flags: tuple[str, ...]) -> Case:
    return Case(f"vision/{behaviour}", "core", mode, why, "numerics.md 11", steps, flags, "hand-made")


def _read(config: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig.from_mapping(config, "conformance/cases/vectors/images.py")


def _plan(config: Mapping[str, Any], width: int, height: int, sizes: Sizes) -> Step:
    def rules() -> list[Expectation]:
        sides = [Exact(tap, int64(value), ("rows or columns",)) for tap, value in zip(PLAN_TAPS, sizes, strict=True)]
        return [*sides, Exact("tokens", Tensor("I64", np.asarray(sizes.tokens, np.int64)), ())]

    request = Call("image_resize_plan", {"config": config, "width": width, "height": height})
    return Step(request, rules, Place(None, [f"{width}x{height}"]))


def _plans(plan: Plan) -> Iterator[Step]:
    config = _read(plan.config)
    for (width, height), grid in plan.grids.items():
        yield _plan(plan.config, width, height, rules_of.of_patches(config, np.asarray(grid, dtype=np.float64)))


def _many_plans() -> Iterator[Step]:
    """Sizes spread evenly over logarithms, from one pixel to thirty thousand."""
    generator = np.random.default_rng(110)
    for mapping in (RELEASED, {**RELEASED, "vision_max_wh_ratio": 8}, SMALL, LIMITED):
        config = _read(mapping)
        for width, height in np.exp(generator.uniform(0.0, 10.3, (100, 2))).astype(np.int64).tolist():
            yield _plan(mapping, width, height, rules_of.sizes(config, np.array([height, width])))


def _patches(config: Mapping[str, Any], pixels: Bytes, canvas: Bytes) -> Step:
    def rules() -> list[Expectation]:
        return [Within("patches", rules_of.patches(_read(config), canvas), "BF16", PIXEL_AXES)]

    request = Call("image_patches", {"config": config, "pixels": Tensor("U8", pixels)})
    return Step(request, rules, Place(None, [f"{pixels.shape[1]}x{pixels.shape[0]} pixels"]))


def _pictures(picture: Picture) -> Iterator[Step]:
    config = _read(picture.config)
    for pixels in picture.pixels:
        shape = (pixels.shape[0], pixels.shape[1])
        canvas = rules_of.sizes(config, np.asarray(shape)).canvas
        size, corner = rules_of.inside(shape, canvas)
        assert size == shape, f"{shape} pixels are resampled to {size}"
        yield _patches(picture.config, pixels, rules_of.on_canvas(pixels, corner, canvas))


RESAMPLED: Sequence[tuple[str, Mapping[str, Any], tuple[int, int]]] = (
    ("grown", SMALL, (5, 7)),
    ("grown-tall", SMALL, (11, 4)),
    ("shrunk", SMALL, (90, 77)),
    ("clipped", LIMITED, (5, 31)),
    ("clipped-at-the-limit", LIMITED, (13, 39)),
)
"""Name, configuration, and pixels (rows, columns) of the pictures in `resampled.json`."""


def stored_canvases() -> Mapping[str, Bytes]:
    """The canvases as Pillow made them, uint8 [rows, columns, 3] by name."""
    text = resources.files("conformance.cases.vectors").joinpath("resampled.json").read_text(encoding="utf-8")
    return {
        name: np.frombuffer(base64.b64decode(stored["rgb"]), dtype=np.uint8).reshape(*stored["canvas"], 3)
        for name, stored in json.loads(text).items()
    }


def _resampled() -> Iterator[Step]:
    canvases = stored_canvases()
    for name, config, shape in RESAMPLED:
        yield _patches(config, pattern(*shape), canvases[name])


PROMPT_GRIDS = ((3, 3), (4, 7), (1, 1), (6, 2))
IMAGE_TOKEN = int(VISION_CONFIG["image_token_id"])
PROMPT = (IMAGE_TOKEN, 5, 17, IMAGE_TOKEN, IMAGE_TOKEN, 7, IMAGE_TOKEN)
"""Images at the start, side by side, and at the end."""


def _spans() -> Iterator[Step]:
    config = _read(VISION_CONFIG)
    prompts: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]] = (
        (PROMPT, PROMPT_GRIDS),
        ((IMAGE_TOKEN,), ((2, 9),)),
        ((3, 4, 5), ()),
    )
    for ids, grids in prompts:
        prompt, shapes = np.asarray(ids, np.int64), np.asarray(grids, np.int64).reshape(-1, 2)

        def rules(prompt: Ints = prompt, shapes: Ints = shapes) -> list[Expectation]:
            expected = rules_of.spans(config, prompt, shapes)
            return [
                Exact(tap, Tensor("I32", value.astype(np.int32)), ("position",))
                for tap, value in zip(("input_ids", "token_types"), expected, strict=True)
            ]

        arguments = {
            "config": VISION_CONFIG,
            "input_ids": Tensor("I32", prompt.astype(np.int32)),
            "patch_grids": int64(shapes),
        }
        yield Step(Call("image_spans", arguments), rules, Place(None, [f"{len(grids)} images"]))


def _merges() -> Iterator[Step]:
    """Three requests of a batch: two images, none, one at the very start."""
    config = _read(VISION_CONFIG)
    first = rules_of.spans(config, np.array([9, IMAGE_TOKEN, 8, IMAGE_TOKEN]), np.array([[3, 6], [1, 1]]))[1]
    third = rules_of.spans(config, np.array([IMAGE_TOKEN, 9, 8]), np.array([[4, 3]]))[1]
    types = np.full((3, first.size), rules_of.TYPES["text"], dtype=np.int64)
    types[0], types[2, : third.size] = first, third
    embedded = made.bf16("images.embedded", *types.shape, config.dim)
    features = made.bf16("images.features", int((types == rules_of.TYPES["image"]).sum()), config.dim)
    delimiters = {name: made.bf16(f"images.{name}", config.dim) for name in ("start", "newline", "end")}
    arguments = {
        "config": VISION_CONFIG,
        "weights": {f"image_{name}": tensor for name, tensor in delimiters.items()},
        "embedded": embedded,
        "token_types": Tensor("I32", types.astype(np.int32)),
        "features": features,
    }

    def rules() -> list[Expectation]:
        values = {name: tensor.values() for name, tensor in delimiters.items()}
        expected = rules_of.merged(embedded.values(), types, features.values(), values)
        return [Exact("merged", Tensor.from_values(expected, "BF16"), ("request", "position", "feature"))]

    yield Step(Call("merge_images", arguments), rules)
