"""Mode `propagated`: blocks, groups of layers and whole models.

Through several components an error cannot be bounded usefully term by term, so the allowance is a noise floor: how far
honest variants of the reference were seen from the recorded trace.  It is measured, not derived, and every verdict
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from conformance.judge.bounded import Floats
from conformance.judge.expectations import Axes, Mode, Verdict, bits_of, first_index, formed
from conformance.tensors import Tensor


def relative_distance(got: Floats, expected: Floats) -> float:
    """Euclidean distance over the expected tensor's norm; 0 for two zeros, NaN if anything is NaN."""
    norm = float(np.linalg.norm(expected))
    distance = float(np.linalg.norm(got - expected))
    return distance / norm if norm else (0.0 if distance == 0.0 else float("inf"))


@dataclass(frozen=True)
class Propagated:
    """Relative distance of the whole tensor from the recorded one, at most `floor`."""

    tap: str
    recorded: Tensor
    floor: float
    origin: str
    """Where the floor comes from, shown in the report."""
    axes: Axes

    mode: Mode = "propagated"

    @property
    def taps(self) -> tuple[str, ...]:
        """The one tap judged."""
        return (self.tap,)

    @property
    def golden(self) -> Mapping[str, Tensor]:
        """The recorded value."""
        return {self.tap: self.recorded}

    def judge(self, results: Mapping[str, Tensor]) -> Verdict:
        """Distance over floor; NaN or infinity anywhere else than in the recording fails."""
        actual = formed(self.tap, self.mode, results[self.tap], self.recorded.dtype, self.recorded.shape)
        if isinstance(actual, Verdict):
            return actual
        got, expected = actual.values(), self.recorded.values()
        note = f"allowance measured, not derived: {self.origin}"
        if not got.size:
            return Verdict(self.tap, self.mode, True, axes=self.axes, note=note)
        unusual = np.isfinite(got) != np.isfinite(expected)
        if unusual.any():
            index = first_index(unusual)
            return Verdict(
                self.tap,
                self.mode,
                False,
                got.size,
                int(unusual.sum()),
                np.inf,
                index,
                self.axes,
                float(got[index]),
                float(expected[index]),
                self.floor,
                bits_of(actual, index),
                bits_of(self.recorded, index),
                message=f"{int(unusual.sum())} of {got.size} elements are not finite",
                note=note,
            )
        distance = relative_distance(got, expected)
        ratio = distance / self.floor if self.floor else (0.0 if distance == 0.0 else float("inf"))
        index = first_index(np.abs(got - expected) == np.abs(got - expected).max())
        passed = ratio <= 1.0
        return Verdict(
            self.tap,
            self.mode,
            passed,
            got.size,
            0 if passed else int((got != expected).sum()),
            ratio,
            index,
            self.axes,
            float(got[index]),
            float(expected[index]),
            self.floor,
            bits_of(actual, index),
            bits_of(self.recorded, index),
            message="" if passed else f"relative distance {distance:.3g} beyond the noise floor {self.floor:.3g}",
            note=note,
        )
