"""Expectations: what they change in a run, what is refused, and how a file is brought up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_ports import BROKEN_CASE, CASES
from cli_runs import Outcome, Run

URL = "https://example.org/issues/1"
WRONG_CASES = "quantize/identity/*"


def entry(pattern: str, status: str = "xfail", more: str = "") -> str:
    return f'[[expect]]\npattern = "{pattern}"\nstatus = "{status}"\nreason = "known"\nurl = "{URL}"\n{more}\n'


def check(run: Run, tmp_path: Path, port: str, text: str, *arguments: str) -> Outcome:
    (tmp_path / "known.toml").write_text(text)
    return run("check", f"cli_ports:{port}", "--expect", "known.toml", "--json", "report.jsonl", *arguments)


def statuses(tmp_path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert records[-1]["type"] == "footer"
    found = {record["id"]: record["status"] for record in records[1:-1]}
    assert {name: count for name, count in records[-1]["counts"].items() if count} == {
        status: list(found.values()).count(status) for status in found.values()
    }
    return found


def test_known_failures_do_not_fail_the_run(run: Run, tmp_path: Path) -> None:
    assert run("check", "cli_ports:Wrong").code == 1
    outcome = check(run, tmp_path, "Wrong", entry(WRONG_CASES))
    assert outcome.code == 0
    assert statuses(tmp_path)["quantize/identity/rows-1"] == "XFAIL"
    assert f"  {WRONG_CASES}: xfail expected, 2 XFAIL\n    known\n    {URL}\n" in outcome.out
    assert "does not conform, as expected: 1 of 3 supported cases passed; 2 failed as expected" in outcome.out
    assert "FAIL  quantize" not in outcome.out.replace("XFAIL", "")


def test_a_crash_is_a_failure_that_can_be_known(run: Run, tmp_path: Path) -> None:
    assert check(run, tmp_path, "Raises", entry(WRONG_CASES)).code == 0


def test_a_failure_beside_the_known_ones_fails_the_run(run: Run, tmp_path: Path) -> None:
    outcome = check(run, tmp_path, "Wrong", entry("quantize/identity/rows-10"))
    assert outcome.code == 1
    assert "does not conform: 1 of 3 supported cases failed; 1 failed as expected" in outcome.out


@pytest.mark.parametrize("status", ["xfail", "unsupported"])
def test_a_pass_that_was_not_expected_fails_the_run(run: Run, tmp_path: Path, status: str) -> None:
    outcome = check(run, tmp_path, "Good", entry(WRONG_CASES, status))
    assert outcome.code == 1
    assert statuses(tmp_path)["quantize/identity/rows-1"] == "XPASS"
    assert f"{WRONG_CASES}: {status} expected, 2 XPASS" in outcome.out
    assert "    XPASS  quantize/identity/rows-10\n" in outcome.out
    assert (
        "not as expected: 1 of 3 supported cases passed; 2 passed although expected not to: remove the entries"
        in outcome.out
    )
    assert "These pass now: remove their entries, or narrow them" in outcome.out
    assert check(run, tmp_path, "Good", entry(WRONG_CASES, status), "-x").out.count("XPASS  ") == 1


def test_unsupported_hides_no_failure(run: Run, tmp_path: Path) -> None:
    assert check(run, tmp_path, "Wrong", entry(WRONG_CASES, "unsupported")).code == 1
    assert statuses(tmp_path)["quantize/identity/rows-1"] == "FAIL"
    outcome = check(run, tmp_path, "Good", entry("model/*", "unsupported"))
    assert outcome.code == 0
    assert "model/*: unsupported expected, 1 UNSUPPORTED" in outcome.out


def test_no_expectation_hides_a_fault_of_the_suite(run: Run, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(entry(BROKEN_CASE.id))
    arguments = ("check", "cli_ports:Good", "--expect", "known.toml")
    assert run(*arguments, cases=[*CASES, BROKEN_CASE]).code == 1


def test_quarantined_cases_are_not_launched(run: Run, tmp_path: Path) -> None:
    assert run("check", "cli_ports:Interrupted").code == 130
    outcome = check(run, tmp_path, "Interrupted", entry("norm/*", "quarantine"))
    assert outcome.code == 0
    assert statuses(tmp_path)["norm/identity/ones"] == "QUARANTINE"
    assert "conforms in what was run: 2 of 2 supported cases passed; 1 in quarantine" in outcome.out


def test_all_in_quarantine_is_no_pass(run: Run, tmp_path: Path) -> None:
    assert check(run, tmp_path, "Good", entry("*", "quarantine")).code == 1


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('{ device = "cpu" }', True),
        ('{ device = "c*" }', True),
        ('{ device = "cuda*" }', False),
        ('{ device = ["cuda*", "cpu"], reading = "intended" }', True),
        ('{ device = "cpu", reading = "literal" }', False),
        ('{ accumulator = "fp32" }', True),
        ('{ version = "2*" }', False),
        ('{ platform = "no such system" }', False),
        ('{ level = ["smoke", "core"], mode = "exact" }', True),
    ],
)
def test_conditions(run: Run, tmp_path: Path, condition: str, holds: bool) -> None:
    assert check(run, tmp_path, "Wrong", entry(WRONG_CASES, more=f"condition = {condition}")).code == (
        0 if holds else 1
    )


def test_a_condition_on_cases_leaves_the_others(run: Run, tmp_path: Path) -> None:
    assert check(run, tmp_path, "Wrong", entry(WRONG_CASES, more='condition = { set = "tiny" }')).code == 1
    assert statuses(tmp_path)["quantize/identity/rows-1"] == "XFAIL"
    assert statuses(tmp_path)["quantize/identity/rows-10"] == "FAIL"


def test_the_first_entry_that_holds_counts(run: Run, tmp_path: Path) -> None:
    text = entry("quantize/*", more='condition = { device = "cuda" }') + entry("quantize/*/rows-1", "quarantine")
    check(run, tmp_path, "Wrong", text + entry("quantize/*"))
    assert statuses(tmp_path)["quantize/identity/rows-1"] == "QUARANTINE"
    assert statuses(tmp_path)["quantize/identity/rows-10"] == "XFAIL"


def test_patterns_are_matched_against_the_whole_catalogue(run: Run, tmp_path: Path) -> None:
    text = entry(WRONG_CASES) + entry("norm/identity/full", "quarantine") + entry("indexer/slot/literal")
    for arguments in (["-k", "norm"], ["--shard", "1/2"], ["--component", "norm"]):
        assert check(run, tmp_path, "Wrong", text, *arguments).code == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            entry("norm/identity/once"),
            "entry 1 (pattern 'norm/identity/once'): matches no case; did you mean norm/",
        ),
        (entry("gate/*"), "matches no case"),
        (entry("norm/*", more='condition = { set = "tiny" }'), "matches no case that its condition admits"),
        (
            entry("norm/*") + entry("norm/*/ones"),
            "entry 2 (pattern 'norm/*/ones'): every case that it matches",
        ),
        (entry("norm/*", "skip"), "status 'skip' is none of xfail, quarantine, unsupported"),
        (entry("norm/*", more="conditon = { }"), "unknown key 'conditon'"),
        (entry("norm/*", more='condition = "cpu"'), "condition must be a table"),
        (entry("norm/*", more="condition = { moon = 'full' }"), "unknown condition 'moon'"),
        (entry("norm/*", more="condition = { reading = 'sideways' }"), "reading = 'sideways' never holds"),
        (entry("norm/*", more="condition = { device = 3 }"), "condition device must be a text"),
        (entry("norm/*", more="condition = { device = [] }"), "condition device must be a text"),
        (entry("norm/*").replace(URL, "see the chat"), "url 'see the chat' is not the address of an issue"),
        (entry("norm/*").replace(URL, "https://example.org"), "is not the address of an issue"),
        (entry("norm/*").replace(f'url = "{URL}"', ""), "url is missing"),
        (entry("norm/*").replace('"known"', '""'), "reason is missing, empty"),
        (entry("norm/*").replace('"known"', "7"), "reason is missing, empty or no text"),
        ("[expect]\n", "'expect' must be entries"),
        ("expect = [1]\n", "entry 1: is not a table"),
        ("[[expected]]\n", "unknown key 'expected'"),
        ("[[expect\n", "is not TOML"),
    ],
)
def test_bad_files(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    error = check(run, tmp_path, "Good", text).error
    assert error.startswith("conformance: --expect known.toml: ")
    assert problem in error
    assert not (tmp_path / "report.jsonl").exists()


def test_files_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    assert "--expect none.toml: No such file" in run("check", "cli_ports:Good", "--expect", "none.toml").error
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "binary.toml: is not UTF-8" in run("check", "cli_ports:Good", "--expect", "binary.toml").error


# Updating ------------------------------------------------------------------------------------------------------------


def report(run: Run, port: str, *arguments: str) -> None:
    run("check", f"cli_ports:{port}", "--json", "report.jsonl", *arguments)


def update(run: Run, *arguments: str) -> Outcome:
    return run("expect", "update", "report.jsonl", "--expect", "known.toml", *arguments)


def test_new_failures_need_an_issue_and_get_an_entry(run: Run, tmp_path: Path) -> None:
    report(run, "Wrong")
    assert "--url ISSUE is needed: 2 failures have no entry" in update(run).error
    assert not (tmp_path / "known.toml").exists()
    assert "is not the address of an issue" in update(run, "--url", "later").error
    assert not (tmp_path / "known.toml").exists()
    outcome = update(run, "--url", URL)
    # Both cases of the behaviour failed: one entry.
    assert outcome.out == f"added: quantize/identity/* ({URL}): 2 failed\n"
    assert check(run, tmp_path, "Wrong", (tmp_path / "known.toml").read_text()).code == 0
    assert update(run).out == "nothing to do\n"


def test_a_behaviour_that_fails_in_part_gets_entries_by_id(run: Run, tmp_path: Path) -> None:
    report(run, "Wrong", "-k", "quantize/identity/rows-10")
    update(run, "--url", URL)
    assert 'pattern = "quantize/identity/rows-10"' in (tmp_path / "known.toml").read_text()


FILE = """# Kept: heading.

# Kept: about the first.
[[expect]]
pattern = 'norm/*'  # kept: trailing
# Kept: inside.
status = "quarantine"
reason = "hangs"
url = "https://example.org/issues/2"

# Kept: about the second.
[[expect]]
pattern = "quantize/identity/*"
status = "xfail"
reason = "known"
url = "https://example.org/issues/3"
condition = { device = "cpu" }

[[expect]]
pattern = "model/*"
status = "unsupported"
reason = "later"
url = "https://example.org/issues/4"
# Kept: end.
"""


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if "ept: " in line]


def test_entries_whose_cases_pass_are_removed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(FILE)
    report(run, "Good")
    outcome = update(run)
    assert "removed: quantize/identity/* (https://example.org/issues/3): 2 passed" in outcome.out
    # One of the two cases of norm is not at level core: nobody has seen it pass.
    assert "narrowed to 1 of 2 cases: norm/* (https://example.org/issues/2): 1 passed" in outcome.out
    text = (tmp_path / "known.toml").read_text()
    assert [
        line.replace("norm/identity/full", "norm/*").replace('"norm/*"', "'norm/*'") for line in comments(text)
    ] == (comments(FILE))
    assert text.index("issues/2") < text.index("issues/4")
    assert "issues/3" not in text
    assert check(run, tmp_path, "Good", text).code == 0


def test_what_is_removed_leaves_no_gap(run: Run, tmp_path: Path) -> None:
    known = [entry(pattern, more=more) for pattern, more in (("quantize/identity/rows-1", ""), ("norm/*/full", "\n"))]
    (tmp_path / "known.toml").write_text(
        "# Heading.\n\n" + "\n".join(known) + entry("quantize/identity/rows-10") + "\n\n"
    )
    report(run, "Good")
    update(run)
    assert (tmp_path / "known.toml").read_text() == "# Heading.\n\n" + entry("norm/*/full").rstrip("\n") + "\n"


def test_copies_of_a_narrowed_entry_stay_before_what_is_said_of_the_next(run: Run, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(FILE)
    report(run, "Good", "-k", "rows-10")
    update(run)
    text = (tmp_path / "known.toml").read_text()
    assert text == FILE.replace("quantize/identity/*", "quantize/identity/rows-1")


def test_a_reason_says_what_is_wrong_and_no_number_of_the_run(run: Run, tmp_path: Path) -> None:
    report(run, "Wrong")
    update(run, "--url", URL)
    assert 'reason = "values is wrong (exact)"' in (tmp_path / "known.toml").read_text()


def test_entries_that_do_not_count_in_the_run_stay(run: Run, tmp_path: Path) -> None:
    text = FILE.replace('"cpu"', '"cuda"').replace("'norm/*'", "'norm/identity/full'")
    (tmp_path / "known.toml").write_text(text)
    report(run, "Good")
    assert update(run).out == "nothing to do\n"
    assert (tmp_path / "known.toml").read_text() == text


def test_a_pass_that_was_not_expected_removes_its_entry(run: Run, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(FILE.replace("'norm/*'", "'norm/identity/full'"))
    assert check(run, tmp_path, "Good", (tmp_path / "known.toml").read_text()).code == 1
    update(run)
    assert check(run, tmp_path, "Good", (tmp_path / "known.toml").read_text()).code == 0


def test_what_is_declared_unsupported_but_fails_is_left_to_a_person(run: Run, tmp_path: Path) -> None:
    text = entry(WRONG_CASES, "unsupported")
    (tmp_path / "known.toml").write_text(text)
    report(run, "Wrong")
    assert "left alone: quantize/identity/rows-1 fails" in update(run).out
    assert (tmp_path / "known.toml").read_text() == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "expect = [{ pattern = 'norm/*', status = 'xfail', reason = 'r', url = 'http://e/1' }]\n",
            "line by line",
        ),
        (entry("norm/*").replace('"known"', '"""\n[[expect]]\n"""'), "line by line"),
        (entry("norm/*").replace("pattern =", "'pattern' ="), "must stand on a line of its own"),
        ("[[expect\n", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_edited_is_left_as_it_is(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    report(run, "Good")
    (tmp_path / "known.toml").write_text(text)
    assert problem in update(run).error
    assert (tmp_path / "known.toml").read_text() == text


def test_reports_that_do_not_fit_are_refused(run: Run, tmp_path: Path) -> None:
    assert "report.jsonl: No such file" in update(run).error
    (tmp_path / "report.jsonl").write_text("{}\n")
    assert "line 1 is no record of a report" in update(run).error
    report(run, "Good")
    lines = (tmp_path / "report.jsonl").read_text()
    (tmp_path / "report.jsonl").write_text(lines.replace('"lock": "', '"lock": "' + "0" * 64 + '", "was": "', 1))
    assert "was made with other fixtures" in update(run).error
