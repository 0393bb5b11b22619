"""A port that differs on purpose: right when it says so and does so, wrong in every other combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.deviations import DEVIATIONS, parse_deviations
from conformance.errors import ConformanceError
from conformance.faults.catalogue import FAULTS
from conformance.faults.deviations import SYNONYMS, DeviatingReference
from conformance.fixtures import Fixtures
from conformance.interface import Description
from conformance.report.records import case_record
from conformance.report.summary import component_rows, verdict_sentence
from conformance.runner import run_case
from conformance.signatures.matcher import explain

SHOWING: Mapping[str, tuple[str, ...]] = {
    "no-activation-quantiser": (
        "linear/lattice-fp8/three-tokens",
        "linear/fp4-weight/one-token",
        "experts/random-weights/every-expert-in-turn",
        "attention/window-only/prefill-2-tokens",
    ),
    "fp32-index-scores": ("indexer/scores/dot-product-rounded", "indexer/scores/weighted-product-rounded"),
}
"""Cases in which a deviation is outside the bounds of those who do not declare it."""

WHOLE = (
    "block/mix-one-sublayer-late-window-only/prefill-2-tokens",
    "model/free-running/prefill-2-tokens",
    "dspark/main-projection/trace",
)
"""What is judged against a recording, in whose place the deviating reference stands."""


class DeclaredOnly(Reference):
    """Says that it deviates, and does not."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def describe(self) -> Description:
        return replace(super().describe(), deviations=(self.name,))


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Case]:
    return {case.id: case for case in catalogue(Fixtures.open(verify=False))}


PAIRS = [(name, case_id) for name, ids in SHOWING.items() for case_id in ids]


@pytest.mark.parametrize(("name", "case_id"), [*PAIRS, *(("no-activation-quantiser", case_id) for case_id in WHOLE)])
def test_a_declared_deviation_conforms(cases: Mapping[str, Case], name: str, case_id: str) -> None:
    result = run_case(cases[case_id], DeviatingReference([name]))
    assert result.status == "PASS"
    assert result.deviations == (name,)


@pytest.mark.parametrize(("name", "case_id"), PAIRS)
def test_an_undeclared_deviation_fails_and_is_named(cases: Mapping[str, Case], name: str, case_id: str) -> None:
    port = DeviatingReference([name], declares=False)
    assert run_case(cases[case_id], port).status == "FAIL"
    found = explain([(cases[case_id], 0.0)], port, 120.0)[case_id]
    best = {entry.match.candidate.name for entry in found if entry.rank == 1}
    related = {"activation-not-quantised", "dot-not-rounded", "weighted-not-rounded"}
    assert name in best or {entry.match.candidate.flag for entry in found if entry.rank == 1} <= related
    assert name not in best or not best & set(SYNONYMS[name])


def test_only_the_deviation_is_named_where_a_known_mistake_is_the_same(cases: Mapping[str, Case]) -> None:
    case = cases["norm/rms-vectors/fp32-weight"]
    port = DeviatingReference(["norm-rounded-before-weight"], declares=False)
    assert run_case(case, port).status == "FAIL"
    found = explain([(case, 0.0)], port, 120.0)[case.id]
    assert [entry.match.candidate.name for entry in found] == ["norm-rounded-before-weight"]


def test_what_is_the_same_as_a_deviation_is_in_the_catalogue() -> None:
    known = {fault.id for fault in FAULTS}
    assert all(set(faults) <= known for faults in SYNONYMS.values())
    assert SYNONYMS.keys() <= DEVIATIONS.keys()


@pytest.mark.parametrize(("name", "case_id"), PAIRS)
def test_a_deviation_declared_but_not_done_fails_and_is_named(
    cases: Mapping[str, Case], name: str, case_id: str
) -> None:
    port = InProcess(DeclaredOnly(name))
    assert run_case(cases[case_id], port).status == "FAIL"
    found = explain([(cases[case_id], 0.0)], port, 120.0)[case_id]
    assert ("declared deviation", name) in {(e.match.candidate.kind, e.match.candidate.name) for e in found}


def test_probabilities_in_fp32_are_nearer_than_required_and_held_to_it(cases: Mapping[str, Case]) -> None:
    """Undeclared they pass; declared, rounding them is a failure."""
    case = cases["sparse_attention/sink-and-listed-rows/prefill-several-windows"]
    name = "fp32-probabilities"
    assert run_case(case, DeviatingReference([name], declares=False)).status == "PASS"
    assert run_case(case, DeviatingReference([name])).status == "PASS"
    assert run_case(case, InProcess(DeclaredOnly(name))).status == "FAIL"


def test_what_a_deviation_does_not_touch_is_judged_as_always(cases: Mapping[str, Case]) -> None:
    result = run_case(cases["norm/rms/block-inputs"], DeviatingReference(["no-activation-quantiser"]))
    assert (result.status, result.deviations) == ("PASS", ())


def test_the_verdict_names_the_deviations(cases: Mapping[str, Case]) -> None:
    ids = ("norm/rms/block-inputs", "linear/lattice-fp8/three-tokens")
    port = DeviatingReference(["no-activation-quantiser"])
    records = [case_record(run_case(cases[case_id], port), "") for case_id in ids]
    sentence = verdict_sentence(records, 2, "fp32", ("no-activation-quantiser",))
    assert sentence == "conforms with declared deviations: no-activation-quantiser; 2 of 2 supported cases passed"
    assert [row.verdict for row in component_rows(records)] == ["conforms", "deviates"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[a]\nwords = 'x'\nspec = 'y'", "exactly"),
        ("[a]\nwords = ''\nspec = 'y'\nown_noise = false\nmethods = ['norm']", "words"),
        ("[a]\nwords = 'x'\nspec = 'y'\nown_noise = 0\nmethods = ['rms_norm']", "own_noise"),
        ("[a]\nwords = 'x'\nspec = 'y'\nown_noise = false\nmethods = ['normalise']", "normalise"),
        ("[a", "deviations.toml"),
    ],
)
def test_a_faulty_list_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConformanceError, match=what):
        parse_deviations(text)


def test_every_deviation_touches_something() -> None:
    assert all(known.methods for known in DEVIATIONS.values())
