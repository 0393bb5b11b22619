"""JUnit XML and annotations, from the same records as everything else."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_ports import BROKEN_CASE, CASES, GOOD_CASES
from cli_runs import Run

ALLOWED = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        {"properties", "testcase"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "testcase": ({"name", "classname", "time"}, {"failure", "error", "skipped"}),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"type", "message"}, set()),
}
"""Attributes and children of the JUnit 10 schema that are used."""


def suites(path: Path) -> ElementTree.Element:
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag == "testsuites"
    for element in root.iter():
        attributes, children = ALLOWED[element.tag]
        assert set(element.attrib) <= attributes
        assert {child.tag for child in element} <= children
    return root


@pytest.mark.parametrize(
    ("port", "tag", "kind"),
    [
        ("Wrong", "failure", "FAIL"),
        ("WrongShape", "failure", "FAIL"),
        ("Raises", "error", "CRASH"),
        ("Nothing", "skipped", "UNSUPPORTED"),
        ("Good", None, ""),
    ],
)
def test_statuses(run: Run, tmp_path: Path, port: str, tag: str | None, kind: str) -> None:
    run("check", f"cli_ports:{port}", "--junit", "report.xml", cases=[*CASES, BROKEN_CASE])
    root = suites(tmp_path / "report.xml")
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert set(cases) == {case.id for case in (*CASES, BROKEN_CASE) if case.level != "full" and not case.reading}
    case = cases["quantize/identity/rows-1"]
    assert case.get("classname") == "conformance.quantize"
    assert [child.tag for child in case] == ([] if tag is None else [tag])
    if tag is not None:
        assert case[0].get("type") == kind
        assert case[0].get("message", "").startswith(f"{kind}: ")
    counted = ((root.get("failures"), "failure"), (root.get("errors"), "error"), (root.get("tests"), "testcase"))
    for count, name in counted:
        assert count == str(len(list(root.iter(name))))
    for suite in root:
        for attribute, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert suite.get(attribute) == str(len(list(suite.iter(name))))


def test_a_failure_carries_the_explanation(run: Run, tmp_path: Path) -> None:
    run("check", "cli_ports:Wrong", "--junit", "report.xml")
    failure = next(suites(tmp_path / "report.xml").iter("failure"))
    assert "actual    14.0" in (failure.text or "")
    assert "conformance check cli_ports:Wrong -k quantize/identity/rows-1" in (failure.text or "")


def test_expectations_are_skipped_with_their_issue(run: Run, tmp_path: Path) -> None:
    url = "https://example.org/issues/1"
    text = f'[[expect]]\npattern = "quantize/*"\nstatus = "xfail"\nreason = "known"\nurl = "{url}"\n'
    (tmp_path / "known.toml").write_text(text)
    run("check", "cli_ports:Wrong", "--junit", "report.xml", "--expect", "known.toml")
    skipped = list(suites(tmp_path / "report.xml").iter("skipped"))
    assert (skipped[0].get("type"), skipped[0].get("message")) == ("XFAIL", f"xfail: known ({url})")


def test_what_xml_does_not_have_is_escaped(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cli_ports

    def strange(self: object, x: object) -> None:
        raise RuntimeError("bell \x07, nul \x00, <tag> & ]]> \ufffe \udc80 \U0001f600")

    monkeypatch.setattr(cli_ports.Raises, "fake_quantize_fp8", strange)
    assert run("check", "cli_ports:Raises", "--junit", "report.xml").code == 1
    error = next(suites(tmp_path / "report.xml").iter("error"))
    for shown in ("bell \\x07, nul \\x00, <tag> & ]]> \\ufffe", "\\udc80", "\U0001f600"):
        assert shown in (error.get("message") or "")


def test_an_interrupted_run_leaves_what_it_found(run: Run, tmp_path: Path) -> None:
    assert run("check", "cli_ports:Interrupted", "--junit", "report.xml").code == 130
    root = suites(tmp_path / "report.xml")
    assert len(list(root.iter("testcase"))) == 2
    assert any(found.get("name") == "stopped" for found in root.iter("property"))


@pytest.mark.parametrize("path", [".", "missing/report.xml", "file/report.xml"])
def test_unwritable_path_is_refused_before_the_run(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    assert f"--junit {path}: " in run("check", "cli_ports:Good", "--junit", path).error
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_run_that_cannot_begin_keeps_the_old_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text("old")
    assert run("check", "nowhere", "--junit", "report.xml").code == 2
    assert (tmp_path / "report.xml").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.xml"]


def test_annotations_only_in_actions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert "::error" not in run("check", "cli_ports:Wrong").out
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::error" not in run("check", "cli_ports:Good").out
    lines = [line for line in run("check", "cli_ports:Wrong").out.splitlines() if line.startswith("::error")]
    assert lines == [
        f"::error title=FAIL {case_id}::FAIL: values: 1 of 8 elements differ at layer 3, call 1, position 8, feature 2"
        f"%0Aconformance check cli_ports:Wrong -k {case_id}"
        for case_id in ("quantize/identity/rows-1", "quantize/identity/rows-10")
    ]


def test_annotations_are_as_many_as_are_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    cases = [replace(GOOD_CASES[0], id=f"quantize/many/{number:02}") for number in range(12)]
    out = run("check", "cli_ports:Wrong", cases=cases).out
    lines = [line for line in out.splitlines() if line.startswith("::error")]
    assert len(lines) == 10
    assert lines[-1] == "::error title=conformance::3 more cases failed; the report lists them"
