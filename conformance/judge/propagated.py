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
from conformance.judge.noise import Distance, allowed
from conformance.tensors import Tensor


def relative_distances(got: Floats, expected: Floats) -> Floats:
    """Euclidean distance over the expected norm, along the last axis; 0 for two zeros, infinity for a zero expected."""
    norm, distance = np.linalg.norm(expected, axis=-1), np.linalg.norm(got - expected, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Floats = np.where(distance == 0.0, 0.0, distance / norm)
    return result


def norm_ratio(got: Floats, expected: Floats) -> float:
    """|log2| of the norms' ratio; 0 for two zeros, infinity where only one is zero."""
    norms = float(np.linalg.norm(got)), float(np.linalg.norm(expected))
    if norms[0] == norms[1]:
        return 0.0
    return abs(float(np.log2(norms[0] / norms[1]))) if all(norms) else np.inf


@dataclass(frozen=True)
class Propagated:
    """Relative distance of the whole tensor from the recorded one, at most `allowance.largest`.

    A single honest tie can move one call far, so over a whole case the median of the positions' distances is judged
    too, by `allowance.median`: a mistake in every position shows there.  Where the allowance is so wide that zeros are
    within it, the norm still tells: it may change by a factor of 2^`allowance.scale`.
    """

    tap: str
    recorded: Tensor
    allowance: Distance
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
        allowance = allowed(self.tap, self.allowance)
        origin = self.origin if allowance == self.allowance else "measured in this run with the declared deviations"
        note = f"allowance measured, not derived: {origin}"
        got, expected = actual.values(), self.recorded.values()
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
                allowance.largest,
                bits_of(actual, index),
                bits_of(self.recorded, index),
                message=f"{int(unusual.sum())} of {got.size} elements are not finite",
                note=note,
            )
        distance = float(relative_distances(got.reshape(-1), expected.reshape(-1)))
        ratio = distance / allowance.largest
        positions = 2 if "position" in self.axes or "row" in self.axes else 1
        rows = (*got.shape[:positions], -1)
        index = first_index(np.abs(got - expected) == np.abs(got - expected).max())
        scale = norm_ratio(got, expected)
        wrong_scale = scale > allowance.scale
        passed = ratio <= 1.0 and not wrong_scale
        message = ""
        if ratio > 1.0:
            message = f"relative distance {distance:.3g}, noise floor {allowance.largest:.3g}"
        elif wrong_scale:
            message = f"the norm is off by 2^{scale:.3g}, noise reaches 2^{allowance.scale:.3g}"
        return Verdict(
            self.tap,
            self.mode,
            passed,
            got.size,
            0 if passed else int((got != expected).sum()),
            max(ratio, scale / allowance.scale) if wrong_scale else ratio,
            index,
            self.axes,
            float(got[index]),
            float(expected[index]),
            allowance.largest,
            bits_of(actual, index),
            bits_of(self.recorded, index),
            message=message,
            note=note,
            distances=tuple(relative_distances(got.reshape(rows), expected.reshape(rows)).reshape(-1).tolist()),
            median_allowance=allowance.median,
            scale=scale,
        )
