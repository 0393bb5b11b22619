"""Hand-made vectors of the vision tower and its aligner (numerics.md 11): several images at once, odd grids, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import Ints, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG
from conformance.cases.vectors.lattice import integers
from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components import vision as rules_of
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

VISION_CONFIG: Mapping[str, Any] = {
    **CONFIG,
    "vision_n_layers": 2,
    "vision_dim": 32,
    "vision_n_heads": 2,
    "vision_inter_dim": 48,
    "vision_patch_size": 2,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 64,
    "vision_min_pixels": 144,
    "vision_max_wh_ratio": None,
    "image_token_id": 100,
}
MODEL = ModelConfig.from_mapping(VISION_CONFIG, "conformance/cases/vectors/vision.py")

WIDTH, HEADS, CELL = MODEL.vision_dim, MODEL.vision_n_heads, MODEL.vision_downsample_ratio
FEATURES = WIDTH * CELL * CELL

PATCH_AXES = ("patch", "feature")
HEAD_AXES = ("patch", "head", "feature")
CELL_AXES = ("cell", "feature")

SEVERAL = ((3, 2), (1, 4), (2, 2), (1, 1))
ODD_GRIDS = ((4, 4), (2, 5), (3, 3), (1, 1), (7, 6), (3, 7))


def fp32_norm(name: str) -> dict[str, Tensor]:
    """A norm's weight of full fp32 significand around one."""
    return {f"{name}.weight": Tensor.from_values(1.0 + 0.1 * made.normal(name, WIDTH), "F32")}


def biased(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """A bf16 matrix and its bias."""
    return {
        **made.matrix(name, rows, columns, "BF16"),
        f"{name}.bias": Tensor.from_values(made.normal(f"{name}.bias", rows), "BF16"),
    }


def block_weights(prefix: str = "") -> dict[str, Tensor]:
    """One block."""
    p, inner = prefix, MODEL.vision_inter_dim
    return {
        **fp32_norm(f"{p}norm1"),
        **biased(f"{p}attn.wqkv", 3 * WIDTH, WIDTH),
        **biased(f"{p}attn.wo", WIDTH, WIDTH),
        **fp32_norm(f"{p}norm2"),
        **made.matrix(f"{p}mlp.w1", 2 * inner, WIDTH, "BF16"),
        **made.matrix(f"{p}mlp.w2", WIDTH, inner, "BF16"),
    }


def aligner_weights() -> dict[str, Tensor]:
    """The aligner."""
    return {**biased("w1", MODEL.dim, FEATURES), **biased("w2", MODEL.dim, MODEL.dim)}


def patch_count(grids: Sequence[tuple[int, int]]) -> int:
    """Patches of all images."""
    return sum(rows * columns for rows, columns in grids)


def rows_of(name: str, grids: Sequence[tuple[int, int]], scale: float = 1.0) -> Tensor:
    """A bf16 row of normal numbers for every patch."""
    return Tensor.from_values(scale * made.normal(name, patch_count(grids), WIDTH), "BF16")


def within(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of a part, under the names relative to it."""
    return {name.removeprefix(f"{part}."): tensor for name, tensor in weights.items() if name.startswith(f"{part}.")}


@dataclass(frozen=True)
class Vector:
    """One call: a method, what it is given, and what the equations make of that."""

    id: str
    why: str
    flags: tuple[str, ...]
    method: str
    result: str
    axes: tuple[str, ...]
    arguments: Mapping[str, Any]
    expected: Callable[[], Bounded]


def _grids(grids: Sequence[tuple[int, int]]) -> Ints:
    return np.asarray(grids, dtype=np.int64)


def _rotation(variant: str, why: str, flags: tuple[str, ...], x: Floats, grids: Sequence[tuple[int, int]]) -> Vector:
    given = Tensor.from_values(x, "BF16")
    return Vector(
        f"vision/rotate/{variant}",
        why,
        flags,
        "vision_rotate",
        "rotated",
        HEAD_AXES,
        {"x": given, "grids": int64(grids)},
        lambda: rules_of.rotate(MODEL, Bounded.exact(given.values()), _grids(grids)),
    )


def _attention(variant: str, why: str, flags: tuple[str, ...], grids: Sequence[tuple[int, int]]) -> Vector:
    weights, x = within(block_weights(), "attn"), rows_of(f"vision.attention.{variant}", grids)
    return Vector(
        f"vision/attention/{variant}",
        why,
        flags,
        "vision_attention",
        "attended",
        PATCH_AXES,
        {"weights": weights, "x": x, "grids": int64(grids)},
        lambda: rules_of.attention(MODEL, Parameters(weights), Bounded.exact(x.values()), _grids(grids)),
    )


def _block(variant: str, why: str, flags: tuple[str, ...], scale: float, silent: tuple[str, ...]) -> Vector:
    weights, x = made.with_zeros(block_weights(), *silent), rows_of("vision.block", SEVERAL, scale)
    return Vector(
        f"vision/block/{variant}",
        why,
        flags,
        "vision_block",
        "out",
        PATCH_AXES,
        {"weights": weights, "x": x, "grids": int64(SEVERAL)},
        lambda: rules_of.block(MODEL, Parameters(weights), Bounded.exact(x.values()), _grids(SEVERAL)),
    )


def _aligner(
    variant: str,
    why: str,
    flags: tuple[str, ...],
    grids: Sequence[tuple[int, int]],
    weights: Mapping[str, Tensor] | None = None,
    x: Tensor | None = None,
) -> Vector:
    used, given = weights or aligner_weights(), x or rows_of(f"vision.aligner.{variant}", grids)
    return Vector(
        f"vision/aligner/{variant}",
        why,
        flags,
        "aligner",
        "aligner_out",
        CELL_AXES,
        {"weights": used, "x": given, "grids": int64(grids)},
        lambda: rules_of.aligner(MODEL, Parameters(used), Bounded.exact(given.values()), _grids(grids)),
    )


def one_hot_heads() -> Floats:
    """Sixteen images of 2x2 patches: image f has a one in feature f of both heads, everywhere."""
    width = WIDTH // HEADS
    return np.repeat(np.eye(width)[:, None, None], 4, axis=1).repeat(HEADS, axis=2).reshape(-1, HEADS, width)


def _gelu_alone() -> Vector:
    """The first layer copies single features, the second is the unit matrix: what comes out is GELU, one by one.

    Feature (channel c, dy, dx) is c r^2 + dy r + dx; hidden feature j copies channel j mod V of the middle patch.
    """
    copy = np.zeros((MODEL.dim, FEATURES))
    copy[np.arange(MODEL.dim), np.arange(MODEL.dim) % WIDTH * CELL * CELL + CELL * CELL // 2] = 1.0
    zeros = Tensor.from_values(np.zeros(MODEL.dim), "BF16")
    weights = {
        "w1.weight": Tensor.from_values(copy, "BF16"),
        "w1.bias": zeros,
        "w2.weight": Tensor.from_values(np.eye(MODEL.dim), "BF16"),
        "w2.bias": zeros,
    }
    grid = (CELL * 8, CELL)
    sweep = np.zeros((8, CELL, CELL, WIDTH))
    sweep[:, 1, 1] = np.linspace(-5.0, 5.0, 8 * WIDTH).reshape(8, WIDTH)
    x = Tensor.from_values(sweep.reshape(-1, WIDTH), "BF16")
    return _aligner(
        "gelu-from-minus-5-to-5",
        "Fails when GELU is its tanh or sigmoid approximation: an element is off by up to several bf16 ulps.",
        ("aligner-activation",),
        [grid],
        weights,
        x,
    )


def _tower() -> Vector:
    """Blocks that add nothing: only the embedding and the final norm remain."""
    silent = ("attn.wo.weight", "attn.wo.bias", "mlp.w2.weight")
    weights = {**fp32_norm("norm"), **biased("patch_embed.proj", WIDTH, 12)}
    for number in range(MODEL.vision_n_layers):
        weights |= {f"blocks.{number}.{name}": t for name, t in made.with_zeros(block_weights(), *silent).items()}
    patches = Tensor.from_values(integers(71, (patch_count(SEVERAL), 3, 2, 2), 127) / 128, "BF16")
    return Vector(
        "vision/tower/silent-blocks",
        "Fails when the final norm is missing or has another eps, or a patch is flattened in another order.",
        ("vision-final-norm", "patch-flattening"),
        "vision",
        "vit_out",
        PATCH_AXES,
        {"weights": weights, "patches": patches, "grids": int64(SEVERAL)},
        lambda: rules_of.tower(MODEL, Parameters(weights), Bounded.exact(patches.values()), _grids(SEVERAL)),
    )


def _mlp() -> Vector:
    weights = within(block_weights(), "mlp")
    x = rows_of("vision.mlp", SEVERAL, 3.0)
    return Vector(
        "vision/mlp/gates-of-both-signs",
        "Fails when up and gate are exchanged, the activation is another one, or is not rounded before the product.",
        ("vision-mlp-order", "vision-activation", "vision-rounding-missing"),
        "vision_mlp",
        "out",
        PATCH_AXES,
        {"weights": weights, "x": x},
        lambda: rules_of.mlp(Parameters(weights), Bounded.exact(x.values())),
    )


ATTENTION_SILENT, MLP_SILENT = ("attn.wo.weight", "attn.wo.bias"), ("mlp.w2.weight",)
FAR = ((1, 70), (70, 1), (9, 11))

VECTORS = (
    _rotation(
        "one-hot-on-2x2-patches",
        "Fails when neighbours are paired instead of halves, columns turn the first angles, or the turn is backwards.",
        ("vision-rotary-pairing", "vision-rotary-axes", "vision-rotary-direction"),
        one_hot_heads(),
        [(2, 2)] * (WIDTH // HEADS),
    ),
    _rotation(
        "long-rows-and-columns",
        "Fails when frequencies run over the whole head, another base is used, or places are counted over all images.",
        ("vision-rotary-base", "vision-rotary-places", "bf16-truncated"),
        integers(72, (patch_count(FAR), HEADS, WIDTH // HEADS), 255) / 64,
        FAR,
    ),
    _attention(
        "several-images",
        "Fails when patches attend to those of another image, or only to those before them.",
        ("vision-across-images", "vision-mask", "vision-rotary-places"),
        SEVERAL,
    ),
    _attention(
        "one-patch",
        "Fails when a single patch does not give its own value: the softmax of one score is 1.",
        ("vision-qkv-order", "vision-bias-missing"),
        [(1, 1)],
    ),
    _mlp(),
    _block(
        "small-values-into-attention",
        "Fails when the norm's eps is the text model's: rows this small then come out as large as any.",
        ("vision-eps",),
        2.0**-11,
        MLP_SILENT,
    ),
    _block(
        "small-values-into-mlp",
        "Fails when the second norm's eps is the text model's, or its fp32 weight is rounded.",
        ("vision-eps", "vision-norm-order"),
        2.0**-11,
        ATTENTION_SILENT,
    ),
    _block(
        "fp32-norm-weights",
        "Fails when a norm's fp32 weight is rounded to bf16, the wrong norm is used, or the sum is not rounded.",
        ("vision-norm-order", "vision-residual"),
        1.0,
        MLP_SILENT,
    ),
    _aligner(
        "odd-grids",
        "Fails when an odd grid is padded at the left or top, with anything but zeros, or cells cross image borders.",
        ("aligner-padding", "aligner-order", "vision-across-images"),
        ODD_GRIDS,
    ),
    *(
        _aligner(
            f"grid-{rows}x{columns}",
            "Fails when a grid that is smaller than a cell, or exactly one, is cut or padded wrongly.",
            ("aligner-padding", "aligner-order"),
            [(rows, columns)],
        )
        for rows, columns in ((1, 1), (2, 4), (3, 3))
    ),
    _gelu_alone(),
    _tower(),
)


def cases() -> Iterator[Case]:
    """One case a vector."""
    for vector in VECTORS:
        yield Case(
            vector.id,
            "core",
            "composed",
            vector.why,
            "numerics.md 11",
            partial(_steps, vector),
            vector.flags,
            "hand-made",
        )


def _steps(vector: Vector) -> Iterator[Step]:
    yield Step(
        Call(vector.method, {"config": VISION_CONFIG, **vector.arguments}),
        lambda: [Within(vector.result, vector.expected(), "BF16", vector.axes)],
    )
