"""Released widths, cheap parts: hyper-connections, rotary tables far out, and the bytes that a token's caches take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.hyper_connections import COMB_AXES, PER_STREAM, READ_AXES, WRITE_AXES
from conformance.cases.released_set import Released
from conformance.cases.rotary import TABLE_ULPS
from conformance.cases.traces import exact, int64
from conformance.config import ModelConfig
from conformance.judge.components import hyper_connections as mixes
from conformance.judge.components.rotary import angles
from conformance.judge.expectations import Mode, Ulp, Verdict, Within
from conformance.tensors import Tensor

STREAM_SHAPE = (1, 5, 4, 5120)
ZERO_POSITION = 4
HYPER_LAYER = 24


def hyper_connections(released: Released, stem: str) -> Iterator[Case]:
    """Coefficients of a stream with one position of zeros, then the read and the write with them."""
    why = {
        "coefficients": "Fails when the norm is a mean of means, or a stream of zeros divides by zero.",
        "read": "Fails when the mix is rounded to bf16 before the sum.",
        "write": "Fails when comb is transposed or the sum is rounded between streams.",
    }
    steps = {"coefficients": _coefficients, "read": _read, "write": _write}
    for name, text in why.items():
        yield Case(
            f"hyper_connections/{name}/released-width",
            "core",
            "composed",
            text,
            "numerics.md 5",
            partial(steps[name], released, stem),
            source=f"{released.name}/{stem}",
        )


def _stream(released: Released) -> Tensor:
    made = released.input("x/hc", STREAM_SHAPE)
    data = made.data.copy()
    data[:, ZERO_POSITION] = 0
    return Tensor(made.dtype, data)


def _coefficients(released: Released, stem: str) -> Iterator[Step]:
    h, recorded = _stream(released), released.part(stem)
    names = {part: f"layers.{HYPER_LAYER}.hc_attn_{part}" for part in ("fn", "scale", "base")}
    arguments = {"config": released.mapping, "h": h} | {part: released.weights[n] for part, n in names.items()}

    def rules() -> list[Within]:
        values = {part: released.parameters[name] for part, name in names.items()}
        expected = mixes.coefficients(released.config, exact(h), **values)
        return [
            Within("pre", expected.pre, "F32", PER_STREAM, recorded=recorded["pre"]),
            Within("post", expected.post, "F32", PER_STREAM, recorded=recorded["post"]),
            Within("comb", expected.comb, "F32", COMB_AXES, recorded=recorded["comb"]),
        ]

    yield Step(Call("hyper_connection_coefficients", arguments), rules, Place(HYPER_LAYER))


def _read(released: Released, stem: str) -> Iterator[Step]:
    h, recorded = _stream(released), released.part(stem)
    pre = recorded["pre"]

    def rules() -> list[Within]:
        return [Within("out", mixes.read(exact(h), exact(pre)), "BF16", READ_AXES, recorded=recorded["read"])]

    yield Step(Call("hyper_connection_read", {"h": h, "pre": pre}), rules, Place(HYPER_LAYER))


def _write(released: Released, stem: str) -> Iterator[Step]:
    h, recorded = _stream(released), released.part(stem)
    batch, length, _, width = STREAM_SHAPE
    y = released.input("x/hc_y", (batch, length, width))
    arguments = {"y": y, "h": h, "post": recorded["post"], "comb": recorded["comb"]}

    def rules() -> list[Within]:
        expected = mixes.write(**{name: exact(value) for name, value in arguments.items()})
        return [Within("out", expected, "BF16", WRITE_AXES, recorded=recorded["write"])]

    yield Step(Call("hyper_connection_write", arguments), rules, Place(HYPER_LAYER))


ROTARY_LAYERS = {"window": 0, "compressed": 2}
"""A layer of each kind of rotary table."""


def rotary(released: Released, stem: str) -> Iterator[Case]:
    """Tables up to the last position of the released context."""
    for kind in ROTARY_LAYERS:
        yield Case(
            f"rotary/tables-up-to-a-million/released-{kind}",
            "core",
            "ulp",
            "Fails when frequencies are rounded differently or angles kept in double: 1e-2 off at the far end.",
            "numerics.md 4",
            partial(_tables, released, stem, kind),
            source=f"{released.name}/{stem}",
        )


def _tables(released: Released, stem: str, kind: str) -> Iterator[Step]:
    recorded, layer = released.part(stem), ROTARY_LAYERS[kind]
    positions = np.asarray(json.loads(recorded.metadata["positions"]), dtype=np.int64)
    arguments = {"config": released.mapping, "layer_id": layer, "positions": int64(positions)}

    def rules() -> list[Ulp]:
        angle = angles(released.config, layer, positions)
        functions = {"cos": np.cos, "sin": np.sin}
        return [
            Ulp(name, function(angle), "F32", TABLE_ULPS, ("position", "pair"), recorded[f"{kind}/{name}"])
            for name, function in functions.items()
        ]

    yield Step(Call("rotary_tables", arguments), rules, Place(layer, [], positions.tolist()))


@dataclass(frozen=True)
class PackedBytes:
    """Codes and scales of one row take `expected` bytes together: packed, not one code a byte, not fp32 scales."""

    expected: int
    note: str = ""

    mode: Mode = "exact"

    @property
    def taps(self) -> tuple[str, ...]:
        """Both results of a quantiser."""
        return ("codes", "scales")

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """Nothing recorded is needed."""
        return {}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Add up the bytes."""
        sizes = {tap: results[tap].data.nbytes for tap in self.taps}
        total = sum(sizes.values())
        if total == self.expected:
            return Verdict("codes", self.mode, True, 1, note=self.note)
        parts = " + ".join(f"{size} ({tap})" for tap, size in sizes.items())
        return Verdict("codes", self.mode, False, 1, 1, np.inf, message=f"{parts} bytes a row, not {self.expected}")


def row_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one row of each cache, by the quantiser that makes it (numerics.md 6.3, deployed storage)."""
    return {
        "quantize_fp4_e4m3": config.head_dim // 2 + config.head_dim // 16,
        "quantize_fp4_e8m0": config.index_head_dim // 2 + config.index_head_dim // 32,
        "quantize_fp8": config.head_dim + config.head_dim // 32,
    }


def bytes_per_token(config: ModelConfig) -> int:
    """Bytes of the shared rows for each token of context: one row and one key per group of every source."""
    rows = row_bytes(config)
    row = rows["quantize_fp4_e4m3"] + rows["quantize_fp4_e8m0"]
    groups = 2 * sum(1 / config.ratio(layer) for layer in config.kv_source_layers)
    return row * round(groups) // 2


def storage(released: Released) -> Iterator[Case]:
    """The packed layouts that the memory of a long context is reckoned with."""
    yield Case(
        "quantize/packed-bytes-per-token/released",
        "core",
        "exact",
        "Fails when FP4 codes are not packed two to a byte, or scales are kept wider than a byte.",
        "numerics.md 6.3",
        partial(_storage, released),
        source=f"{released.name} configuration",
    )


def _storage(released: Released) -> Iterator[Step]:
    config = released.config
    widths = {"quantize_fp4_e8m0": config.index_head_dim}
    note = f"shared rows take {bytes_per_token(config)} bytes a token"
    for method, expected in row_bytes(config).items():
        x = released.input("x/packed", (1, widths.get(method, config.head_dim)))
        rule = PackedBytes(expected, note)
        yield Step(Call(method, {"x": x}), lambda rule=rule: [rule], Place(None, [method]))  # type: ignore[misc]
