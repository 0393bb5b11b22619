"""Many failures are brought down to the places where the mistakes are."""

from __future__ import annotations

import pytest
from made_reports import record

from conformance.fixtures import STATE, TAPS
from conformance.interface import COMPONENTS, METHODS
from conformance.report.causes import MADE_OF, diagnose
from conformance.report.records import CaseRecord, MatchRecord


def titles(records: list[CaseRecord]) -> list[str]:
    return [cause.title for cause in diagnose(records).causes]


def test_what_follows_from_a_wrong_result_is_no_cause() -> None:
    records = [
        record("rotary/pairs/a", "FAIL"),
        record("window/rows/a", "FAIL", tap="window_rows"),
        record("attention/plain/a", "FAIL", tap="attn_out"),
        record("block/plain/a", "FAIL", tap="h_out"),
        record("model/run/a", "FAIL", tap="layer3/window"),
        record("norm/rms/a"),
    ]
    diagnosis = diagnose(records)
    assert titles(records) == ["rotary"]
    assert [(c.component, c.tap) for c in diagnosis.consequences] == [
        ("window", "window_rows"),
        ("attention", "attn_out"),
        ("block", "h_out"),
        ("model", "layer3/window"),
    ]
    assert all(consequence.may_follow_from == ("rotary",) for consequence in diagnosis.consequences)


def test_a_second_mistake_in_a_component_that_uses_a_wrong_one_is_a_cause() -> None:
    """Pooled latents are not turned, rows are: of the compressor's failures only one can come from the rotation."""
    records = [
        record("rotary/pairs/a", "FAIL"),
        record("compressor/rows/a", "FAIL", tap="compressed_rows"),
        record("compressor/carry/a", "FAIL", tap="latent"),
    ]
    assert titles(records) == ["rotary", "compressor"]
    (consequence,) = diagnose(records).consequences
    assert (consequence.tap, consequence.may_follow_from) == ("compressed_rows", ("rotary",))


def test_every_failure_has_one_place() -> None:
    names = [f"{component}/case/{number}" for component in COMPONENTS for number in range(3)]
    records = [record(name, "FAIL", tap=tap) for name, tap in zip(names, [*TAPS, *STATE, "out"] * 3, strict=False)]
    diagnosis = diagnose(records)
    placed = [r.id for group in (*diagnosis.causes, *diagnosis.consequences) for r in group.records]
    assert sorted(placed) == sorted(names)
    assert diagnosis.causes
    assert all(consequence.may_follow_from for consequence in diagnosis.consequences)


def test_failures_that_end_alike_are_one_cause() -> None:
    records = [
        record("norm/rms/a", "CRASH", message="RuntimeError: out of memory at 0x7f00, 12 bytes"),
        record("gate/rms/b", "CRASH", message="RuntimeError: out of memory at 0x8f00, 345 bytes"),
        record("gate/rms/c", "TIMEOUT", message="no answer within 5 s"),
    ]
    assert [len(cause.records) for cause in diagnose(records).causes] == [2, 1]


@pytest.mark.parametrize("status", ["PASS", "XFAIL", "UNSUPPORTED", "QUARANTINE", "BROKEN", "XPASS"])
def test_only_failures_have_causes(status: str) -> None:
    assert not diagnose([record("norm/rms/a", status)]).causes


def test_the_mistake_whose_cases_all_fail_is_suspected_first() -> None:
    """Rather than one that more failures name, when passes deny it."""
    records = [
        *(record(f"norm/rms/{n}", "FAIL", flags=("eps", "mean")) for n in range(2)),
        record("norm/rms/2", "FAIL", flags=("eps",)),
        *(record(f"norm/rms/{n}", flags=("eps",)) for n in range(3, 11)),
    ]
    (cause,) = diagnose(records).causes
    assert [(s.flag, s.failed, s.passed) for s in cause.suspects] == [("mean", 2, 0), ("eps", 3, 8)]
    assert cause.of_cases == 11


def test_the_fewest_matches_that_account_for_the_failures() -> None:
    def match(name: str, rank: int = 1) -> MatchRecord:
        return MatchRecord("fault", name, f"flag-{name}", f"It is {name}.", rank, 3, 3, 0.0)

    records = [
        record("gate/x/0", "FAIL", matched=(match("a"), match("b"), match("c", rank=2))),
        record("gate/x/1", "FAIL", matched=(match("b"), match("c", rank=2))),
        record("gate/x/2", "FAIL", matched=(match("c"),)),
        record("gate/x/3", "FAIL"),
    ]
    (cause,) = diagnose(records).causes
    assert [(found.best.name, found.cases) for found in cause.matches] == [("b", 2), ("c", 1)]
    assert cause.records[0].id in ("gate/x/0", "gate/x/1")


def test_what_results_are_made_of_exists() -> None:
    """Names that no component has would silently explain nothing."""
    taps = {*TAPS, *STATE, *(name for method in METHODS.values() for name in method.results)}
    for name in {*MADE_OF, *(part for parts in MADE_OF.values() for part in parts)}:
        component, _, tap = name.partition("/")
        assert component in COMPONENTS, name
        assert not tap or tap in taps, name


def test_nothing_is_made_of_itself() -> None:
    def parts(name: str) -> set[str]:
        component = name.partition("/")[0]
        return set(MADE_OF.get(name, MADE_OF.get(component, ())))

    for name in MADE_OF:
        ahead, seen = parts(name), set()
        while ahead:
            part = ahead.pop()
            assert part != name
            if part not in seen:
                seen.add(part)
                ahead |= parts(part)
