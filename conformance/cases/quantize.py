"""Quantisers and dequantisers on recorded activations and weights (numerics.md 2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from conformance.cases.case import Call, Case, Place, Step
from conformance.cases.traces import GoldenModel, Joined
from conformance.formats import pack_fp4
from conformance.judge.bounded import Bounded
from conformance.judge.components.quantize import FP4_E4M3, FP4_E8M0, FP8, Quantizer
from conformance.judge.expectations import Exact
from conformance.judge.fp4_codes import PackedCodes
from conformance.tensors import Tensor

CODE_AXES = ("request", "position", "code")
SCALE_AXES = ("request", "position", "group")
VALUE_AXES = ("request", "position", "feature")
MATRIX_AXES = ("output", "input")

CODES = ("fp4-tie-away-from-zero", "fp4-truncated")
FLAGS = {
    FP8: ("scale-not-rounded-up", "scale-of-exact-power-doubled", "scale-group-size", "fp8-truncated", "fp8-fnuz"),
    FP4_E8M0: ("scale-not-rounded-up", "scale-of-exact-power-doubled", *CODES),
    FP4_E4M3: ("fp4-formats-swapped", "e4m3-scale-rounding", "fp4-reciprocal-multiply", "scale-group-size", *CODES),
}
"""Mistakes that recorded activations show both in codes and in fake-quantised values."""
PACKED = ("nibble-order", "negative-zero-code")

QUANTIZERS = {
    FP8: ("fp8", "attn_in", "a scale is rounded down or to nearest instead of up, or codes do not round to even"),
    FP4_E8M0: (
        "fp4_e8m0",
        "q_latent",
        "the two FP4 formats are swapped, nibbles are swapped, or ties are rounded away",
    ),
    FP4_E4M3: ("fp4_e4m3", "q_latent", "the E4M3 scale is a power of two, or x times 1/s replaces the true division"),
}


def cases(model: GoldenModel, joined: Joined) -> Iterator[Case]:
    """Codes and scales, the fake-quantised values, and the two weight layouts."""
    for quantizer, (name, tap, why) in QUANTIZERS.items():
        layers = [
            layer for layer in range(model.config.n_layers) if joined.tap(tap, layer).shape[-1] % quantizer.group == 0
        ]
        if not layers:
            continue
        yield Case(
            f"quantize/{name.replace('_', '-')}-codes-and-scales/trace",
            "smoke",
            "exact",
            f"Fails when {why}.",
            "numerics.md 2",
            partial(_codes, joined, quantizer, name, tap, layers),
            flags=FLAGS[quantizer] if quantizer is FP8 else FLAGS[quantizer] + PACKED,
            source=joined.source,
        )
        yield Case(
            f"quantize/{name.replace('_', '-')}-fake/trace",
            "core",
            "exact",
            f"Fails when {why}, or when code times scale is not rounded to bf16.",
            "numerics.md 2",
            partial(_fake, joined, quantizer, name, tap, layers),
            flags=FLAGS[quantizer],
            source=joined.source,
        )
    yield Case(
        "quantize/fp8-weight-dequantize/trace",
        "core",
        "exact",
        "Fails when the scale of a 32x32 tile is applied to another tile, or a scale byte is read as a number.",
        "numerics.md 2",
        partial(_fp8_weights, model),
        flags=("scale-layout",),
        source=model.name,
    )
    yield Case(
        "quantize/fp4-weight-dequantize/trace",
        "core",
        "exact",
        "Fails when nibbles are swapped, subnormal codes are decoded as normal, or scales belong to other inputs.",
        "numerics.md 2",
        partial(_fp4_weights, model),
        flags=("nibble-order", "fp4-subnormal-decoded", "fp4-sign", "scale-layout"),
        source=model.name,
    )


def _codes(joined: Joined, quantizer: Quantizer, name: str, tap: str, layers: list[int]) -> Iterator[Step]:
    for layer in layers:
        x = joined.tap(tap, layer)

        def rules(x: Tensor = x) -> list[Exact]:
            codes, scales = quantizer.quantize(x.values())
            # A wrong scale makes wrong codes: it is named first.
            expected_scales = Exact("scales", Tensor(quantizer.scale.name, scales), SCALE_AXES)
            if quantizer is FP8:
                return [expected_scales, Exact("codes", Tensor("F8_E4M3", codes), CODE_AXES)]
            return [expected_scales, PackedCodes("codes", Tensor("U8", pack_fp4(codes)), CODE_AXES)]

        yield Step(Call(f"quantize_{name}", {"x": x}), rules, joined.place(layer))


def _fake(joined: Joined, quantizer: Quantizer, name: str, tap: str, layers: list[int]) -> Iterator[Step]:
    for layer in layers:
        x = joined.tap(tap, layer)

        def rules(x: Tensor = x) -> list[Exact]:
            values = quantizer.fake(Bounded.exact(x.values())).value
            return [Exact("values", Tensor.from_values(values, "BF16"), VALUE_AXES)]

        yield Step(Call(f"fake_quantize_{name}", {"x": x}), rules, joined.place(layer))


def _fp8_weights(model: GoldenModel) -> Iterator[Step]:
    shared = ("ffn.shared_experts.w2",) if model.config.n_shared_experts else ()
    for layer in range(model.config.n_layers):
        for name in ("attn.wq_a", "attn.wkv", "attn.wo_b", *shared):
            yield _weight(model, layer, name, "dequantize_fp8_weight")


def _fp4_weights(model: GoldenModel) -> Iterator[Step]:
    for layer in range(model.config.n_layers):
        for name in ("ffn.experts.0.w1", f"ffn.experts.{model.config.n_routed_experts - 1}.w2"):
            yield _weight(model, layer, name, "dequantize_fp4_weight")


def _weight(model: GoldenModel, layer: int, name: str, method: str) -> Step:
    parameters = model.layer(layer)
    arguments = {"weight": parameters.tensor(f"{name}.weight"), "scale": parameters.tensor(f"{name}.scale")}

    def rules() -> list[Exact]:
        values = np.ascontiguousarray(parameters[f"{name}.weight"])
        return [Exact("values", Tensor.from_values(values, "BF16"), MATRIX_AXES)]

    return Step(Call(method, arguments), rules, Place(layer))
