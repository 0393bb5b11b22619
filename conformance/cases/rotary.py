"""Rotary embedding (numerics.md 4): frequencies, tables far out, and rotations of recorded heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Joined, exact, int64
from conformance.judge.components.rotary import angles, frequencies, rotate
from conformance.judge.expectations import Exact, Ulp, Within
from conformance.tensors import Tensor

TABLE_ULPS = 2
"""fp32 sine and cosine as GPU libraries document them (CUDA C++ Programming Guide: sinf 2, cosf 2 ulp)."""

KIND_FLAGS = {"window-only": ("rope-base",), "compressed": ("rope-base", "yarn-missing", "yarn-ramp")}
TABLE_FLAGS = ("yarn-mscale", "rope-position", "rope-table-length", "rope-tables-in-bf16")
ROTATION_FLAGS = ("rope-pairing", "rope-part", "rope-direction", "bf16-truncated")

FAR_POSITIONS = (0, 1, 2, 15, 16, 127, 128, 4095, 65535, 65536, 262143, 1048574, 1048575)


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """Per kind of layer: window-only layers have no scaling, layers that compress have YaRN and another base."""
    config = model.config
    kinds = {"window-only": [n for n in range(config.n_layers) if not config.ratio(n)]}
    kinds["compressed"] = [n for n in range(config.n_layers) if config.ratio(n)]
    for kind, layers in kinds.items():
        if not layers:
            continue
        yield Case(
            f"rotary/frequencies/{kind}",
            "smoke",
            "exact",
            "Fails when one base serves all layers, YaRN's ramp is off, or the power is not rounded to fp32 first.",
            "numerics.md 4",
            partial(_frequencies, model, layers),
            flags=(*KIND_FLAGS[kind], "rope-frequency-rounding"),
            source=model.name,
        )
        yield Case(
            f"rotary/tables/{kind}",
            "core",
            "ulp",
            "Fails when the angle is not the fp32 product of position and frequency, or positions are clamped.",
            "numerics.md 4",
            partial(_tables, model, layers),
            flags=(*KIND_FLAGS[kind], *TABLE_FLAGS, "rope-frequency-rounding", "rope-angle-precision"),
            source=model.name,
        )
        for direction in ("forward", "inverse"):
            yield Case(
                f"rotary/pairs-adjacent-{direction}/{kind}",
                "core",
                "composed",
                "Fails when halves are paired instead of neighbours, other features turn, or the direction is wrong.",
                "numerics.md 4",
                partial(_rotations, model, joined, layers, direction == "inverse"),
                flags=(
                    *KIND_FLAGS[kind],
                    *TABLE_FLAGS,
                    *ROTATION_FLAGS,
                    *(("rope-inverse",) if direction == "inverse" else ()),
                ),
                source=joined.source,
            )


def _frequencies(model: GoldenModel, layers: list[int]) -> Iterator[Step]:
    for layer in layers:
        expected = Tensor("F32", frequencies(model.config, layer))
        arguments = {"config": model.mapping, "layer_id": layer}
        yield Step(
            Call("rotary_frequencies", arguments),
            lambda expected=expected: [Exact("frequencies", expected, ("pair",))],  # type: ignore[misc]
            Place(layer),
        )


def _tables(model: GoldenModel, layers: list[int]) -> Iterator[Step]:
    positions = np.asarray(FAR_POSITIONS, dtype=np.int64)
    for layer in layers[:1]:
        angle = angles(model.config, layer, positions)
        arguments = {"config": model.mapping, "layer_id": layer, "positions": int64(positions)}
        rules = [
            Ulp(name, function(angle), "F32", TABLE_ULPS, ("position", "pair"))
            for name, function in (("cos", np.cos), ("sin", np.sin))
        ]
        yield Step(
            Call("rotary_tables", arguments),
            lambda rules=rules: rules,  # type: ignore[misc]
            Place(layer, [], FAR_POSITIONS),
        )


def _rotations(model: GoldenModel, joined: Joined, layers: list[int], inverse: bool) -> Iterator[Step]:
    for layer in layers:
        heads = joined.tap("attn_o", layer)
        for x, axes in (
            (heads, ("request", "position", "head", "feature")),
            (heads[:, :, 0], ("request", "position", "feature")),
        ):
            arguments = {
                "config": model.mapping,
                "layer_id": layer,
                "x": x,
                "positions": int64(joined.positions),
                "inverse": inverse,
            }

            def rules(x: Tensor = x, axes: tuple[str, ...] = axes, layer: int = layer) -> list[Within]:
                expected = rotate(model.config, layer, exact(x), joined.positions, inverse)
                return [Within("out", expected, "BF16", axes)]

            yield Step(Call("rotate", arguments), rules, joined.place(layer))
