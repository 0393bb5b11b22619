"""RMSNorm on recorded latents (numerics.md 3)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Joined, bf16, exact
from conformance.judge.components.hyper_connections import read
from conformance.judge.components.norm import rms_norm
from conformance.judge.expectations import Exact, Within
from conformance.tensors import Tensor

AXES = ("request", "position", "feature")


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """The two norms of every block on what they were given, and rows of zeros."""
    yield Case(
        "norm/rms/block-inputs",
        "smoke",
        "composed",
        "Fails when the mean is taken in bf16, eps is another one, or the product is rounded before the weight.",
        "numerics.md 3",
        partial(_block_inputs, model, joined),
        flags=(
            "norm-eps",
            "norm-mean-count",
            "norm-sum-in-bf16",
            "norm-rounded-early",
            "norm-weight-offset",
            "layer-norm",
            "bf16-truncated",
        ),
        source=joined.source,
    )
    yield Case(
        "norm/rms/zero-rows",
        "core",
        "exact",
        "Fails when a row of zeros becomes NaN: 0 times rsqrt(eps) is 0.",
        "numerics.md 3",
        partial(_zero_rows, model),
        flags=("norm-eps",),
        source=model.name,
    )


def _block_inputs(model: GoldenModel, joined: Joined) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        parts = (
            ("attn_norm.weight", joined.attention_stream(layer), joined.tap("pre_in", layer)),
            ("ffn_norm.weight", joined.tap("h_mid", layer), joined.tap("attn_pre", layer)),
        )
        for name, stream, pre in parts:
            x = bf16(read(exact(stream), exact(pre)))
            weight = model.layer(layer).tensor(name)

            def rules(x: Tensor = x, weight: Tensor = weight) -> list[Within]:
                expected = rms_norm(exact(x), weight.values(), model.config.norm_eps)
                return [Within("out", expected, "BF16", AXES)]

            arguments = {"x": x, "weight": weight, "eps": model.config.norm_eps}
            yield Step(Call("rms_norm", arguments), rules, joined.place(layer))


def _zero_rows(model: GoldenModel) -> Iterator[Step]:
    weight = model.layer(0).tensor("attn_norm.weight")
    zeros = Tensor.from_values(np.zeros((1, 2, model.config.dim)), "BF16")
    arguments = {"x": zeros, "weight": weight, "eps": model.config.norm_eps}
    yield Step(Call("rms_norm", arguments), lambda: [Exact("out", zeros, AXES)], Place(0))
