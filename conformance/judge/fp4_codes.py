"""Packed FP4 codes, and the one convention that an implementation may declare for them: what becomes of -0.

The specification keeps the sign of a value that rounds to zero from below, code 8; some ports clear it. Values are the
same and bytes are not, so whoever clears it says so and is then judged as exactly, with code 0 in place of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import numpy as np

from conformance.formats import pack_fp4, unpack_fp4
from conformance.judge.expectations import Exact, Verdict
from conformance.tensors import Tensor

CONVENTION = "negative-zero-code"
KEPT, CLEARED = VALUES = ("kept", "cleared")
NEGATIVE_ZERO = 8

_current: ContextVar[str] = ContextVar(CONVENTION, default=KEPT)


@contextmanager
def judging(conventions: Mapping[str, str]) -> Iterator[None]:
    """Judge by these declared conventions while the context lasts."""
    token = _current.set(conventions.get(CONVENTION, KEPT))
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class PackedCodes(Exact):
    """Mode `exact` for packed FP4, U8 [..., K/2]; `expected` keeps the sign of zeros, as the specification does."""

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Every byte equal, under the declared convention."""
        codes = unpack_fp4(self.expected.data)
        cleared = Tensor("U8", pack_fp4(np.where(codes == NEGATIVE_ZERO, 0, codes)))
        by_convention = {KEPT: self.expected, CLEARED: cleared}
        declared = _current.get()
        verdicts = {
            name: Exact(self.tap, expected, self.axes, self.note).judge(results)
            for name, expected in by_convention.items()
        }
        other = CLEARED if declared == KEPT else KEPT
        if verdicts[declared].passed or not verdicts[other].passed:
            return verdicts[declared]
        hint = f'all of them codes of -0, which are {other}: conventions={{"{CONVENTION}": "{other}"}} declares that'
        return replace(verdicts[declared], message=f"{verdicts[declared].message}, {hint}")
