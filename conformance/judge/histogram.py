"""How errors are spread under their bounds: counts of elements by error over bound, in powers of two.

A worst element says whether a result is right; the whole spread says how: rounding fills the bins evenly up to 1, a
wrong rule leaves a tail beyond it, and an element whose bound is open says nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.judge.bounded import Floats

SMALLEST, LARGEST = -8, 8
EDGES: tuple[str, ...] = ("0", *(f"{2.0**power:g}" for power in range(SMALLEST, LARGEST + 1)), "inf")
"""Upper ends of the bins: an element with error/bound in (0.25, 0.5] counts in bin "0.5", one without any error in
"0", and infinities and NaN in "inf"."""
UPPER_ENDS = np.array([0.0, *(2.0**power for power in range(SMALLEST, LARGEST + 1))])
"""Of all bins but the last."""
OPEN = "open"
"""The bin of elements for which every value is allowed."""

Histogram = Mapping[str, int]


def histogram(ratio: Floats, open_elements: int = 0) -> Histogram:
    """Counts of error/bound by bin, empty bins left out.

    `open_elements` of the elements, whose ratio is 0, had no bound.
    """
    # NaN is sorted behind everything, into the last bin.
    bins = np.searchsorted(UPPER_ENDS, ratio.ravel())
    counts = dict(zip(EDGES, np.bincount(bins, minlength=len(EDGES)).tolist(), strict=True))
    counts["0"] -= open_elements
    counts[OPEN] = open_elements
    return {edge: count for edge, count in counts.items() if count}


def of_equality(count: int, wrong: int) -> Histogram:
    """The same where no error is allowed: right or infinitely wrong."""
    return {edge: number for edge, number in (("0", count - wrong), ("inf", wrong)) if number}


def combined(first: Histogram, second: Histogram) -> Histogram:
    """Both counted together."""
    return {
        edge: first.get(edge, 0) + second.get(edge, 0) for edge in (*EDGES, OPEN) if edge in first or edge in second
    }
