"""Two reports beside each other, and many in a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_reports import INFINITY, record, stored, text
from pages import parse

from conformance.report.badge import badge
from conformance.report.compare import Comparison, compare
from conformance.report.html.compare_page import compare_page, matrix_page
from conformance.report.matrix import as_markdown, make_matrix
from conformance.report.records import CaseRecord

A, B = "norm/rms/a", "norm/rms/b"


def compared(tmp_path: Path, before: list[CaseRecord], after: list[CaseRecord], **changes: Any) -> Comparison:
    return compare(stored(tmp_path / "before.jsonl", *before), stored(tmp_path / "after.jsonl", *after, **changes))


@pytest.mark.parametrize(
    ("before", "after", "code", "named"),
    [
        ("PASS", "PASS", 0, None),
        ("PASS", "FAIL", 1, "newly_failing"),
        ("PASS", "CRASH", 1, "newly_failing"),
        ("PASS", "TIMEOUT", 1, "newly_failing"),
        ("UNSUPPORTED", "FAIL", 1, "newly_failing"),
        ("XFAIL", "FAIL", 1, "newly_failing"),
        ("XFAIL", "XPASS", 1, "newly_failing"),
        ("PASS", "UNSUPPORTED", 1, "no_longer_passing"),
        ("PASS", "QUARANTINE", 1, "no_longer_passing"),
        ("PASS", "XFAIL", 1, "no_longer_passing"),
        ("FAIL", "PASS", 0, "newly_passing"),
        ("UNSUPPORTED", "PASS", 0, "newly_passing"),
        ("FAIL", "CRASH", 0, "other_statuses"),
        ("FAIL", "UNSUPPORTED", 0, "other_statuses"),
        ("FAIL", "FAIL", 0, None),
    ],
)
def test_statuses(tmp_path: Path, before: str, after: str, code: int, named: str | None) -> None:
    found = compared(tmp_path, [record(A, before), record(B)], [record(A, after), record(B)])
    lists = ("newly_failing", "no_longer_passing", "newly_passing", "other_statuses")
    assert {name: [c.id for c in getattr(found, name)] for name in lists if getattr(found, name)} == (
        {named: [A]} if named else {}
    )
    assert found.exit_code == code


def test_other_errors_are_listed_by_growth_and_are_no_regression(tmp_path: Path) -> None:
    names = [f"norm/rms/{n}" for n in range(4)]
    before = [record(name, ratio=ratio) for name, ratio in zip(names, (0.5, 0.1, 0.0, 0.4), strict=True)]
    after = [record(name, ratio=ratio) for name, ratio in zip(names, (0.25, 0.9, 0.1, 0.4), strict=True)]
    found = compared(tmp_path, before, after)
    assert [(c.id, c.factor) for c in found.changed] == [(names[2], INFINITY), (names[1], 9.0), (names[0], 0.5)]
    assert found.exit_code == 0


@pytest.mark.parametrize("status", ["PASS", "FAIL"])
def test_a_report_that_was_cut_off_shows_regressions_but_not_their_absence(tmp_path: Path, status: str) -> None:
    found = compared(tmp_path, [record(A), record(B)], [record(A, status)], killed=True, cases=2)
    assert found.exit_code == (2 if status == "PASS" else 1)
    assert [one.id for one in found.only_before] == [B]


def test_reports_without_a_common_case_cannot_be_compared(tmp_path: Path) -> None:
    assert compared(tmp_path, [record(A)], [record(B)]).exit_code == 2


def test_what_differs_between_the_runs_is_said(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "suite": "9",
        "reading": "literal",
        "fixtures": {"directory": "shipped", "lock": "f" * 64, "sets": ["tiny"]},
        "implementation": {"accumulator": "fp16", "conventions": {"top-k ties": "highest"}, "deviations": ["x", "y"]},
        "environment": {"python": "3.11.0", "platform": "Linux-6", "torch": "2"},
    }
    found = compared(tmp_path, [record(A)], [record(A)], **changes)
    assert {one.name: one.after for one in found.differences} == {
        "suite": "9",
        "fixtures lock": "f" * 64,
        "reading": "literal",
        "implementation: accumulator": "fp16",
        "implementation: deviations": "x, y",
        "convention: top-k ties": "highest",
        "environment: torch": "2",
    }
    page = parse(compare_page(found)).text
    assert all(one.name in page for one in found.differences)


@pytest.mark.parametrize("hostile", ["<script>x</script>", "| `a` |\n# b", "y" * 5000])
def test_pages_escape(tmp_path: Path, hostile: str) -> None:
    described = {"name": hostile, "version": hostile, "device": hostile}
    before = stored(tmp_path / "a.jsonl", record(A))
    after = stored(tmp_path / "b.jsonl", record(A, "CRASH", message=hostile), implementation=described, suite=hostile)
    for page in (compare_page(compare(before, after)), matrix_page(make_matrix([before, after]))):
        assert not parse(page).all("script")
        assert len(page) < 40_000
    lines = as_markdown(make_matrix([before, after])).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 3
    assert all(line.replace("\\|", "").count("|") == 4 for line in table)
    assert "<script" not in "\n".join(lines).replace("\\<", "")


def test_commands(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text([record(A), record(B)]))
    (tmp_path / "b.jsonl").write_text(text([record(A), record(B, "FAIL")]))
    outcome = run("compare", "a.jsonl", "b.jsonl", "--html", "c.html")
    assert outcome.code == 1
    assert f"PASS -> FAIL  {B}" in outcome.out
    assert outcome.out.endswith("regression: 1 newly failing, 0 no longer passing, 0 newly passing\n")
    assert B in parse((tmp_path / "c.html").read_text()).text
    assert run("compare", "b.jsonl", "a.jsonl").code == 0
    outcome = run("compare", "a.jsonl", "missing.jsonl")
    assert (outcome.code, outcome.err) == (2, "conformance: missing.jsonl: No such file or directory\n")
    outcome = run("matrix", "a.jsonl", "b.jsonl", "--html", "m.html", "--markdown", "m.md")
    assert outcome.code == 0
    assert "conforms 2/2" in outcome.out
    rows = (tmp_path / "m.md").read_text().splitlines()
    assert rows[0] == "| component | my engine 1.0 \\(a.jsonl\\) | my engine 1.0 \\(b.jsonl\\) |"
    assert rows[2] == "| norm | conforms 2/2 | FAILS 1/2 |"
    assert "FAILS" in parse((tmp_path / "m.html").read_text()).text


def test_matrix_leaves_gaps_and_names_what_differs(tmp_path: Path) -> None:
    first = stored(tmp_path / "a.jsonl", record("norm/rms/a"), record("zzz/new/a"))
    second = stored(tmp_path / "b.jsonl", record("gate/x/a", "UNSUPPORTED"), selection={"level": "full"})
    made = make_matrix([first, second])
    assert made.components == ("norm", "gate", "zzz")
    assert "norm" not in made.columns[1].rows
    assert made.differing == ["levels"]


BADGE = {
    "type": "object",
    "properties": {
        "schemaVersion": {"const": 1},
        "label": {"type": "string", "minLength": 1},
        "message": {"type": "string", "minLength": 1},
        "color": {"enum": ["brightgreen", "yellow", "red", "lightgrey"]},
        "isError": {"type": "boolean"},
    },
    "required": ["schemaVersion", "label", "message", "color"],
    "additionalProperties": False,
}
"""What shields.io reads of an endpoint, as far as we use it."""


@pytest.mark.parametrize(
    ("records", "changes", "colour", "message"),
    [
        ([record(A), record(B)], {}, "brightgreen", "conforms, 2 cases (core)"),
        ([record(A)], {"selection": {"components": ["norm"]}}, "brightgreen", "conforms, 1 case (core, norm)"),
        ([record(A), record(B, "FAIL")], {}, "red", "1 of 2 cases fail"),
        ([record(A), record(B, "XPASS")], {}, "red", "1 of 2 cases fail"),
        ([record(A), record(B, "UNSUPPORTED")], {}, "yellow", "conforms in what it supports (core)"),
        ([record(A), record(B, "XFAIL")], {}, "yellow", "does not conform, as expected (core)"),
        ([record(A)], {"implementation": {"accumulator": "fp16"}}, "yellow", "conforms with a declared fp16"),
        ([record(A)], {"implementation": {"deviations": ["d"]}}, "yellow", "conforms with declared deviations"),
        ([record(A)], {"killed": True}, "lightgrey", "no verdict"),
        ([record(A), record(B, "BROKEN")], {}, "lightgrey", "no verdict"),
        ([record(A, "UNSUPPORTED")], {}, "lightgrey", "no verdict"),
    ],
)
def test_badge(tmp_path: Path, records: list[CaseRecord], changes: dict[str, Any], colour: str, message: str) -> None:

    made = json.loads(badge(stored(tmp_path / "a.jsonl", *records, **changes)))
    jsonschema.validate(made, BADGE)
    assert made["color"] == colour
    assert made["message"].startswith(message)
    assert made.get("isError", False) == (colour == "lightgrey")
