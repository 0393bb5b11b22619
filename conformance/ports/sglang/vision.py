"""Vision: SGLang's preprocessing and the parts of its tower that are ordinary torch.

Its attention and norms belong to the engine's layers and are left out, and so are blocks and tower.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from conformance.interface import Array, Config, Implementation, Unsupported, Weights
from conformance.ports.sglang.parts import SGLANG

PREPROCESSING = "sglang.srt.multimodal.deepseek_v41_image_processing"
TOWER = "sglang.srt.models.deepseek_v41_vit"


class Vision(Implementation):
    """What needs no more of the engine than its arguments."""

    def image_resize_plan(self, config: Config, width: int, height: int) -> tuple[Array, Array, Array, Array]:
        """Its plan of the grid."""
        plan = SGLANG.function(PREPROCESSING, "plan_image_grid")(width, height, SimpleNamespace(**config))
        count = SGLANG.function(PREPROCESSING, "num_image_tokens")
        rows, columns, canvas_height, canvas_width = plan
        patch = config["vision_patch_size"]
        return (
            torch.tensor([canvas_height, canvas_width]),
            torch.tensor([canvas_height // patch, canvas_width // patch]),
            torch.tensor([rows, columns]),
            torch.tensor(count(rows, columns)),
        )

    def image_patches(self, config: Config, pixels: Array) -> Array:
        """Its preprocessing with Pillow."""
        try:
            from PIL import Image
        except ImportError as missing:
            raise Unsupported("sglang: images need Pillow") from missing
        image = Image.fromarray(pixels.numpy())
        result: Array = SGLANG.function(PREPROCESSING, "patchify_image")(image, SimpleNamespace(**config))[0]
        return result

    def patch_embedding(self, config: Config, weights: Weights, patches: Array) -> Array:
        """Its projection."""
        return _with("PatchEmbed", config, {f"proj.{name}": weights[f"proj.{name}"] for name in ("weight", "bias")})(
            patches
        )

    def vision_rotate(self, config: Config, x: Array, grids: Array) -> Array:
        """Image by image, each with the table of its grid."""
        tables, turn = SGLANG.function(TOWER, "get_vision_cos_sin"), SGLANG.function(TOWER, "apply_rotary")
        images = x.split([int(rows * columns) for rows, columns in grids])
        half = x.shape[-1] // 2
        theta = config["vision_rope_theta"]
        return torch.cat(
            [
                turn(image, *tables(int(rows), int(columns), half, theta))
                for image, (rows, columns) in zip(images, grids, strict=True)
            ]
        )

    def vision_mlp(self, config: Config, weights: Weights, x: Array) -> Array:
        """Its gated layer."""
        return _with("MLP", config, {f"{name}.weight": weights[f"{name}.weight"] for name in ("w1", "w2")})(x)

    def aligner(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """Image by image."""
        names = ("w1.weight", "w1.bias", "w2.weight", "w2.bias")
        align = _with("Aligner", config, {name: weights[name] for name in names})
        images = x.split([int(rows * columns) for rows, columns in grids])
        return torch.cat(
            [align(image, int(rows), int(columns)) for image, (rows, columns) in zip(images, grids, strict=True)]
        )


def _with(kind: str, config: Config, parameters: Weights) -> Any:
    """A module of the tower with these parameters."""
    with torch.device("meta"):
        module = SGLANG.function(TOWER, kind)(SimpleNamespace(**config))
    module.load_state_dict(dict(parameters), assign=True)
    return module.requires_grad_(False)
