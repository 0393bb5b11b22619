"""Linear layers (numerics.md 3) on values with error bounds, before their output rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from conformance.formats import E2M1, E8M0, unpack_fp4
from conformance.judge import accumulators, deviations
from conformance.judge.bounded import Bounded, Floats, concatenate, dot, sum_roundoff
from conformance.judge.components.quantize import FP8
from conformance.lazy import LazyTensors
from conformance.tensors import Tensor

PIECE = 1 << 22
"""Weight elements multiplied at a time: bounds the temporaries of a product by 32 MiB each."""


class Parameters:
    """Decoded weights of a unit: `[name]` gives exact float64 values, FP8 and FP4 matrices dequantised.

    Decoded values are kept, except those of `LazyTensors`, which are too large for that.  Mappings handed to
    implementations are always kept: an adapter may recognise a unit's weights by the identity of the mapping and
    convert them once.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._prefix = ""
        self._decoded: dict[str, Floats] = {}
        self._mappings: dict[str, Mapping[str, Tensor]] = {}

    def within(self, prefix: str) -> Parameters:
        """The parameters of a part, by the names relative to it."""
        part = Parameters(self._tensors)
        part._prefix = self._prefix + prefix
        part._decoded, part._mappings = self._decoded, self._mappings
        return part

    def tensor(self, name: str) -> Tensor:
        """The stored tensor."""
        return self._tensors[self._prefix + name]

    def rows(self, name: str, rows: npt.NDArray[np.int64]) -> Tensor:
        """Rows [...] of a stored matrix: [..., K].  Engram's tables are too large to be made whole."""
        if isinstance(self._tensors, LazyTensors):
            return self._tensors.rows(self._prefix + name, rows)
        return self.tensor(name)[rows]

    def mapping(self) -> Mapping[str, Tensor]:
        """All stored tensors of the unit by their relative names; the same object every time."""
        if self._prefix not in self._mappings and isinstance(self._tensors, LazyTensors):
            self._mappings[self._prefix] = self._tensors.within(self._prefix)
        if self._prefix not in self._mappings:
            n = len(self._prefix)
            names = [name for name in self._tensors if name.startswith(self._prefix)]
            self._mappings[self._prefix] = {name[n:]: self._tensors[name] for name in names}
        return self._mappings[self._prefix]

    def __getitem__(self, name: str) -> Floats:
        if isinstance(self._tensors, LazyTensors):
            return self._decode(name)
        full = self._prefix + name
        if full not in self._decoded:
            self._decoded[full] = self._decode(name)
        return self._decoded[full]

    def _decode(self, name: str) -> Floats:
        stored = self.tensor(name)
        if stored.dtype == "F8_E4M3":
            scale = E8M0.decode(self.tensor(name.removesuffix("weight") + "scale").data)
            return fp8_weight(stored.values(), scale)
        if stored.dtype == "U8":
            scale = E8M0.decode(self.tensor(name.removesuffix("weight") + "scale").data)
            return fp4_weight(E2M1.decode(unpack_fp4(stored.data)), scale)
        return stored.values()

    def exact(self, name: str) -> Bounded:
        """The decoded values as exact bounded values."""
        return Bounded.exact(self[name])


def fp8_weight(values: Floats, scale: Floats) -> Floats:
    """Decoded codes [N, K] times one scale per 32x32 tile, the last tiles partly filled; in place."""
    for tile_row, scales in enumerate(scale):
        values[32 * tile_row : 32 * tile_row + 32] *= np.repeat(scales, 32)[: values.shape[1]]
    return values


def fp4_weight(values: Floats, scale: Floats) -> Floats:
    """Decoded codes [N, K] times one scale per row and 32 inputs; in place."""
    values.reshape(*scale.shape, 32)[...] *= scale[..., None]
    return values


def quantized(x: Bounded, weight: Floats) -> Bounded:
    """FP8 or FP4 weights: Q8 of the input, then the product sum.

    The products are exact in fp32 and the scales are powers of two: only the order of the sum is free.  So are those
    of an input that a declared deviation leaves in bf16.
    """
    codes = x if deviations.active("no-activation-quantiser") else FP8.fake(x)
    return product(codes, weight, accumulators.current().error)


def lattice_holds() -> bool:
    """Whether hand-made FP8 and FP4 operands are a lattice, on which every order of the sum gives the same bits.

    They are one of quantised inputs and fp32 sums: whoever declares another accumulator, or that inputs are not
    quantised, is judged by the bound instead.
    """
    fp32 = accumulators.current() is accumulators.ACCUMULATORS["fp32"]
    return fp32 and not deviations.active("no-activation-quantiser")


def product(x: Bounded, weight: Floats, sum_error: Callable[[int], float] = sum_roundoff) -> Bounded:
    """x [..., K] times weight [N, K] transposed, summed in fp32 unless another accumulator's error is given."""
    flat = x.reshape(-1, x.shape[-1])
    step = max(1, PIECE // weight.shape[1])
    pieces = [
        dot(flat, Bounded.exact(weight[start : start + step]), sum_error) for start in range(0, weight.shape[0], step)
    ]
    return concatenate(pieces, 1).reshape(*x.shape[:-1], weight.shape[0])
