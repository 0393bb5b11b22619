"""Vision (numerics.md 11) on a recorded image: every part on what it is given, the tower as a whole, the placement.

Between patches and the tower's output nothing is recorded.  Each part gets the value that the judge's own equations put
there, so that its bound holds no error of the parts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from conformance.cases.behaviours import named
from conformance.cases.case import Call, Case, Level, Place, Step
from conformance.cases.traces import GoldenModel, Ints, Trace, bf16, exact, int64
from conformance.errors import FixtureError
from conformance.judge.components import vision as rules_of
from conformance.judge.components.images import spans
from conformance.judge.components.linear import Parameters
from conformance.judge.components.norm import rms_norm
from conformance.judge.expectations import Exact, Mode, Within
from conformance.judge.noise import Floors
from conformance.judge.propagated import Propagated
from conformance.tensors import Tensor

PATCH_AXES = ("patch", "feature")
HEAD_AXES = ("patch", "head", "feature")
CELL_AXES = ("cell", "feature")

ATTENTION_FLAGS = (
    "vision-mask",
    "vision-rotary-axes",
    "vision-rotary-pairing",
    "vision-qkv-order",
    "vision-bias-missing",
    "vision-probabilities-rounded",
    "vision-scale",
)
MLP_FLAGS = ("vision-mlp-order", "vision-activation", "vision-rounding-missing")
ALIGNER_FLAGS = ("aligner-padding", "aligner-order", "aligner-activation", "vision-bias-missing")


@dataclass(frozen=True)
class Image:
    """One recorded image and what the judge's equations make of it inside the tower."""

    model: GoldenModel
    trace: Trace

    @property
    def grids(self) -> Ints:
        """Rows and columns of patches, [1, 2]."""
        image = self.trace.scenario.image or {}
        return np.array([[image["n_vit_h"], image["n_vit_w"]]], dtype=np.int64)

    def tap(self, name: str) -> Tensor:
        """`image/{name}`."""
        return self.trace.scenario.extra(f"image/{name}")

    @property
    def weights(self) -> Parameters:
        """Parameters of the tower."""
        return self.model.parameters.within("vision.")

    def block(self, number: int) -> Parameters:
        """Parameters of a block."""
        return self.weights.within(f"blocks.{number}.")

    @cached_property
    def block_inputs(self) -> Sequence[Tensor]:
        """What each block is given, bf16 [n, vision_dim]."""
        x = rules_of.patch_embedding(self.weights.within("patch_embed."), exact(self.tap("patches")))
        inputs = [bf16(x)]
        for number in range(self.model.config.vision_n_layers - 1):
            x = rules_of.block(self.model.config, self.block(number), exact(inputs[-1]), self.grids)
            inputs.append(bf16(x))
        return inputs

    def normed(self, number: int, norm: str) -> Tensor:
        """A block's input after one of its norms."""
        weight = self.block(number)[f"{norm}.weight"]
        return bf16(rms_norm(exact(self.block_inputs[number]), weight, rules_of.NORM_EPS))

    def arguments(self, **others: object) -> dict[str, object]:
        """Arguments that most methods share, and others."""
        return {"config": self.model.mapping, **others, "grids": int64(self.grids)}


def images(model: GoldenModel, traces: Sequence[Trace]) -> list[Trace]:
    """The traces that recorded the tower; others only say where image tokens were.

    Raises:
        FixtureError: the recorded tensors do not fit the grid that the scenario names, or its span.
    """
    taps = ("patches", "token_types", "vit_out", "aligner_out")
    found = [trace for trace in traces if all(f"image/{tap}" in trace.scenario.file for tap in taps)]
    for trace in found:
        _check(Image(model, trace))
    return found


def _check(image: Image) -> None:
    config, grids = image.model.config, image.grids
    size = config.vision_patch_size
    cells = -(-grids // config.vision_downsample_ratio)
    types = image.tap("token_types").data
    shapes = {
        "patches": (int(grids.prod()), 3, size, size),
        "vit_out": (int(grids.prod()), config.vision_dim),
        "aligner_out": (int(cells.prod()), config.dim),
        "token_types": (1, image.trace.lengths[0]),
    }
    for tap, shape in shapes.items():
        found = image.tap(tap).shape
        if found != shape:
            raise FixtureError(
                f"{image.trace.source}: image/{tap} is {list(found)}, its grid of {grids[0].tolist()} patches calls "
                f"for {list(shape)}"
            )
    _, span = spans(config, np.array([config.image_token_id]), grids)
    if not np.array_equal(types[types >= 0], span):
        raise FixtureError(f"{image.trace.source}: image/token_types is not the span of {grids[0].tolist()} patches")


def cases(model: GoldenModel, traces: Sequence[Trace], floors: Floors) -> Iterator[Case]:
    """The cases of every recorded image."""
    for name, trace in named(images(model, traces)).items():
        yield from _cases(Image(model, trace), name, floors)


def _cases(image: Image, name: str, floors: Floors) -> Iterator[Case]:
    def case(
        behaviour: str,
        mode: Mode,
        why: str,
        steps: Callable[[Image], Iterator[Step]],
        flags: tuple[str, ...],
        level: Level = "core",
    ) -> Case:
        identity, made = f"vision/{behaviour}/{name}", partial(steps, image)
        return Case(identity, level, mode, why, "numerics.md 11", made, flags, image.trace.source)

    yield case(
        "patch-embedding",
        "dot",
        "Fails when a patch is flattened as (y, x, channel), or the bias is missing or added after the rounding.",
        _patch_embedding,
        ("patch-flattening", "vision-bias-missing", "vision-bias-rounded-apart"),
        "smoke",
    )
    yield case(
        "rotate",
        "composed",
        "Fails when rows and columns are swapped, neighbours are paired, or patches are numbered down the columns.",
        _rotations,
        ("vision-rotary-axes", "vision-rotary-pairing", "vision-rotary-base", "bf16-truncated"),
    )
    yield case(
        "attention",
        "composed",
        "Fails when a mask is applied, q, k and v are taken in another order, or probabilities are rounded.",
        _attentions,
        ATTENTION_FLAGS,
    )
    yield case(
        "mlp",
        "composed",
        "Fails when up and gate are exchanged, the activation is another one, or its result is not rounded.",
        _mlps,
        MLP_FLAGS,
    )
    yield case(
        "block-without-mlp",
        "composed",
        "Fails when the first norm is missing or comes late, or the attention is not added to what it came from.",
        partial(_block, silent="mlp.w2"),
        ("vision-residual", "vision-norm-order"),
    )
    yield case(
        "block-without-attention",
        "composed",
        "Fails when the second norm is missing or comes late, or the feed-forward is not added to what it came from.",
        partial(_block, silent="attn.wo"),
        ("vision-residual", "vision-norm-order"),
    )
    yield case(
        "tower",
        "propagated",
        "Fails when blocks are skipped or reordered, or the final norm is missing; the other cases say what is wrong.",
        partial(_tower, floors=floors, case_id=f"vision/tower/{name}"),
        ("vision-final-norm", "vision-block-order", "vision-residual", "vision-rotary-axes", "vision-mask"),
    )
    yield case(
        "aligner",
        "composed",
        "Fails when an odd grid is padded at the wrong edge, cells are read in another order, or GELU is approximated.",
        _aligner,
        ALIGNER_FLAGS,
        "smoke",
    )
    yield case(
        "span",
        "exact",
        "Fails when newlines, start or end are missing, or the padded part of an odd grid gets no token.",
        _span,
        ("image-span-layout", "image-span-grid"),
        "smoke",
    )
    yield case(
        "merge",
        "exact",
        "Fails when features stand beside their places, or delimiters keep the embedding of the image token.",
        _merge,
        ("image-merge-place", "image-delimiters"),
        "smoke",
    )


def _patch_embedding(image: Image) -> Iterator[Step]:
    weights, patches = image.weights.within("patch_embed."), image.tap("patches")
    arguments = {"config": image.model.mapping, "weights": weights.mapping(), "patches": patches}

    def rules() -> list[Within]:
        expected = rules_of.patch_embedding(weights, exact(patches))
        terms = int(np.prod(patches.shape[1:])) + 1
        return [Within("embedded", expected, "BF16", PATCH_AXES, "dot", terms=terms)]

    yield Step(Call("patch_embedding", arguments), rules)


def _rotations(image: Image) -> Iterator[Step]:
    config = image.model.config
    for number in range(config.vision_n_layers):
        weights = image.block(number).within("attn.")
        stacked = bf16(rules_of.projected(exact(image.normed(number, "norm1")), weights, "wqkv"))
        heads = stacked.reshape(stacked.shape[0], 3, config.vision_n_heads, -1)
        for which in (0, 1):
            x = heads[:, which]

            def rules(x: Tensor = x) -> list[Within]:
                return [Within("rotated", rules_of.rotate(config, exact(x), image.grids), "BF16", HEAD_AXES)]

            yield Step(Call("vision_rotate", image.arguments(x=x)), rules, Place(number))


def _attentions(image: Image) -> Iterator[Step]:
    for number in range(image.model.config.vision_n_layers):
        weights, x = image.block(number).within("attn."), image.normed(number, "norm1")

        def rules(weights: Parameters = weights, x: Tensor = x) -> list[Within]:
            expected = rules_of.attention(image.model.config, weights, exact(x), image.grids)
            return [Within("attended", expected, "BF16", PATCH_AXES)]

        yield Step(Call("vision_attention", image.arguments(weights=weights.mapping(), x=x)), rules, Place(number))


def _mlps(image: Image) -> Iterator[Step]:
    for number in range(image.model.config.vision_n_layers):
        weights, x = image.block(number).within("mlp."), image.normed(number, "norm2")
        arguments = {"config": image.model.mapping, "weights": weights.mapping(), "x": x}

        def rules(weights: Parameters = weights, x: Tensor = x) -> list[Within]:
            return [Within("out", rules_of.mlp(weights, exact(x)), "BF16", PATCH_AXES)]

        yield Step(Call("vision_mlp", arguments), rules, Place(number))


def silenced(weights: Mapping[str, Tensor], part: str) -> Mapping[str, Tensor]:
    """Weights of a block whose layer `part` gives zeros: the other sublayer's bound then holds no error of this one."""
    return {
        name: Tensor.from_values(np.zeros(tensor.shape), tensor.dtype) if name.startswith(part + ".") else tensor
        for name, tensor in weights.items()
    }


def _block(image: Image, silent: str) -> Iterator[Step]:
    for number in range(image.model.config.vision_n_layers):
        weights, x = silenced(image.block(number).mapping(), silent), image.block_inputs[number]

        def rules(weights: Mapping[str, Tensor] = weights, x: Tensor = x) -> list[Within]:
            expected = rules_of.block(image.model.config, Parameters(weights), exact(x), image.grids)
            return [Within("out", expected, "BF16", PATCH_AXES)]

        yield Step(Call("vision_block", image.arguments(weights=weights, x=x)), rules, Place(number))


def _tower(image: Image, floors: Floors, case_id: str) -> Iterator[Step]:
    arguments = image.arguments(weights=image.weights.mapping(), patches=image.tap("patches"))

    def rules() -> list[Propagated]:
        allowance = floors.allowance(case_id, "vit_out")
        return [Propagated("vit_out", image.tap("vit_out"), allowance, floors.describe(), PATCH_AXES)]

    yield Step(Call("vision", arguments), rules)


def _aligner(image: Image) -> Iterator[Step]:
    weights, x = image.model.parameters.within("aligner."), image.tap("vit_out")

    def rules() -> list[Within]:
        expected = rules_of.aligner(image.model.config, weights, exact(x), image.grids)
        return [Within("aligner_out", expected, "BF16", CELL_AXES, recorded=image.tap("aligner_out"))]

    yield Step(Call("aligner", image.arguments(weights=weights.mapping(), x=x)), rules)


def _span(image: Image) -> Iterator[Step]:
    """The recorded prompt with one image token in place of the span."""
    ids, types = image.trace.part(0, "input_ids").data[0], image.tap("token_types").data[0]
    prompt = ids[(types < 0) | (types == 0)]
    arguments = {
        "config": image.model.mapping,
        "input_ids": Tensor("I32", np.ascontiguousarray(prompt)),
        "patch_grids": int64(image.grids),
    }

    def rules() -> list[Exact]:
        return [
            Exact("input_ids", Tensor("I32", ids), ("position",)),
            Exact("token_types", Tensor("I32", types), ("position",)),
        ]

    yield Step(Call("image_spans", arguments), rules)


def _merge(image: Image) -> Iterator[Step]:
    arguments = {
        "config": image.model.mapping,
        "weights": image.model.parameters.mapping(),
        "embedded": image.trace.part(0, "embed"),
        "token_types": image.tap("token_types"),
        "features": image.tap("aligner_out"),
    }
    placed = image.trace.scenario.tap(0, "h_in", 0)[:, :, 0]

    def rules() -> list[Exact]:
        return [Exact("merged", placed, ("request", "position", "feature"))]

    yield Step(Call("merge_images", arguments), rules, Place(None, [0], range(placed.shape[1])))
