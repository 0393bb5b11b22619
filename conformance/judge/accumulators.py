"""How an implementation sums the products of 8- and 4-bit operands: a declared property, because it decides the bound.

The specification asks for fp32.  Tensor cores of some chips sum FP8 products in fewer bits; a port that uses them says
so in its description, is judged by the wider bound, and its verdict names the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from conformance.interface import AccumulatorName


@dataclass(frozen=True)
class Accumulator:
    """`roundoff` relative error of one addition; sums of `chunk` terms are promoted to fp32 (0: only the final one)."""

    roundoff: float
    chunk: int
    truncates: bool
    """Additions round towards zero, so that errors lean to one side and are not tested for a bias."""
    source: str

    def error(self, count: int) -> float:
        """Error of a sum of `count` products as a multiple of the sum of their absolute values.

        The rule of `sum_roundoff` for the terms of one chunk, and fp32's for the sum of the chunks.  Truncations all
        lean to one side and add up, so no square root is taken there.
        """
        fp32 = ACCUMULATORS["fp32"].roundoff
        terms = min(count, self.chunk) if self.chunk else count
        within = float(min(terms, 16)) if self.truncates else min(float(terms), max(16.0, float(np.sqrt(terms))))
        chunks = -(-count // terms)
        between = 0.0 if chunks == 1 else fp32 * min(float(chunks), max(16.0, float(np.sqrt(chunks))))
        return self.roundoff * within + between


ACCUMULATORS: Mapping[AccumulatorName, Accumulator] = {
    "fp32": Accumulator(2.0**-24, 0, False, "numerics.md 3"),
    "fp8-tensor-core": Accumulator(
        2.0**-13,
        128,
        True,
        "model of Hopper's FP8 instructions: operands aligned to 14 bits and cut off, promoted every 128 terms as "
        "DeepSeek-V3's report describes; not measured on a device",
    ),
    "fp16": Accumulator(2.0**-11, 0, False, "IEEE half precision: 11 significant bits"),
}

_current: ContextVar[AccumulatorName] = ContextVar("accumulator", default="fp32")


def current() -> Accumulator:
    """The accumulator of the implementation that is being judged."""
    return ACCUMULATORS[_current.get()]


@contextmanager
def judging(name: AccumulatorName) -> Iterator[None]:
    """Judge by the accumulator of this name while the context lasts."""
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)
