"""The expected sum of a token's experts."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.cases.traces import GoldenModel
from conformance.fixtures import Fixtures
from conformance.judge.bounded import Bounded
from conformance.judge.components.experts import combined


@pytest.mark.parametrize("listed", [[[2, 2]], [[2, 2], [1, 2]]])
def test_an_expert_that_is_listed_twice_counts_twice(listed: list[list[int]]) -> None:
    golden = GoldenModel(Fixtures.open(verify=False).model("tiny"))
    weights = golden.parameters.within("layers.0.ffn.")
    rows = np.random.default_rng(0).integers(-8, 8, (len(listed), golden.config.dim)) / 4
    routing = np.full((len(listed), 2), 0.5)

    def of(indices: list[list[int]], weight: float) -> np.ndarray:
        chosen = Bounded.exact(routing[:, : len(indices[0])] * weight)
        return combined(golden.config, weights, Bounded.exact(rows), chosen, np.array(indices)).value

    twice = of(listed, 1.0)
    # The shared experts count once in each sum.
    none = of([row[:1] for row in listed], 0.0)
    apart = sum(of([[row[slot]] for row in listed], 1.0) - none for slot in (0, 1))
    assert np.allclose(twice, none + apart, rtol=0, atol=1e-12 * np.abs(twice).max())
    assert not np.allclose(twice, of([row[:1] for row in listed], 1.0))
