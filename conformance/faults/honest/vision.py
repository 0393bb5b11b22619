"""Variants of the vision tower and of what feeds it."""

from __future__ import annotations

import torch

from conformance.adapters.reference import Reference
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Edit
from conformance.interface import Array, Config, Weights

SUM_ORDER = "The order of a sum is free (numerics.md 0)."
PROBABILITIES = "torch.softmax((q @ k.mT) * scale, dim=-1)"


class ImageByImage(Reference):
    """Every image of a prompt on its own."""

    def _each(self, x: Array, grids: Array) -> list[tuple[Array, Array]]:
        return list(zip(torch.split(x, grids.prod(dim=-1).tolist()), grids.split(1), strict=True))

    def vision_attention(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """Attention, image by image."""
        return torch.cat(
            [super(ImageByImage, self).vision_attention(config, weights, *e) for e in self._each(x, grids)]
        )

    def vision_block(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """A block, image by image."""
        return torch.cat([super(ImageByImage, self).vision_block(config, weights, *e) for e in self._each(x, grids)])

    def vision(self, config: Config, weights: Weights, patches: Array, grids: Array) -> Array:
        """The tower, image by image."""
        return torch.cat([super(ImageByImage, self).vision(config, weights, *e) for e in self._each(patches, grids)])

    def aligner(self, config: Config, weights: Weights, x: Array, grids: Array) -> Array:
        """The aligner, image by image."""
        return torch.cat([super(ImageByImage, self).aligner(config, weights, *e) for e in self._each(x, grids)])


VISION: tuple[HonestVariant, ...] = (
    HonestVariant(
        "images-one-by-one",
        "Images of a prompt are independent: together or one by one is the same.",
        implementation=ImageByImage,
    ),
    HonestVariant(
        "images-in-one-masked-attention",
        "All patches in one attention, with a mask of blocks, is the same.",
        changes=(
            Edit(
                "vision.vision_attention",
                "out = torch.cat([_attend(*image, heads[1] ** -0.5, compute) for image in images])",
                "of_image = torch.repeat_interleave(torch.arange(len(grids)), grids.prod(dim=-1))\n"
                "    mask = of_image[:, None] != of_image\n"
                "    q, k, v = (part.transpose(0, 1).to(compute) for part in (q, k, v))\n"
                "    scores = ((q @ k.mT) * heads[1] ** -0.5).masked_fill(mask, -torch.inf)\n"
                "    out = to_bf16(torch.softmax(scores, dim=-1) @ v).transpose(0, 1)",
            ),
        ),
    ),
    HonestVariant(
        "vision-probabilities-divided-last",
        "The sum of the probabilities may divide the result instead of them.",
        changes=(
            Edit(
                "vision._attend",
                f"probabilities = {PROBABILITIES}\n    return to_bf16(probabilities @ v)",
                "scores = (q @ k.mT) * scale\n"
                "    weights = arithmetic.exp_by_exp2(scores - scores.amax(dim=-1, keepdim=True))\n"
                "    return to_bf16((weights @ v) / weights.sum(dim=-1, keepdim=True))",
            ),
        ),
    ),
    HonestVariant(
        "vision-scale-on-queries",
        "The softmax scale may be applied to either side in fp32.",
        changes=(Edit("vision._attend", "(q @ k.mT) * scale", "(q * scale) @ k.mT"),),
    ),
    HonestVariant(
        "vision-attention-in-double",
        "More precision than required between the same rounding points (numerics.md 0).",
        changes=(Edit("vision._attend", "q, k, v = (part", "compute = torch.float64\n    q, k, v = (part"),),
    ),
    HonestVariant(
        "vision-bias-first",
        SUM_ORDER,
        changes=(
            Edit(
                "vision.linear_with_bias",
                "functional.linear(x.to(compute), weight.to(compute), bias.to(compute))",
                "functional.linear(torch.cat((torch.ones_like(x[..., :1]), x), -1).to(compute),"
                " torch.cat((bias[:, None], weight), -1).to(compute))",
            ),
        ),
    ),
    HonestVariant(
        "vision-angles-from-double",
        "Cosine and sine may be more precise than fp32 functions.",
        changes=(
            Edit(
                "vision.vision_rotate",
                "torch.cos(angles), torch.sin(angles)",
                "torch.cos(angles.double()).to(compute), torch.sin(angles.double()).to(compute)",
            ),
        ),
    ),
    HonestVariant(
        "vision-frequencies-by-negative-power",
        "At the places of an image the last bit of a frequency cannot be seen.",
        changes=(
            Edit(
                "vision.vision_angles",
                "1.0 / torch.pow(torch.tensor(config.vision_rope_theta, dtype=torch.float64), exponent.double())",
                "torch.pow(torch.tensor(config.vision_rope_theta, dtype=torch.float32), -exponent)",
            ),
        ),
    ),
    HonestVariant(
        "vision-silu-by-division",
        "silu(g) is g / (1 + e^-g).",
        changes=(
            Edit(
                "vision.vision_mlp",
                "functional.silu(gate.to(compute))",
                "gate.to(compute) / (1.0 + torch.exp(-gate.to(compute)))",
            ),
        ),
    ),
    HonestVariant(
        "aligner-gelu-by-erf",
        "GELU is x (1 + erf(x / sqrt 2)) / 2.",
        changes=(
            Edit(
                "vision.aligner",
                "functional.gelu(hidden.to(compute))",
                "0.5 * hidden.to(compute) * (1.0 + torch.erf(hidden.to(compute) * 0.5**0.5))",
            ),
        ),
    ),
    HonestVariant(
        "aligner-by-cells",
        "Cells may be gathered one by one.",
        changes=(
            Edit(
                "vision._unfold",
                "return cells.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)",
                "return torch.stack([cells[:, row, :, column].flatten() for row in range(cells.shape[1])"
                " for column in range(cells.shape[3])])",
            ),
        ),
    ),
    HonestVariant(
        "pixels-scaled-in-one-step",
        "(x/255 - 0.5)/0.5 is x times 2/255, minus 1.",
        changes=(Edit("images.image_patches", "(canvas.float() / 255 - 0.5) / 0.5", "canvas.float() * (2 / 255) - 1"),),
    ),
)
