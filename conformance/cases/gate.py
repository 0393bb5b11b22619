"""Expert selection on recorded inputs (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from conformance.cases.case import Call, Case, Step
from conformance.cases.traces import GoldenModel, Joined, boolean, exact
from conformance.judge.choices import GateChoice
from conformance.judge.components.gate import scores
from conformance.tensors import Tensor

TRACE_FLAGS = (
    "gate-activation",
    "gate-bias-ignored",
    "gate-bias-in-weights",
    "gate-image-bias",
    "gate-in-bf16",
    "gate-normalisation",
    "gate-route-scale",
    "gate-weights-misplaced",
    "gate-expert-limit",
    "gate-group-limited",
    "softplus-threshold",
)


def cases(model: GoldenModel, joined: Joined, with_images: Joined | None) -> Iterator[Case]:
    """All tokens as text and image tokens are recorded, and the image scenario by itself."""
    yield Case(
        "gate/bias-selects-but-does-not-weigh/trace",
        "smoke",
        "choice",
        "Fails when the bias enters the weights, the score is another function, or logits are kept in bf16.",
        "numerics.md 7",
        partial(_steps, model, joined),
        flags=TRACE_FLAGS,
        source=joined.source,
    )
    if with_images is not None:
        yield Case(
            "gate/image-tokens-use-bias-vl/trace",
            "core",
            "choice",
            "Fails when image tokens are routed with the text bias.",
            "numerics.md 7",
            partial(_steps, model, with_images),
            flags=("gate-image-bias",),
            source=with_images.source,
        )


def flat(tensor: Tensor) -> Tensor:
    """[1, N, ...] -> [N, ...]."""
    return tensor.reshape(*tensor.shape[1:])


def _steps(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    mask = joined.image_mask()
    image_mask = boolean(None if mask is None else mask[0])
    for layer in range(model.config.n_layers):
        x = flat(joined.tap("ffn_in", layer))
        weights = model.layer(layer).within("ffn.gate.")
        arguments = {"config": model.mapping, "weights": weights.mapping(), "x": x, "image_mask": image_mask}

        def rules(layer: int = layer, x: Tensor = x) -> list[GateChoice]:
            weights = model.layer(layer).within("ffn.gate.")
            plain, biased = scores(weights, exact(x), None if mask is None else mask[0])
            return [
                GateChoice(
                    plain,
                    biased,
                    model.config.n_activated_experts,
                    model.config.route_scale,
                    ("token", "choice"),
                    flat(joined.tap("gate_weights", layer)),
                    flat(joined.tap("gate_indices", layer)),
                )
            ]

        yield Step(Call("gate", arguments), rules, joined.place(layer))
