"""Image preprocessing of the reference: invariants of the plan, and pixels against Pillow itself."""

from __future__ import annotations

import json
import math
import sys
from importlib import resources

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, strategies as st

from conformance.adapters.reference import Reference
from conformance.cases.vectors.images import LIMITED, RESAMPLED, SMALL, pattern, stored_canvases
from conformance.config import ModelConfig
from conformance.interface import Unsupported
from conformance.judge.components import images as judge
from reference.config import Config
from reference.images import fit, fitted_size, image_patches, image_resize_plan, span_length

RELEASED = json.loads(resources.files("conformance").joinpath("configs/released.json").read_text())
CONFIGS = (RELEASED, {**RELEASED, "vision_max_wh_ratio": 8}, SMALL, LIMITED)
SIDES = st.integers(1, 30_000)
mappings = st.sampled_from(CONFIGS)


@given(mappings, SIDES, SIDES)
@example(RELEASED, 2509, 2504)
@example(RELEASED, 1, 30_000)
@example(LIMITED, 30_000, 1)
def test_a_plan_is_whole_and_fits(mapping: dict[str, object], width: int, height: int) -> None:
    config = Config.from_mapping(mapping)
    plan = image_resize_plan(config, width, height)
    assert plan.tokens == span_length(*plan.aligner_grid) <= config.vision_max_n_token
    for pixels, patches, cells in zip(*plan[:3], strict=True):
        assert pixels == patches * config.vision_patch_size > 0
        assert cells == math.ceil(patches / config.vision_downsample_ratio)


@given(mappings, SIDES, SIDES)
@example(RELEASED, 2509, 2504)
def test_the_judge_plans_the_same(mapping: dict[str, object], width: int, height: int) -> None:
    plan = image_resize_plan(Config.from_mapping(mapping), width, height)
    sizes = judge.sizes(ModelConfig.from_mapping(mapping, "test"), np.array([height, width]))
    assert [tuple(size.tolist()) for size in sizes] == list(plan[:3])
    assert sizes.tokens == plan.tokens


@given(mappings, SIDES, SIDES)
def test_a_canvas_is_planned_as_itself(mapping: dict[str, object], width: int, height: int) -> None:
    """Where no limit of the width changes it: it is whole patches and fits already."""
    config = Config.from_mapping(mapping)
    assume(config.vision_max_wh_ratio is None)
    canvas = image_resize_plan(config, width, height).canvas
    assume(math.prod(canvas) >= config.vision_min_pixels)
    assert image_resize_plan(config, canvas[1], canvas[0]).canvas == canvas


@given(SIDES, SIDES)
def test_turning_an_image_turns_its_plan(width: int, height: int) -> None:
    """Where no token limit counts newlines, which stand behind rows only."""
    config = Config.from_mapping({**RELEASED, "vision_max_n_token": 1 << 40})
    upright, turned = image_resize_plan(config, width, height), image_resize_plan(config, height, width)
    assert upright.canvas == turned.canvas[::-1]


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 40), st.integers(1, 40))
def test_a_fitted_picture_lies_inside_its_canvas(height: int, width: int, rows: int, columns: int) -> None:
    canvas = (4 * rows, 4 * columns)
    size = fitted_size((height, width), canvas)
    assert all(0 <= side <= limit for side, limit in zip(size, canvas, strict=True))
    assert size[0] == canvas[0] or size[1] == canvas[1]


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="pixels"):
        image_resize_plan(Config.from_mapping(RELEASED), *size)


def test_without_pillow_only_resampling_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    port = Reference()
    assert port.image_patches(SMALL, torch.from_numpy(pattern(16, 20))).shape == (20, 3, 4, 4)
    with pytest.raises(Unsupported, match=r"install the extra \[vision\]"):
        port.image_patches(SMALL, torch.from_numpy(pattern(5, 7)))


def test_nothing_is_resampled_without_need() -> None:
    """An image of its canvas' own size passes through; Pillow is not asked."""
    config = Config.from_mapping(SMALL)
    patches = image_patches(config, torch.from_numpy(pattern(16, 20)))
    pixels = torch.from_numpy(pattern(16, 20)).double()
    assert torch.equal(patches[0], ((pixels[:4, :4] / 255 - 0.5) / 0.5).permute(2, 0, 1).float().bfloat16())
    assert torch.equal(patches[6], ((pixels[4:8, 4:8] / 255 - 0.5) / 0.5).permute(2, 0, 1).float().bfloat16())


@pytest.mark.parametrize(("name", "mapping", "shape"), RESAMPLED, ids=[name for name, _, _ in RESAMPLED])
def test_stored_pictures_are_what_pillow_makes(name: str, mapping: dict[str, object], shape: tuple[int, int]) -> None:
    image, image_ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    canvas = stored_canvases()[name]
    size = (canvas.shape[1], canvas.shape[0])
    limit = mapping["vision_max_wh_ratio"]
    picture = image.fromarray(pattern(*shape))
    stretched = isinstance(limit, int) and shape[1] >= limit * shape[0]
    made = picture.resize(size) if stretched else image_ops.pad(picture, size, color=(127, 127, 127))
    assert np.array_equal(np.asarray(made), canvas)


@given(st.integers(1, 60), st.integers(1, 60))
def test_fitting_is_pillows(height: int, width: int) -> None:
    image, image_ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    canvas = image_resize_plan(Config.from_mapping(SMALL), width, height).canvas
    pixels = pattern(height, width)
    try:
        expected = np.asarray(image_ops.pad(image.fromarray(pixels), canvas[::-1], color=(127, 127, 127)))
    except ValueError:
        # An image so narrow that not a pixel of it is left: Pillow refuses, and so does the reference.
        with pytest.raises(ValueError, match="pixel"):
            fit(torch.from_numpy(pixels), canvas, stretch=False)
        return
    assert np.array_equal(fit(torch.from_numpy(pixels), canvas, stretch=False).numpy(), expected)
