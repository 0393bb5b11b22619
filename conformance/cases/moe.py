"""Gate and experts together (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Step
from conformance.cases.gate import flat
from conformance.cases.traces import Bools, GoldenModel, Joined, boolean, exact
from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded
from conformance.judge.components.experts import combined
from conformance.judge.components.gate import scores
from conformance.judge.components.linear import Parameters
from conformance.judge.expectations import Within
from conformance.tensors import Tensor


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """The whole mixture: routing weights carry their own error into the experts."""
    yield Case(
        "moe/routing-into-experts/trace",
        "core",
        "composed",
        "Fails when weights and experts are paired wrongly, or the routing scale is applied twice or never.",
        "numerics.md 7",
        partial(_steps, model, joined),
        flags=(
            "gate-image-bias",
            "gate-weights-misplaced",
            "gate-route-scale",
            "expert-number",
            "routing-weight-in-bf16",
        ),
        source=joined.source,
    )


def _steps(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    mask = joined.image_mask()
    for layer in range(model.config.n_layers):
        x = flat(joined.tap("ffn_in", layer))
        arguments = {
            "config": model.mapping,
            "weights": model.layer(layer).within("ffn.").mapping(),
            "x": x,
            "image_mask": boolean(None if mask is None else mask[0]),
        }

        def rules(layer: int = layer, x: Tensor = x) -> list[Within]:
            recorded = flat(joined.tap("ffn_out", layer))
            weights = model.layer(layer).within("ffn.")
            expected = mixture(model.config, weights, exact(x), None if mask is None else mask[0])
            return [Within("ffn_out", expected, "BF16", ("token", "feature"), recorded=recorded)]

        yield Step(Call("moe", arguments), rules, joined.place(layer))


def mixture(config: ModelConfig, weights: Parameters, x: Bounded, image_mask: Bools | None) -> Bounded:
    """The mixture of x [N,D] with its own choice of experts; a token whose choice is a tie is not bounded."""
    plain, biased = scores(weights.within("gate."), x, image_mask)
    order = np.argsort(-biased.value, axis=-1, kind="stable")
    chosen, others = order[:, : config.n_activated_experts], order[:, config.n_activated_experts :]
    rows = np.arange(x.shape[0])[:, None]
    lowest_in = biased.low[rows, chosen].min(-1)
    highest_out = biased.high[rows, others].max(-1, initial=-np.inf)
    picked = plain[rows, chosen]
    routing = picked / (picked.sum(-1, keepdims=True) + 1e-20) * config.route_scale
    result = combined(config, weights, x, routing, chosen)
    tie = highest_out >= lowest_in
    return Bounded(result.value, np.where(tie[:, None], np.inf, result.error))
