"""Kernels that walk rows once: quantisers, the norm with and without one, and rows as they are cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.bench.problem import (
    POOL,
    Arguments,
    Counts,
    Ints,
    Problem,
    Sizes,
    configured,
    draws,
    lazily,
    made,
    one_method,
    require_multiple,
)
from conformance.formats import BF16, pack_fp4
from conformance.interface import Implementation
from conformance.judge.bounded import Bounded
from conformance.judge.components.compressor import compressed_rows as cached
from conformance.judge.components.norm import rms_norm as normed
from conformance.judge.components.quantize import FP4_E4M3, FP4_E8M0, FP8, Quantizer
from conformance.judge.expectations import Exact, Verdict, Within
from conformance.judge.fp4_codes import PackedCodes
from conformance.tensors import Tensor

LAYER = 20
EPS = 1e-20
BF16_BYTES = 2


def quantiser(quantizer: Quantizer) -> Callable[[Sizes], Problem]:
    """Codes and scales of bf16 [tokens, width]: a comparison and a division an element."""
    bind, taps = one_method(f"quantize_{quantizer.name}")

    def make(sizes: Sizes) -> Problem:
        require_multiple(sizes, "width", quantizer.group)
        tokens, width = sizes["tokens"], sizes["width"]
        pool = made("quantize/x", "input", POOL, width)
        bounds = lazily(lambda: quantizer.quantize(pool.values()))

        def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
            codes, scales = bounds()
            expected = Exact("scales", Tensor(quantizer.scale.name, scales[which]), ("row", "group"))
            if quantizer is FP8:
                of_codes = Exact("codes", Tensor("F8_E4M3", codes[which]), ("row", "code"))
            else:
                of_codes = PackedCodes("codes", Tensor("U8", pack_fp4(codes[which])), ("row", "byte"))
            return [expected.judge(results), of_codes.judge(results)]

        elements = tokens * width
        code_bytes = elements if quantizer is FP8 else elements // 2
        return Problem(
            (tokens,),
            POOL,
            lambda call, which: {"x": pool[which]},
            judge,
            Counts(2.0 * elements, BF16_BYTES * elements + code_bytes + elements // quantizer.group),
            bind,
            taps,
        )

    return make


quantize_fp8 = quantiser(FP8)
quantize_fp4_e8m0 = quantiser(FP4_E8M0)
quantize_fp4_e4m3 = quantiser(FP4_E4M3)


def _norm_inputs(width: int) -> tuple[Tensor, Tensor]:
    return made("norm/x", "input", POOL, width), made("norm/weight", "norm", width)


def rms_norm(sizes: Sizes) -> Problem:
    """RMSNorm of bf16 [tokens, width]."""
    tokens, width = sizes["tokens"], sizes["width"]
    bind, taps = one_method("rms_norm")
    pool, weight = _norm_inputs(width)
    expected = lazily(lambda: normed(Bounded.exact(pool.values()), weight.values(), EPS))

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("out", expected()[which], "BF16", ("row", "feature")).judge(results)]

    return Problem(
        (tokens,),
        POOL,
        lambda call, which: {"x": pool[which]},
        judge,
        Counts(4.0 * tokens * width, 2 * BF16_BYTES * tokens * width),
        bind,
        taps,
        {"weight": weight, "eps": EPS},
    )


FUSED = "rms_norm_quantize_fp8"
"""A method that a port may have beside the interface's: x, weight, eps -> codes and scales of the rounded norm."""


def _norm_then_quantize(implementation: Implementation, arguments: Arguments) -> Callable[[], Any]:
    fused = getattr(implementation, FUSED, None)
    if fused is not None:
        return lambda: fused(**arguments)
    norm, quantize = implementation.rms_norm, implementation.quantize_fp8
    return lambda: quantize(norm(**arguments))


def norm_quantize(sizes: Sizes) -> Problem:
    """RMSNorm and Q8 of it, of bf16 [tokens, width]: in one call where the port has one, in two otherwise.

    A norm within its bound may fall on either side of a tie.  So the scales must be those of a norm within its bound,
    and codes times scales values that such a norm is quantised to.
    """
    require_multiple(sizes, "width", FP8.group)
    tokens, width = sizes["tokens"], sizes["width"]
    pool, weight = _norm_inputs(width)
    quantised = lazily(lambda: normed(Bounded.exact(pool.values()), weight.values(), EPS).rounded(BF16))
    expected = lazily(lambda: FP8.fake(quantised()))

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        codes, scales = (_as(results[name], dtype) for name, dtype in (("codes", "F8_E4M3"), ("scales", "F8_E8M0")))
        if (codes.dtype, codes.shape[1:]) != ("F8_E4M3", (width,)):
            return [_misformed("codes", codes)]
        if (scales.dtype, scales.shape[1:]) != ("F8_E8M0", (width // FP8.group,)):
            return [_misformed("scales", scales)]
        values = codes.values() * np.repeat(scales.values(), FP8.group, axis=-1)
        dequantised = {"codes": Tensor.from_values(values, "F32")}
        least, most = (end[which] for end in _scales_between(quantised()))
        outside = (scales.data < least) | (scales.data > most)
        of_scales = Verdict("scales", "composed", not outside.any(), outside.size, int(outside.sum()))
        if outside.any():
            of_scales = replace(of_scales, ratio=np.inf, message=f"{of_scales.wrong} scales are of no norm in bounds")
        return [of_scales, Within("codes", expected()[which], "F32", ("row", "feature")).judge(dequantised)]

    elements = tokens * width
    return Problem(
        (tokens,),
        POOL,
        lambda call, which: {"x": pool[which]},
        judge,
        Counts(6.0 * elements, BF16_BYTES * elements + elements + elements // FP8.group),
        _norm_then_quantize,
        ("codes", "scales"),
        {"weight": weight, "eps": EPS},
    )


def _scales_between(values: Bounded) -> tuple[Ints, Ints]:
    """The least and the largest scale code of each group, [rows, groups]."""
    least = FP8.grouped(np.maximum(np.abs(values.value) - values.error, 0.0)).max(-1)
    return FP8.scales(least).astype(np.int64), FP8.scales(FP8.grouped(values.magnitude).max(-1)).astype(np.int64)


def _misformed(tap: str, tensor: Tensor) -> Verdict:
    message = f"wrong shape or dtype: {tensor.dtype} {list(tensor.shape[1:])} a row"
    return Verdict(tap, "composed", False, ratio=np.inf, message=message)


def _as(tensor: Tensor, dtype: str) -> Tensor:
    """Codes under their logical type; anything else as it is."""
    return Tensor(dtype, tensor.data) if tensor.dtype == "U8" else tensor


def compressed_rows(sizes: Sizes) -> Problem:
    """What is written to the compressed cache, of bf16 [1, rows, head_dim]: turned, quantised and back."""
    mapping, config = configured()
    rows, width = sizes["rows"], config.head_dim
    bind, taps = one_method("compressed_rows")
    pool = made("compressed_rows/latent", "input", POOL, width)
    positions = draws("compressed_rows/positions").integers(0, 1 << 20, POOL)
    expected = lazily(lambda: cached(config, LAYER, Bounded.exact(pool.values()[None]), positions[None])[0])

    def judge(results: Mapping[str, Tensor], which: Ints) -> list[Verdict]:
        return [Within("compressed_rows", expected()[which], "BF16", ("row", "feature")).judge(results)]

    return Problem(
        (1, rows),
        POOL,
        lambda call, which: {"latent": pool[which][None], "positions": Tensor("I64", positions[which][None])},
        judge,
        Counts(2.0 * rows * width + 6.0 * rows * config.rope_head_dim, (2 * BF16_BYTES * width + 8) * rows),
        bind,
        taps,
        {"config": mapping, "layer_id": LAYER},
    )
