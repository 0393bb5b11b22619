"""Hand-made vectors of the rotary embedding (numerics.md 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import Ints, int64
from conformance.cases.vectors.configuration import CONFIG, RATIO_ONE, RATIO_TWO, WINDOW_ONLY
from conformance.cases.vectors.lattice import integers
from conformance.config import ModelConfig
from conformance.judge.bounded import Bounded, Floats
from conformance.judge.components.rotary import angles, frequencies, rotate
from conformance.judge.expectations import Exact, Ulp, Within
from conformance.tensors import Tensor

RELEASED = {**CONFIG, "head_dim": 128, "index_head_dim": 64, "rope_head_dim": 64, "original_seq_len": 65536}
"""The rotary parameters of the released configuration: the ramp runs from pair 15 to pair 25."""

TABLE_ULPS = 2
"""fp32 sine and cosine as GPU libraries document them (CUDA C++ Programming Guide: sinf 2, cosf 2 ulp)."""

KINDS = {"window-only": WINDOW_ONLY, "ratio-2": RATIO_TWO, "ratio-1": RATIO_ONE}
LAST_POSITION = 1_048_575
FREQUENCY_FLAGS = ("rope-base", "rope-frequency-rounding")

RAMPS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "released": (RELEASED, "15 to 25"),
    "small": (CONFIG, "2 to 7"),
    "lower-bound-clamped": ({**RELEASED, "original_seq_len": 128}, "0 to 9"),
    "upper-bound-clamped": ({**RELEASED, "compress_rope_theta": 100.0, "beta_fast": 4096}, "6 to 63"),
    "both-bounds-at-zero": ({**RELEASED, "original_seq_len": 6}, "0 to 0"),
    "other-factor-and-betas": ({**RELEASED, "rope_factor": 4, "beta_fast": 16, "beta_slow": 2}, "17 to 23"),
}
"""Configurations whose ramp differs, with its first and last pair."""


@dataclass(frozen=True)
class Rotation:
    """One call of `rotate`: a value [B,T,d] or [B,T,H,d] at positions [B,T]."""

    behaviour: str
    x: Callable[[], Floats]
    positions: Ints
    why: str
    flags: tuple[str, ...]
    inverse: bool = False
    released: bool = False
    """With the released configuration's rotary parameters instead of the small ones."""
    layers: tuple[str, ...] = ("window-only", "ratio-2")


def _one_hot() -> Floats:
    """[1, 64, 64]: token f has a one in feature f alone; the first 32 features do not turn."""
    return np.eye(64)[None]


def _heads(batch: int, tokens: int, heads: int, width: int) -> Floats:
    return integers(31, (batch, tokens, heads, width), 255) / 64


def _rows(batch: int, tokens: int, width: int) -> Floats:
    return integers(32, (batch, tokens, width), 255) / 64


def _at(position: int, tokens: int) -> Ints:
    return np.full((1, tokens), position, dtype=np.int64)


FAR = np.array([[0, 1, 200, 8191, 8192, 65535, 65536, 131071, 524287, 1048574, LAST_POSITION]])

ROTATIONS = (
    Rotation(
        "pairs-adjacent/one-hot-at-position-1",
        _one_hot,
        _at(1, 64),
        "Fails when halves are paired instead of neighbours, the turn goes the other way, or other features turn.",
        ("rope-pairing", "rope-part", "rope-direction"),
    ),
    Rotation(
        "inverse/one-hot-at-position-3",
        _one_hot,
        _at(3, 64),
        "Fails when the inverse turns forward, or not at all.",
        ("rope-inverse", "rope-direction"),
        inverse=True,
    ),
    Rotation(
        "base-by-layer/position-200",
        lambda: _rows(1, 4, 64),
        _at(200, 4),
        "Fails when window-only layers turn with the compressed layers' base, or those without YaRN.",
        ("rope-base", "yarn-mscale", "rope-tables-in-bf16", "bf16-truncated"),
        layers=("window-only", "ratio-2", "ratio-1"),
    ),
    Rotation(
        "inverse-base-by-layer/position-200",
        lambda: _heads(1, 4, 3, 64),
        _at(200, 4),
        "Fails when the inverse uses the table of another kind of layer.",
        ("rope-base", "yarn-mscale"),
        inverse=True,
        layers=("window-only", "ratio-2", "ratio-1"),
    ),
    Rotation(
        "positions-far-out/up-to-1048575",
        lambda: _rows(1, FAR.size, 128),
        FAR,
        "Fails when positions are clamped or kept in bf16, or the angle is not the fp32 product of fp32 factors.",
        ("rope-table-length", "rope-angle-precision", "rope-frequency-rounding"),
        released=True,
    ),
    Rotation(
        "positions-by-request/batch-of-two-heads-of-three",
        lambda: _heads(2, 4, 3, 64),
        np.array([[0, 1, 2, 3], [100, 7, 901, 5]]),
        "Fails when a request gets another's positions, or positions run along the heads or restart in every call.",
        ("rope-position",),
    ),
)


def cases() -> Iterator[Case]:
    """Frequencies of several ramps, tables, and rotations."""
    for name, (config, pairs) in RAMPS.items():
        yield Case(
            f"rotary/yarn-ramp/{name}",
            "core",
            "exact",
            f"Fails when a bound of the ramp (pairs {pairs}) is off by one, the betas are swapped, or it is inverted.",
            "numerics.md 4",
            partial(_frequency_steps, config, RATIO_TWO),
            ("yarn-ramp", "yarn-missing", *FREQUENCY_FLAGS),
            "hand-made",
        )
    yield Case(
        "rotary/no-yarn-in-window-only-layers/released",
        "core",
        "exact",
        "Fails when layers without compression are scaled too, or share the other layers' base.",
        "numerics.md 4",
        partial(_frequency_steps, RELEASED, WINDOW_ONLY),
        FREQUENCY_FLAGS,
        "hand-made",
    )
    for name, layer in KINDS.items():
        yield Case(
            f"rotary/tables-keep-length-one/{name}",
            "core",
            "ulp",
            "Fails when YaRN's attention factor scales cosine and sine, or positions are clamped or rounded.",
            "numerics.md 4",
            partial(_table_steps, layer),
            ("yarn-mscale", "rope-table-length", "rope-angle-precision", "rope-tables-in-bf16", *FREQUENCY_FLAGS),
            "hand-made",
        )
    for rotation in ROTATIONS:
        yield Case(
            f"rotary/{rotation.behaviour}",
            "core",
            "composed",
            rotation.why,
            "numerics.md 4",
            partial(_rotation_steps, rotation),
            rotation.flags,
            "hand-made",
        )


def _frequency_steps(config: Mapping[str, Any], layer: int) -> Iterator[Step]:
    expected = Tensor("F32", frequencies(ModelConfig.from_mapping(config, "rotary vectors"), layer))
    yield Step(
        Call("rotary_frequencies", {"config": config, "layer_id": layer}),
        lambda: [Exact("frequencies", expected, ("pair",))],
        Place(layer),
    )


def _table_steps(layer: int) -> Iterator[Step]:
    positions = FAR[0]
    angle = angles(ModelConfig.from_mapping(RELEASED, "rotary vectors"), layer, positions)
    rules = [
        Ulp(name, function(angle), "F32", TABLE_ULPS, ("position", "pair"))
        for name, function in (("cos", np.cos), ("sin", np.sin))
    ]
    arguments = {"config": RELEASED, "layer_id": layer, "positions": int64(positions)}
    yield Step(Call("rotary_tables", arguments), lambda: rules, Place(layer, [], positions.tolist()))


def _rotation_steps(rotation: Rotation) -> Iterator[Step]:
    x = rotation.x()
    axes = ("request", "position", "head", "feature") if x.ndim == 4 else ("request", "position", "feature")
    config = RELEASED if rotation.released else CONFIG
    model = ModelConfig.from_mapping(config, "rotary vectors")
    for kind in rotation.layers:
        layer = KINDS[kind]
        arguments = {
            "config": config,
            "layer_id": layer,
            "x": Tensor.from_values(x, "BF16"),
            "positions": int64(rotation.positions),
            "inverse": rotation.inverse,
        }

        def rules(layer: int = layer) -> list[Within]:
            expected = rotate(model, layer, Bounded.exact(x), rotation.positions, rotation.inverse)
            return [Within("out", expected, "BF16", axes)]

        yield Step(Call("rotate", arguments), rules, Place(layer))
