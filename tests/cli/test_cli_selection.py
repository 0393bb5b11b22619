"""Selecting cases: the `-k` language and shards."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from cli_ports import CASES, GOOD_CASES
from cli_runs import Run
from hypothesis import given, strategies as st

from conformance.cases import catalogue
from conformance.cases.durations import durations
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures
from conformance.selection import Selection, parse_expression, select, shard

IDS = ("rotary/pairs/position-1", "rotary/pairs/position-10", "rotary/yarn/long", "Gate/ties/none", "norm/eps/zero")


def chosen(expression: str) -> list[int]:
    matches = parse_expression(expression, IDS)
    return [number for number, case_id in enumerate(IDS) if matches(case_id)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("rotary", [0, 1, 2]),
        ("ROTARY", [0, 1, 2]),
        ("gate", [3]),
        ("rotary and not yarn", [0, 1]),
        ("not rotary", [3, 4]),
        ("not not rotary", [0, 1, 2]),
        ("norm or gate", [3, 4]),
        ("norm or rotary and yarn", [2, 4]),
        ("(norm or rotary) and (yarn or eps)", [2, 4]),
        ("not (rotary or gate)", [4]),
        ("rotary/pairs/position-1", [0]),
        ("rotary/pairs/position-1 or yarn", [0, 2]),
        ("pairs/position-1", [0, 1]),
        ("position-1)", None),
        ("(rotary", None),
        ("rotary yarn", None),
        ("and", None),
        ("rotary or", None),
        ("not", None),
        ("", None),
        ("()", None),
        ("(" * 100_000, None),
        ("(" * 100_000 + "rotary" + ")" * 100_000, None),
    ],
)
def test_expression(expression: str, expected: list[int] | None) -> None:
    if expected is not None:
        assert chosen(expression) == expected
        return
    with pytest.raises(ConformanceError, match=r"^-k ") as error:
        chosen(expression)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text(alphabet="ab() \n\"'/noradt", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ConformanceError):
        assert parse_expression(text, IDS)(IDS[0]) in (True, False)


ids = st.sampled_from([case.id for case in CASES])


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@given(st.dictionaries(ids, st.floats(0, 1e3)))
def test_shards_cover_everything_once_in_order(parts: int, seconds: dict[str, float]) -> None:
    found = [[case.id for case in shard(GOOD_CASES, f"{part + 1}/{parts}", seconds)] for part in range(parts)]
    order = [case.id for case in GOOD_CASES]
    assert sorted(itertools.chain(*found)) == sorted(order)
    assert all(part and part == sorted(part, key=order.index) for part in found)


def test_shards_are_balanced_by_time() -> None:
    long, *short = (case.id for case in GOOD_CASES)
    seconds = {long: 3.0, **dict.fromkeys(short, 1.0)}
    assert [case.id for case in shard(GOOD_CASES, "1/2", seconds)] == [long]
    assert [case.id for case in shard(GOOD_CASES, "2/2", seconds)] == short


def test_a_case_without_a_duration_counts_as_the_median() -> None:
    first, second, third, unknown = (case.id for case in GOOD_CASES)
    seconds = {first: 1.0, second: 4.0, third: 9.0}
    # 9 | 4 (known) + 4 (the median) + 1
    assert [case.id for case in shard(GOOD_CASES, "2/2", seconds)] == [first, second, unknown]


def test_shipped_durations_are_of_cases_of_the_catalogue(shipped: Fixtures) -> None:
    known = {case.id for case in catalogue.catalogue(shipped)}
    assert durations().keys() <= known, "make them anew: `conformance durations REPORT --out conformance/cases/...`"
    assert len(durations()) > len(known) / 2


@pytest.mark.parametrize("text", ["", "1", "1/", "0/2", "3/2", "-1/2", "1/2/3", "a/b", "1/0", "١/٢"])
def test_bad_shard(text: str) -> None:
    with pytest.raises(ConformanceError, match=r"^--shard"):
        shard(GOOD_CASES, text, {})


def test_levels_are_cumulative() -> None:
    counts = [len(select(CASES, Selection(level))) for level in ("smoke", "core", "full")]
    assert counts == [1, 5, 6]


def test_set_is_a_whole_name() -> None:
    assert [case.id for case in select(CASES, Selection("full", set_name="tiny"))] == ["quantize/identity/rows-1"]
    assert [case.id for case in select(CASES, Selection("full", set_name="tiny-2"))] == ["norm/identity/full"]


def test_shards_on_the_command_line(run: Run) -> None:
    out = [run("check", "cli_ports:Good", "--verbose", "--shard", f"{part}/2").out for part in (1, 2)]
    assert "part 1/2" in out[0]
    assert [[f" {case.id} " in text for text in out].count(True) for case in GOOD_CASES[:3]] == [1, 1, 1]
