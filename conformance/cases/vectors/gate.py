"""Hand-made vectors of the gate (numerics.md 7).

Token t is the t-th unit vector, so column t of the gate's weight holds its logits: any logits that bf16 holds can be
set.  A second unit vector adds the digits that bf16 has no room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.vectors.configuration import CONFIG, MODEL
from conformance.cases.vectors.lattice import integers
from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.choices import GateChoice
from conformance.judge.components.gate import scores
from conformance.judge.components.linear import Parameters
from conformance.tensors import Tensor

EXPERTS, WIDTH = MODEL.n_routed_experts, MODEL.dim
LARGE = {"n_routed_experts": 384, "n_activated_experts": 6}
"""As many experts as the released model has, and as many chosen."""


@dataclass(frozen=True)
class Vector:
    """Logits [N, E] of N tokens, both biases [E], and which tokens are image tokens."""

    variant: str
    why: str
    flags: tuple[str, ...]
    logits: Floats
    bias: Floats | None = None
    bias_vl: Floats | None = None
    image_mask: tuple[bool, ...] | None = None
    fine: Floats | None = None
    """Added to the logits through a second feature."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    underflows: bool = False
    """Exponentials below fp32's normal range: they may be exact, rounded to a subnormal, or flushed to zero."""


def _one(expert: int, value: float, experts: int = EXPERTS, other: float = 0.0) -> Floats:
    """`other` everywhere but for one expert."""
    result = np.full(experts, other)
    result[expert] = value
    return result


def _few(values: Mapping[int, float], experts: int, other: float) -> Floats:
    """`other` everywhere but for some experts."""
    result = np.full(experts, other)
    result[list(values)] = list(values.values())
    return result


def _spread(tokens: int) -> Floats:
    """Logits -4 ... 4 in steps of 1/32, no two of a token equal."""
    generator = np.random.default_rng(61)
    return np.stack([generator.permutation(257)[:EXPERTS] for _ in range(tokens)]) / 32 - 4


NEAR_FOUR = np.arange(EXPERTS) * 2.0**-10
WINNERS = {257: 3.0, 300: 2.5, 383: 2.0, 0: 1.5, 191: 1.0, 192: 0.5}

VECTORS = (
    Vector(
        "logits-of-minus-17",
        "Fails when softplus is log(1 + exp(z)): below -16.6 it is zero and the token loses all experts.",
        ("softplus-underflow", "gate-zero-sum"),
        np.stack([-17 - 0.125 * np.arange(EXPERTS), -40 + 0.5 * np.arange(EXPERTS)]),
    ),
    Vector(
        "logits-of-minus-85",
        "Fails when 1e-20 is missing from the sum, or is another number: the sum of the chosen scores is 6e-19.",
        ("gate-zero-sum", "softplus-underflow"),
        np.stack([np.full(EXPERTS, -85.0), _few({1: -84.0, 6: -84.5}, EXPERTS, -86.0)]),
    ),
    Vector(
        "logits-of-minus-1000",
        "Fails when a token whose scores are all zero is divided by zero: its weights are zero.",
        ("gate-zero-sum",),
        np.full((2, EXPERTS), -1000.0),
    ),
    Vector(
        "one-logit-above-minus-100",
        "Fails when exp(-100) turns a weight into NaN, or a large and a tiny score are not weighed as such.",
        ("softplus-underflow", "gate-zero-sum"),
        np.stack([_one(3, 1.0, other=-100.0), _one(7, -1.0, other=-100.0)]),
        underflows=True,
    ),
    Vector(
        "logits-of-100",
        "Fails when exp overflows for want of softplus's linear branch.",
        ("softplus-overflow",),
        np.stack([_few({2: 100.0, 5: 90.0}, EXPERTS, 1.0), _few({0: 1000.0, 7: 88.5}, EXPERTS, -3.0)]),
    ),
    Vector(
        "logits-around-20",
        "Fails when softplus jumps at its threshold, or the linear branch begins elsewhere.",
        ("softplus-threshold",),
        np.stack(
            [np.full(EXPERTS, 20.0), np.array([2.0, 3, 5, 1, 0, -1, 0.5, -2]), _few({1: 10.0, 4: 19.875}, EXPERTS, 0.0)]
        ),
        # One fp32 ulp below and above 20 for two experts, none for the rest: the choice is a tie within rounding.
        fine=np.stack([_few({1: 2.0**-19, 6: -(2.0**-19)}, EXPERTS, 0.0), np.zeros(EXPERTS), np.zeros(EXPERTS)]),
    ),
    Vector(
        "bias-of-10-on-one-expert",
        "Fails when the bias enters the weights, or does not enter the choice.",
        ("gate-bias-in-weights", "gate-bias-ignored"),
        np.stack([_few({0: 2.0, 1: 1.0, 5: -3.0}, EXPERTS, -1.0), _few({5: -8.0}, EXPERTS, 3.0) + NEAR_FOUR * 32]),
        bias=_one(5, 10.0),
    ),
    Vector(
        "bias-against-score",
        "Fails when scores are sigmoids or a softmax, or the bias is added to the logits: other experts are chosen.",
        ("gate-activation", "gate-bias-ignored"),
        # sqrt(softplus) is 1.60 at 2.5 and 0.83 at 0; a sigmoid is 0.92 and 0.5.  A bias of 0.5 turns only the latter.
        np.stack([_few({1: 2.5, 4: 2.0, 6: 0.0}, EXPERTS, -6.0), _few({2: 9.0, 3: 4.0, 6: 1.0}, EXPERTS, -6.0)]),
        bias=_one(6, 0.5),
    ),
    Vector(
        "image-tokens-between-text",
        "Fails when image tokens are routed with the text bias, text tokens with the other, or the mask is inverted.",
        ("gate-image-bias",),
        np.tile(_few({0: 1.0, 1: 0.5}, EXPERTS, -1.0), (5, 1)),
        bias=_few({2: 5.0, 3: 4.0}, EXPERTS, 0.0),
        bias_vl=_few({6: 5.0, 7: 4.0}, EXPERTS, 0.0),
        image_mask=(False, True, True, False, True),
    ),
    Vector(
        "no-image-tokens",
        "Fails when a batch without image tokens is routed with their bias.",
        ("gate-image-bias",),
        np.tile(_few({0: 1.0, 1: 0.5}, EXPERTS, -1.0), (2, 1)),
        bias=_few({2: 5.0, 3: 4.0}, EXPERTS, 0.0),
        bias_vl=_few({6: 5.0, 7: 4.0}, EXPERTS, 0.0),
    ),
    Vector(
        "equal-rows",
        "Fails when one expert is chosen twice, or equal scores lead to a lower one: any equal one may be kept.",
        ("gate-tie",),
        np.stack([_few({2: 3.0}, EXPERTS, 1.0), np.zeros(EXPERTS), _few({1: -5.0, 4: -5.0}, EXPERTS, 0.25)]),
    ),
    Vector(
        "winners-beyond-256-of-384",
        "Fails when only 256 experts are looked at, or experts are chosen within groups.",
        ("gate-expert-limit", "gate-group-limited"),
        np.stack([_few(WINNERS, 384, -2.0), _few({n: 4.0 - n / 256 for n in range(260, 266)}, 384, 0.0)]),
        overrides=LARGE,
    ),
    Vector(
        "winners-in-both-halves",
        "Fails when experts are chosen within the better group only.",
        ("gate-group-limited", "gate-expert-limit"),
        np.stack([_few({0: 2.0, 7: 1.5, 1: 1.0}, EXPERTS, -1.0), _few({6: 3.0, 2: 1.0, 5: 0.5}, EXPERTS, 0.0)]),
    ),
    Vector(
        "logits-closer-than-bf16",
        "Fails when logits or scores are rounded to bf16: the best two then tie with six others.",
        ("gate-in-bf16",),
        np.full((2, EXPERTS), 4.0),
        fine=np.stack([NEAR_FOUR, np.roll(NEAR_FOUR, 3)]),
    ),
    Vector(
        "spread-logits",
        "Fails when weights are rounded to bf16, are not those of their experts, or are normalised over all experts.",
        ("gate-in-bf16", "gate-normalisation", "gate-weights-misplaced", "gate-route-scale", "gate-activation"),
        _spread(12),
    ),
    Vector(
        "route-scale-2.5",
        "Fails when the factor is missing, fixed, or applied before the weights are normalised.",
        ("gate-route-scale", "gate-normalisation"),
        _spread(3),
        overrides={"route_scale": 2.5, "n_activated_experts": 3},
    ),
    Vector(
        "many-tokens",
        "Fails when tokens beyond some number are routed wrongly.",
        ("gate-weights-misplaced",),
        _spread(WIDTH),
        bias=integers(62, (EXPERTS,), 32) / 64,
    ),
)


def cases() -> Iterator[Case]:
    """One case a vector."""
    for vector in VECTORS:
        yield Case(
            f"gate/vectors/{vector.variant}",
            "core",
            "choice",
            vector.why,
            "numerics.md 7",
            partial(_steps, vector),
            vector.flags,
            "hand-made",
        )


def _steps(vector: Vector) -> Iterator[Step]:
    config = {**CONFIG, **vector.overrides}
    tokens, experts = vector.logits.shape
    x, weight = np.zeros((tokens, WIDTH)), np.zeros((experts, WIDTH))
    x[np.arange(tokens), np.arange(tokens)] = 1.0
    weight[:, :tokens] = vector.logits.T
    if vector.fine is not None:
        x[np.arange(tokens), tokens + np.arange(tokens)] = 1.0
        weight[:, tokens : 2 * tokens] = vector.fine.T
    nothing = np.zeros(experts)
    stored = {
        "weight": Tensor.from_values(weight, "BF16"),
        "bias": Tensor.from_values(nothing if vector.bias is None else vector.bias, "F32"),
        "bias_vl": Tensor.from_values(nothing if vector.bias_vl is None else vector.bias_vl, "F32"),
    }
    mask = None if vector.image_mask is None else np.array(vector.image_mask)
    given = Tensor.from_values(x, "BF16")
    arguments = {
        "config": config,
        "weights": stored,
        "x": given,
        "image_mask": None if mask is None else Tensor("BOOL", mask),
    }

    def rules() -> list[GateChoice]:
        model = ModelConfig.from_mapping(config, "gate vectors")
        plain, biased = scores(Parameters(stored), Bounded.exact(given.values()), mask)
        if vector.underflows:
            plain, biased = _down_to_zero(plain), _down_to_zero(biased)
        return [GateChoice(plain, biased, model.n_activated_experts, model.route_scale, ("token", "choice"))]

    yield Step(Call("gate", arguments), rules)


def _down_to_zero(score: Bounded) -> Bounded:
    """Scores whose square is no normal fp32 number may be anything down to zero."""
    tiny = np.abs(score.value) < 2.0**-63
    return Bounded(score.value, np.where(tiny, np.abs(score.value), score.error))
