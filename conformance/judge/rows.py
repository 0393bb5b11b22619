"""Rules for some of the positions only: recordings at the released widths keep few rows of a long prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.judge.expectations import Expectation, Mode, Verdict
from conformance.tensors import Tensor

POSITION_AXIS = 1


@dataclass(frozen=True)
class OfRows:
    """Apply `rule` to the positions `rows` of results [B, T, ...] with T = `length`."""

    rule: Expectation
    rows: Sequence[int]
    length: int

    @property
    def taps(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self.rule.taps

    @property
    def mode(self) -> Mode:
        """That of the rule."""
        return self.rule.mode

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """What is recorded, in its rows of a full tensor; the others, which nobody judges, are zero."""
        return {tap: self._spread(tensor) for tap, tensor in self.rule.golden.items()}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The rule's verdict on these rows; its indices count among them."""
        picked = {}
        for tap in self.taps:
            tensor = results[tap]
            if len(tensor.shape) <= POSITION_AXIS or tensor.shape[POSITION_AXIS] != self.length:
                message = f"wrong shape {list(tensor.shape)}, expected {self.length} positions on axis {POSITION_AXIS}"
                return Verdict(tap, self.mode, False, message=message)
            picked[tap] = tensor[:, list(self.rows)]
        return self.rule.judge(picked)

    def _spread(self, tensor: Tensor) -> Tensor:
        full = np.zeros((tensor.shape[0], self.length, *tensor.shape[POSITION_AXIS + 1 :]), dtype=tensor.data.dtype)
        full[:, list(self.rows)] = tensor.data
        return Tensor(tensor.dtype, full)


@dataclass(frozen=True)
class OfRequest:
    """Apply `rule`, which is for a batch of one, to the row `request` of results [B, ...] with B = `batch`."""

    rule: Expectation
    request: int
    batch: int

    @property
    def taps(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self.rule.taps

    @property
    def mode(self) -> Mode:
        """That of the rule."""
        return self.rule.mode

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """What is recorded, repeated for every row."""
        return {tap: Tensor(t.dtype, np.repeat(t.data, self.batch, axis=0)) for tap, t in self.rule.golden.items()}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """The rule's verdict on this row; the request in its index is 0."""
        picked = {}
        for tap in self.taps:
            tensor = results[tap]
            if not tensor.shape or tensor.shape[0] != self.batch:
                message = f"wrong shape {list(tensor.shape)}, expected {self.batch} requests"
                return Verdict(tap, self.mode, False, ratio=np.inf, message=message)
            picked[tap] = tensor[self.request : self.request + 1]
        return self.rule.judge(picked)
