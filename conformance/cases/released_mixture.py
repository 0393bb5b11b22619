"""The mixture at the released widths: 384 experts, of which only those that the tokens choose are ever made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.moe import mixture
from conformance.cases.released_set import Released
from conformance.cases.traces import Bools, boolean, exact
from conformance.judge.choices import GateChoice
from conformance.judge.components.experts import expert
from conformance.judge.components.gate import scores
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

LAYER = 24
TOKENS = 6
MATRICES = ("w1", "w2", "w3")


def cases(released: Released, stem: str) -> Iterator[Case]:
    """The choice among 384, one expert by itself, and the whole mixture."""
    source = f"{released.name}/{stem}"
    yield Case(
        "gate/six-of-384-with-image-bias/released-width",
        "core",
        "choice",
        "Fails when logits are kept in bf16 or TF32, or image tokens are routed with the text bias.",
        "numerics.md 7",
        partial(_gate, released, stem),
        source=source,
    )
    yield Case(
        "experts/routed-expert/released-width",
        "core",
        "composed",
        "Fails when FP4 scales are applied to the wrong 32 inputs, or the routing weight is applied to the output.",
        "numerics.md 7",
        partial(_expert, released, stem),
        source=source,
    )
    yield Case(
        "moe/384-experts-with-image-tokens/released-width",
        "full",
        "composed",
        "Fails when an expert's weights are looked up under another index, or tokens and weights are paired wrongly.",
        "numerics.md 7",
        partial(_moe, released, stem),
        source=source,
    )


def _input(released: Released) -> Tensor:
    return released.input("x/moe", (1, TOKENS, released.config.dim)).reshape(TOKENS, -1)


def _image_mask(released: Released, stem: str) -> Bools:
    mask: Bools = released.part(stem)["image_mask"].data[0]
    return mask


def _parameters(released: Released, stem: str) -> Parameters:
    """Weights of the layer's mixture, listing the gate, the shared expert and the routed experts that are chosen."""
    chosen = np.unique(released.part(stem)["gate_indices"].data).tolist()
    experts = [*(f"experts.{index}" for index in chosen), "shared_experts"]
    names = ["gate.weight", "gate.bias", "gate.bias_vl", *(f"{e}.{m}.weight" for e in experts for m in MATRICES)]
    return Parameters(released.weights.listing(f"layers.{LAYER}.ffn.{name}" for name in names)).within(
        f"layers.{LAYER}.ffn."
    )


def _gate(released: Released, stem: str) -> Iterator[Step]:
    x, mask, recorded = _input(released), _image_mask(released, stem), released.part(stem)
    weights = _parameters(released, stem).within("gate.")
    arguments = {"config": released.mapping, "weights": weights.mapping(), "x": x, "image_mask": boolean(mask)}

    def rules() -> list[GateChoice]:
        plain, biased = scores(weights, exact(x), mask)
        config, axes = released.config, ("token", "choice")
        taps = recorded["gate_weights"], recorded["gate_indices"]
        return [GateChoice(plain, biased, config.n_activated_experts, config.route_scale, axes, *taps)]

    yield Step(Call("gate", arguments), rules, Place(LAYER))


def _expert(released: Released, stem: str) -> Iterator[Step]:
    recorded = released.part(stem)
    index = int(recorded["gate_indices"].data[0, 0])
    x, routing = _input(released)[:1], recorded["gate_weights"][:1, 0]
    weights = released.parameters.within(f"layers.{LAYER}.ffn.experts.{index}.")
    arguments = {"config": released.mapping, "weights": weights.mapping(), "x": x, "routing_weight": routing}

    def rules() -> list[Within]:
        expected = expert(released.config, weights, exact(x), exact(routing))
        return [Within("out", expected, "BF16", ("token", "feature"), recorded=recorded["first_expert_out"])]

    yield Step(Call("expert", arguments), rules, Place(LAYER))


def _moe(released: Released, stem: str) -> Iterator[Step]:
    x, mask, recorded = _input(released), _image_mask(released, stem), released.part(stem)
    weights = _parameters(released, stem)
    arguments = {"config": released.mapping, "weights": weights.mapping(), "x": x, "image_mask": boolean(mask)}

    def rules() -> list[Within]:
        expected = mixture(released.config, weights, exact(x), mask)
        out = recorded["ffn_out"].reshape(TOKENS, -1)
        return [Within("ffn_out", expected, "BF16", ("token", "feature"), recorded=out)]

    yield Step(Call("moe", arguments), rules, Place(LAYER))
