"""Hand-made vectors of `block` and `stack`: which mix a sublayer reads with, and when Engram comes (numerics.md 5).

A block's result can be bounded from its input when one sublayer is silenced (its last projection set to zero) and the
choice of experts is beyond doubt: all of them, or those that a large bias favours.  The components' own bounds carry
through then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases.case import Advance, Case, Handle, Open, Place, Step
from conformance.cases.traces import exact, int64
from conformance.cases.vectors import weights as made
from conformance.cases.vectors.configuration import CONFIG
from conformance.config import ModelConfig
from conformance.formats import BF16
from conformance.judge import deviations
from conformance.judge.bounded import Bounded, concatenate
from conformance.judge.components import engram, experts, gate
from conformance.judge.components.hyper_connections import coefficients, read, write
from conformance.judge.components.linear import Parameters
from conformance.judge.components.norm import rms_norm
from conformance.judge.components.teacher_forced import Call as ForcedCall, TeacherForcedAttention
from conformance.judge.expectations import Expectation, Within
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
STREAM_AXES = ("request", "position", "stream", "feature")
PER_STREAM = ("request", "position", "stream")

ALL_EXPERTS: Mapping[str, Any] = {**CONFIG, "n_activated_experts": CONFIG["n_routed_experts"]}
MODEL = ModelConfig.from_mapping(ALL_EXPERTS, "conformance/cases/vectors/block.py")
SILENT_ATTENTION = ("attn.wo_b.weight",)
SILENT_MIXTURE = (
    *(f"ffn.experts.{expert}.w2.weight" for expert in range(MODEL.n_routed_experts)),
    "ffn.shared_experts.w2.weight",
)
WITHOUT_ENGRAM, WITH_ENGRAM = 0, MODEL.engram_layer_ids[0]


@dataclass(frozen=True)
class Vector:
    """Calls (start, length) of one request through a block, with the projections that are silenced."""

    name: str
    why: str
    flags: tuple[str, ...]
    layer: int
    silent: tuple[str, ...]
    calls: Sequence[tuple[int, int]]
    images: tuple[int, ...] = ()
    """Positions of image tokens."""
    favoured: bool = False
    """Two experts are active, those that the bias favours: others for text than for images."""

    @property
    def mapping(self) -> Mapping[str, Any]:
        """The configuration as a port receives it."""
        return CONFIG if self.favoured else ALL_EXPERTS

    @property
    def total(self) -> int:
        """Positions after the last call."""
        start, length = self.calls[-1]
        return start + length


VECTORS = (
    Vector(
        "attention-reads-incoming-mix/silent-mixture",
        "Fails when the attention reads with the mix of its own coefficients, or with equal or one-hot weights.",
        (
            "mix-not-late",
            "mix-ignored",
            "comb-transposed",
            "block-norm-missing",
        ),
        WITHOUT_ENGRAM,
        # Coefficients that do not depend on the residual keep its error from growing behind the attention.
        (*SILENT_MIXTURE, "hc_ffn_fn"),
        [(0, 3), (3, 1)],
    ),
    Vector(
        "mixture-reads-attention-mix/silent-attention",
        "Fails when the mixture reads with its own mix or the incoming one instead of the attention's.",
        (
            "mix-not-late",
            "mix-two-late",
            "comb-transposed",
            "block-norms-swapped",
            "residual-order",
        ),
        WITHOUT_ENGRAM,
        SILENT_ATTENTION,
        [(0, 3), (3, 1)],
    ),
    Vector(
        "image-tokens-routed/silent-attention",
        "Fails when the mixture does not hear which tokens are images, and routes them with the bias of text.",
        ("gate-image-bias",),
        WITHOUT_ENGRAM,
        SILENT_ATTENTION,
        [(0, 3), (3, 1)],
        images=(1,),
        favoured=True,
    ),
    Vector(
        "image-tokens-routed/several-images",
        "Fails when only the first image of a prompt is routed as one, or the text between images and behind them is.",
        ("gate-image-bias",),
        WITHOUT_ENGRAM,
        SILENT_ATTENTION,
        [(0, 9), (9, 1)],
        images=(0, 1, 4, 5, 8),
        favoured=True,
    ),
    Vector(
        "mix-of-mixture-handed-on/silent-sublayers",
        "Fails when the attention's mix is handed on, or the mixture's coefficients are those of the residual before.",
        (
            "attention-mix-handed-on",
            "coefficients-not-renewed",
            "block-weights-swapped",
        ),
        WITHOUT_ENGRAM,
        (*SILENT_ATTENTION, *SILENT_MIXTURE),
        [(0, 4)],
    ),
    Vector(
        "engram-before-coefficients/steps",
        "Fails when Engram comes after the coefficients, or the tokens before a step are forgotten.",
        ("engram-after-coefficients", "look-back-forgotten", "engram-rows-zero"),
        WITH_ENGRAM,
        (*SILENT_ATTENTION, *SILENT_MIXTURE),
        [(0, 4), *[(position, 1) for position in range(4, 10)]],
    ),
    Vector(
        "engram-look-back/continued-call",
        "Fails when a call of several tokens does not look back into the call before it.",
        ("look-back-forgotten",),
        WITH_ENGRAM,
        (*SILENT_ATTENTION, *SILENT_MIXTURE),
        [(0, 4), (4, 6)],
    ),
    Vector(
        "engram-look-back/image-in-the-call-before",
        "Fails when an image token of an earlier call stops no look-back, or the mixture forgets which tokens it was.",
        (
            "look-back-forgotten",
            "barrier-forgotten",
            "image-written",
        ),
        WITH_ENGRAM,
        (*SILENT_ATTENTION, *SILENT_MIXTURE),
        [(0, 5), (5, 1), (6, 1), (7, 1)],
        images=(3,),
    ),
    Vector(
        "engram-look-back/several-images",
        "Fails when images at the start, side by side, or at the end of a prompt are written, or stop no look-back.",
        (
            "image-not-a-barrier",
            "barrier-forgotten",
            "image-written",
        ),
        WITH_ENGRAM,
        (*SILENT_ATTENTION, *SILENT_MIXTURE),
        [(0, 10), (10, 1), (11, 1), (12, 1), (13, 1)],
        images=(0, 1, 4, 5, 9),
    ),
)
STACKED = (0, 1, 2)


def cases() -> Iterator[Case]:
    """All vectors of both components."""
    for vector in VECTORS:
        yield Case(
            f"block/{vector.name}",
            "core",
            "composed",
            vector.why,
            "numerics.md 5",
            partial(_stepped, vector),
            flags=vector.flags,
            source="hand-made",
        )
    yield Case(
        "stack/layers-in-order/silent-sublayers",
        "core",
        "composed",
        "Fails when layers run in another order, one is left out, or the mix of another layer is handed on.",
        "numerics.md 5",
        _stack,
        flags=(
            "attention-mix-handed-on",
            "layer-left-out",
            "engram-after-coefficients",
            "layer-order",
        ),
        source="hand-made",
    )


def token_map() -> Ints:
    """Two neighbouring tokens share a compressed id."""
    return np.arange(MODEL.vocab_size) // 2


@dataclass(frozen=True)
class Inputs:
    """A request from its first position on: residual, mix to read with, token ids, image tokens, and its calls."""

    h: Bounded
    pre: Bounded
    ids: Ints
    images: Bools | None
    calls: Sequence[tuple[int, int]]


def block_bounds(config: ModelConfig, layer: int, weights: Parameters, inputs: Inputs) -> tuple[Bounded, Bounded]:
    """Residual before its last rounding and mix after a block whose experts are beyond doubt: [1,P,S,D], [1,P,S]."""
    h = inputs.h
    if layer in config.engram_layer_ids and not deviations.active("no-engram"):
        rows = engram.table_rows(config, layer, token_map(), inputs.ids, inputs.images)
        h = engram.write(config, weights.within("engram."), h, rows, inputs.images).rounded(BF16)
    attn = coefficients(config, h, *(weights[f"hc_attn_{part}"] for part in ("fn", "scale", "base")))
    x = rms_norm(read(h, inputs.pre).rounded(BF16), weights["attn_norm.weight"], config.norm_eps).rounded(BF16)
    y = _silence(x)
    if weights["attn.wo_b.weight"].any():
        y = _attention(config, layer, weights, x, inputs.calls).rounded(BF16)
    h = write(y, h, attn.post, attn.comb).rounded(BF16)
    ffn = coefficients(config, h, *(weights[f"hc_ffn_{part}"] for part in ("fn", "scale", "base")))
    x = rms_norm(read(h, attn.pre).rounded(BF16), weights["ffn_norm.weight"], config.norm_eps).rounded(BF16)
    y = _silence(x)
    if weights["ffn.shared_experts.w2.weight"].any():
        y = _mixture(config, weights.within("ffn."), x, inputs.images).rounded(BF16)
    return write(y, h, ffn.post, ffn.comb), ffn.pre


def _silence(x: Bounded) -> Bounded:
    """What a sublayer answers whose last projection is zero, whatever it read."""
    return Bounded.exact(np.zeros(x.shape))


def _attention(
    config: ModelConfig, layer: int, weights: Parameters, x: Bounded, calls: Sequence[tuple[int, int]]
) -> Bounded:
    forced = TeacherForcedAttention(
        config,
        {layer: weights.within("attn.")},
        {layer: x.value},
        [ForcedCall(start, length) for start, length in calls],
        {},
        literal=False,
    )
    # Here the input is not recorded: it carries the error of what was read.
    forced.rows[layer].x = x
    return concatenate([forced.output(layer, call) for call in range(len(calls))], 1)


def _mixture(config: ModelConfig, weights: Parameters, x: Bounded, images: Bools | None) -> Bounded:
    flat = x.reshape(-1, config.dim)
    mask = None if images is None else images.reshape(-1)
    scores, biased = gate.scores(weights.within("gate."), flat, mask)
    chosen = np.argsort(-biased.value, axis=-1)[:, : config.n_activated_experts]
    picked = scores[np.arange(len(chosen))[:, None], chosen]
    routing = picked / (picked.sum(-1, keepdims=True) + 1e-20) * config.route_scale
    return experts.combined(config, weights, flat, routing, chosen).reshape(*x.shape)


def _inputs(vector: Vector) -> Inputs:
    total = vector.total
    images = np.isin(np.arange(total), vector.images)[None] if vector.images else None
    mix = np.asarray([0.75, 0.125, -0.5, 0.25]) + made.normal("block.pre", 1, total, MODEL.hc_mult) / 8
    ids = (np.arange(total) * 37 + 11) % MODEL.vocab_size
    return Inputs(
        exact(made.bf16("block.h", 1, total, MODEL.hc_mult, MODEL.dim)),
        exact(Tensor.from_values(mix, "F32")),
        ids[None],
        images,
        vector.calls,
    )


def _advance(name: str, inputs: Inputs, start: int, length: int) -> Advance:
    span = slice(start, start + length)
    arguments = {
        "h": Tensor.from_values(inputs.h.value[:, span], "BF16"),
        "pre": Tensor.from_values(inputs.pre.value[:, span], "F32"),
        "input_ids": Tensor("I32", inputs.ids[:, span].astype(np.int32)),
        "start_pos": int64([start]),
        "image_mask": None if inputs.images is None else Tensor("BOOL", inputs.images[:, span].copy()),
    }
    return Advance(name, arguments)


def _stepped(vector: Vector) -> Iterator[Step]:
    layer, inputs = vector.layer, _inputs(vector)
    config = ModelConfig.from_mapping(vector.mapping, "conformance/cases/vectors/block.py")
    tensors = made.with_zeros(made.block(config, layer), *vector.silent)
    if vector.favoured:
        for name, experts_of in (("bias", (0, 5)), ("bias_vl", (2, 7))):
            favour = np.where(np.isin(np.arange(config.n_routed_experts), experts_of), 100.0, 0.0)
            tensors[f"ffn.gate.{name}"] = Tensor.from_values(favour, "F32")
    weights = made.parameters(tensors)
    shared = {"config": vector.mapping, "batch_size": 1}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "layer_id": layer,
        "weights": weights.mapping(),
        "runtime": Handle("runtime"),
        "token_map": _map_argument() if layer in MODEL.engram_layer_ids else None,
    }
    yield Step(Open("block", "block", arguments), place=Place(layer))
    bounds: list[tuple[Bounded, Bounded]] = []

    def rules(start: int, length: int) -> list[Expectation]:
        if not bounds:
            bounds.append(block_bounds(config, layer, weights, inputs))
        return _within(*bounds[0], start, length)

    for number, (start, length) in enumerate(vector.calls):
        place = Place(layer, [number], range(start, start + length))
        yield Step(_advance("block", inputs, start, length), partial(rules, start, length), place)


def _map_argument() -> Tensor:
    return Tensor("I32", token_map().astype(np.int32))


def _within(h: Bounded, pre: Bounded, start: int, length: int) -> list[Expectation]:
    span = slice(start, start + length)
    return [Within("h_out", h[:, span], "BF16", STREAM_AXES), Within("pre_out", pre[:, span], "F32", PER_STREAM)]


def _stack() -> Iterator[Step]:
    """Three layers without sublayers of their own: what is left is mixing, Engram, and the mix that is handed on.

    Only the last mix depends on the residual: errors would grow from layer to layer otherwise.
    """
    tensors: dict[str, Tensor] = {}
    for layer in STACKED:
        silent = [*SILENT_ATTENTION, *SILENT_MIXTURE, "hc_attn_fn"]
        if layer != STACKED[-1]:
            silent.append("hc_ffn_fn")
        made_block = made.with_zeros(made.block(MODEL, layer, f"layers.{layer}."), *silent)
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in made_block.items()}
    weights = made.parameters(tensors)
    vector = Vector("", "", (), 0, (), [(0, 5), (5, 1)])
    inputs = _inputs(vector)
    shared = {"config": ALL_EXPERTS, "batch_size": 1}
    yield Step(Open("runtime", "runtime", {**shared, "reading": "intended"}))
    arguments = {
        **shared,
        "layer_ids": list(STACKED),
        "weights": weights.mapping(),
        "runtime": Handle("runtime"),
        "token_map": _map_argument(),
    }
    yield Step(Open("stack", "stack", arguments))

    def rules(start: int, length: int) -> list[Expectation]:
        h, pre = inputs.h, inputs.pre
        for layer in STACKED:
            now = Inputs(h.rounded(BF16), pre, inputs.ids, inputs.images, inputs.calls)
            h, pre = block_bounds(MODEL, layer, weights.within(f"layers.{layer}."), now)
        return _within(h, pre, start, length)

    for number, (start, length) in enumerate(vector.calls):
        place = Place(STACKED[-1], [number], range(start, start + length))
        yield Step(_advance("stack", inputs, start, length), partial(rules, start, length), place)
