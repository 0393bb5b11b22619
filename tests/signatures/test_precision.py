"""The matcher's precision: faults of the catalogue are named, whoever adds in another order; unlisted mistakes are not.

Samples of both; steps of 1 try all.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from unlisted_mistakes import UNLISTED

from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.cases.durations import durations
from conformance.faults.catalogue import FAULTS
from conformance.faults.deviations import SYNONYMS, DeviatingReference
from conformance.faults.fault import Fault
from conformance.faults.honest.variant import HonestVariant
from conformance.faults.patches import Change
from conformance.fixtures import Fixtures
from conformance.runner import run_case
from conformance.signatures.matcher import FoundMatch, explain

FIRST, EVERY = 48, 100
"""Faults of the catalogue that are tried."""
EVERY_UNLISTED = 6
PLENTY = 600.0
"""Seconds: no test may depend on how much can be tried in a time."""
CHEAP = 0.5
"""Seconds that a case takes the reference, at most."""
TRIED, FAILED = 14, 2

SAME_VALUES: dict[str, set[str]] = {
    "norm/eps-of-another-model": {"norm/mean-over-one-less"},
    "norm/first-feature-not-counted": {"norm/last-feature-not-counted"},
    "indexer/two-too-many-visible": {"indexer/causality-missing"},
}
"""What an unlisted mistake may be named: the faults give its values to the last element in the cases at hand."""


def port(change: Change) -> DeviatingReference:
    """The reference with a mistake, in fp64: its last bits are not those of the reference with the mistake."""
    return DeviatingReference([], variant=HonestVariant("planted", "", {"compute": torch.float64}, (change,)))


@cache
def cheap_cases() -> tuple[Case, ...]:
    took = durations()
    cases = catalogue(Fixtures.open(verify=False))
    return tuple(case for case in cases if case.level != "full" and took.get(case.id, 0.0) <= CHEAP)


def explained(change: Change, component: str, flag: str = "") -> dict[str, tuple[FoundMatch, ...]]:
    """What the first failed cases of a component are explained by; those whose flags name the mistake come first."""
    session = port(change)
    cases = [case for case in cheap_cases() if case.component == component]
    failed: list[tuple[Case, float]] = []
    for case in sorted(cases, key=lambda case: flag not in case.flags)[:TRIED]:
        if len(failed) < FAILED and run_case(case, session).status == "FAIL":
            failed.append((case, 0.0))
    if not failed:
        pytest.skip("no cheap case of its component shows it")
    found = explain(failed, session, PLENTY)
    return {case.id: found.get(case.id, ()) for case, _ in failed}


@pytest.mark.parametrize("fault", FAULTS[FIRST::EVERY], ids=lambda fault: fault.id)
def test_a_fault_of_the_catalogue_is_named(fault: Fault) -> None:
    deviations = {name for name, faults in SYNONYMS.items() if fault.id in faults}
    for case_id, found in explained(fault.change, fault.component, fault.flag).items():
        best = {entry.match.candidate.name for entry in found if entry.rank == 1}
        assert best & {fault.id, *deviations}, case_id


@pytest.mark.parametrize("name", list(UNLISTED)[::EVERY_UNLISTED])
def test_an_unlisted_mistake_is_not_named(name: str) -> None:
    for case_id, found in explained(UNLISTED[name], name.partition("/")[0]).items():
        best = {entry.match.candidate.name for entry in found}
        assert best <= SAME_VALUES.get(name, set()), case_id
