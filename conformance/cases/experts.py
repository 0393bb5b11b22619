"""Experts on recorded inputs with the recorded routing (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.gate import flat
from conformance.cases.traces import GoldenModel, Joined, exact
from conformance.judge.components.experts import combined, expert
from conformance.judge.expectations import Within
from conformance.tensors import Tensor

SINGLE_FLAGS = ("expert-clamp", "expert-activation", "expert-weights-swapped", "expert-rounded-early", "bf16-truncated")
ROUTING_FLAGS = ("routing-weight-late", "routing-weight-ignored", "routing-weight-in-bf16")
SUM_FLAGS = (
    "experts-rounded-early",
    "expert-dropped",
    "expert-tokens-lost",
    "gate-weights-misplaced",
    "shared-expert-missing",
    "shared-expert-scaled",
    "bf16-accumulator",
)

AXES = ("token", "feature")


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """The weighted sum as recorded, and single experts of both kinds."""
    yield Case(
        "experts/weighted-sum-and-clamps/trace",
        "smoke",
        "composed",
        "Fails when the gate is clamped below, a clamp is missing, or the routing weight comes after the quantiser.",
        "numerics.md 7",
        partial(_combined, model, joined),
        flags=(*SINGLE_FLAGS, *ROUTING_FLAGS, *SUM_FLAGS),
        source=joined.source,
    )
    kinds = {"routed": "Fails when the routing weight is applied to the output, or FP4 scales are per tile."}
    if model.config.n_shared_experts:
        kinds["shared"] = "Fails when the shared expert is not clamped, or is given a routing weight."
    for kind, why in kinds.items():
        yield Case(
            f"experts/{kind}-expert/trace",
            "core",
            "composed",
            why,
            "numerics.md 7",
            partial(_single, model, joined, kind),
            flags=SINGLE_FLAGS if kind == "shared" else (*SINGLE_FLAGS, *ROUTING_FLAGS),
            source=joined.source,
        )


def _combined(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        x = flat(joined.tap("ffn_in", layer))
        routing, indices = flat(joined.tap("gate_weights", layer)), flat(joined.tap("gate_indices", layer))
        arguments = {
            "config": model.mapping,
            "weights": model.layer(layer).within("ffn.").mapping(),
            "x": x,
            "routing_weights": routing,
            "expert_indices": indices,
        }

        def rules(
            layer: int = layer, x: Tensor = x, routing: Tensor = routing, indices: Tensor = indices
        ) -> list[Within]:
            weights = model.layer(layer).within("ffn.")
            chosen = indices.data.astype(np.int64)
            expected = combined(model.config, weights, exact(x), exact(routing), chosen)
            return [Within("ffn_out", expected, "BF16", AXES, recorded=flat(joined.tap("ffn_out", layer)))]

        yield Step(Call("experts", arguments), rules, joined.place(layer))


def _single(model: GoldenModel, joined: Joined, kind: str) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        routed = kind == "routed"
        # Another expert in every layer, so that all are seen.
        name = f"experts.{layer % model.config.n_routed_experts}." if routed else "shared_experts."
        x = flat(joined.tap("ffn_in", layer))
        routing = flat(joined.tap("gate_weights", layer))[:, 0] if routed else None
        arguments = {
            "config": model.mapping,
            "weights": model.layer(layer).within("ffn." + name).mapping(),
            "x": x,
            "routing_weight": routing,
        }

        def rules(
            layer: int = layer, name: str = name, x: Tensor = x, routing: Tensor | None = routing
        ) -> list[Within]:
            weights = model.layer(layer).within("ffn." + name)
            expected = expert(model.config, weights, exact(x), None if routing is None else exact(routing))
            return [Within("out", expected, "BF16", AXES)]

        yield Step(Call("expert", arguments), rules, Place(layer, ["all"], joined.positions[0].tolist()))
