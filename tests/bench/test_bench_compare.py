"""Slower or not, on recorded samples."""

from __future__ import annotations

import pytest

from conformance.bench.compare import change, parse_allowed
from conformance.bench.results import Times
from conformance.errors import ConformanceError

STEADY = [1.00e-3, 1.01e-3, 0.99e-3, 1.00e-3, 1.02e-3, 1.00e-3]


def times(samples: list[float], factor: float = 1.0) -> Times:
    return Times([factor * sample for sample in samples])


def test_a_slower_kernel_is_flagged() -> None:
    found = change(times(STEADY, 1.2), times(STEADY), 0.1)
    assert found.slower == "1.2 ms, 20.0 % slower than the stored 1 ms; 10 % are allowed"
    assert not found.remark


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.09])
def test_what_is_within_the_allowance_is_not(factor: float) -> None:
    found = change(times(STEADY, factor), times(STEADY), 0.1)
    assert not found.slower
    assert not found.remark


def test_a_disturbed_machine_is_a_remark() -> None:
    """Most samples late, the fastest as fast as before."""
    disturbed = [1.00e-3, 2.0e-3, 2.1e-3, 1.9e-3, 2.5e-3, 3.0e-3]
    found = change(times(disturbed), times(STEADY), 0.1)
    assert not found.slower
    assert "the machine is unsteady" in found.remark


def test_a_slow_kernel_on_a_disturbed_machine_is_flagged() -> None:
    disturbed = [1.00e-3, 2.0e-3, 2.1e-3, 1.9e-3, 2.5e-3, 3.0e-3]
    assert change(times(disturbed, 1.5), times(disturbed), 0.1).slower


def test_quartiles_and_spread() -> None:
    found = Times([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.quartiles, found.fastest) == (3.0, (2.0, 4.0), 1.0)
    assert found.spread == pytest.approx(2 / 3)
    assert Times([2.0]).quartiles == (2.0, 2.0)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("2.5%", 0.025), ("0%", 0.0)])
def test_percentages(text: str, share: float) -> None:
    assert parse_allowed(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["10", "%", "-1%", "ten%", "1e3%", "nan%", "10%%", "99999%"])
def test_what_is_no_percentage(text: str) -> None:
    with pytest.raises(ConformanceError, match="expected a percentage"):
        parse_allowed(text)
