"""The reference's vision tower, aligner and placement: against the recorded image, and image by image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reference.config import Config
from reference.images import END, IMAGE, NEWLINE, START, TEXT, image_spans, merge_images
from reference.parameters import Scoped
from reference.vision import aligner, vision, vision_angles

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
GRIDS = ((7, 6), (1, 1), (3, 4), (2, 8), (6, 3))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.from_mapping(json.loads((TINY / "config.json").read_text()))


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return load_file(TINY / "weights.safetensors")


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(TINY / "image-prefill-24.safetensors")


@pytest.fixture(scope="module")
def patches(config: Config) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    size = config.vision_patch_size
    return {str(grid): torch.randn(grid[0] * grid[1], 3, size, size, generator=generator).bfloat16() for grid in GRIDS}


def test_the_recorded_image(config: Config, weights: Tensors, golden: Tensors) -> None:
    grids = torch.tensor([[7, 6]])
    features = vision(config, Scoped(weights, "vision"), golden["image/patches"], grids).double()
    recorded = golden["image/vit_out"].double()
    assert (features - recorded).norm() <= 3e-3 * recorded.norm()
    rows = aligner(config, Scoped(weights, "aligner"), golden["image/vit_out"], grids)
    assert torch.equal(rows, golden["image/aligner_out"])
    types = golden["image/token_types"]
    merged = merge_images(config, weights, golden["call0/embed"], types, rows)
    for stream in golden["call0/layer0/h_in"].unbind(2):
        assert torch.equal(merged, stream)


def test_several_images_are_as_each_alone(config: Config, weights: Tensors, patches: Tensors) -> None:
    tower, merger = Scoped(weights, "vision"), Scoped(weights, "aligner")
    together = vision(config, tower, torch.cat(list(patches.values())), torch.tensor(GRIDS))
    alone = [vision(config, tower, patches[str(grid)], torch.tensor([grid])) for grid in GRIDS]
    # Products of other sizes may sum in another order.
    assert (together.double() - torch.cat(alone).double()).norm() <= 3e-3 * together.double().norm()
    rows = aligner(config, merger, together, torch.tensor(GRIDS))
    assert rows.shape == (sum(-(-h // 3) * -(-w // 3) for h, w in GRIDS), config.dim)


@pytest.mark.parametrize("grid", GRIDS)
def test_an_odd_grid_is_one_with_zeros_around(config: Config, weights: Tensors, grid: tuple[int, int]) -> None:
    """What an explicitly padded image gives, patch by patch laid out by hand."""
    height, width = grid
    x = torch.randn(height * width, config.vision_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    tall, wide = -(-height // 3) * 3, -(-width // 3) * 3
    padded = torch.zeros(tall * wide, config.vision_dim, dtype=torch.bfloat16)
    for row in range(height):
        for column in range(width):
            padded[row * wide + column] = x[row * width + column]
    merger = Scoped(weights, "aligner")
    whole = aligner(config, merger, padded, torch.tensor([[tall, wide]]))
    assert torch.equal(aligner(config, merger, x, torch.tensor([grid])), whole)


def test_rows_turn_the_first_angles(config: Config) -> None:
    angles = vision_angles(config, torch.tensor([[3, 2]]))
    quarter = config.vision_dim // config.vision_n_heads // 4
    assert torch.equal(angles[:, 0], torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]))
    assert torch.equal(angles[:, quarter], torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]))


def test_spans_of_several_images(config: Config) -> None:
    token = config.image_token_id
    ids, types = image_spans(config, torch.tensor([token, 7, token, token], dtype=torch.int32), torch.tensor(GRIDS[:3]))
    first = [START, IMAGE, IMAGE, NEWLINE, IMAGE, IMAGE, NEWLINE, IMAGE, IMAGE, NEWLINE, END]
    expected = [*first, TEXT, START, IMAGE, NEWLINE, END, START, IMAGE, IMAGE, NEWLINE, END]
    assert types.tolist() == expected
    assert ids.tolist() == [7 if kind == TEXT else token for kind in expected]


def test_a_prompt_without_images_is_left_alone(config: Config, weights: Tensors) -> None:
    ids = torch.tensor([3, 4], dtype=torch.int32)
    same, types = image_spans(config, ids, torch.zeros(0, 2, dtype=torch.int64))
    assert torch.equal(same, ids)
    embedded = torch.randn(1, 2, config.dim).bfloat16()
    none = torch.zeros(0, config.dim, dtype=torch.bfloat16)
    assert torch.equal(merge_images(config, weights, embedded, types[None], none), embedded)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"vision_dim": 0}, "vision_dim must be at least 1"), ({"vision_n_heads": 3}, "not divisible by 4 times")],
)
def test_a_tower_that_cannot_be(config: Config, change: dict[str, int], message: str) -> None:
    mapping = json.loads((TINY / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        Config.from_mapping(mapping)
