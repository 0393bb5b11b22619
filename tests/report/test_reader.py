"""Reports are read as they were written, cut off anywhere, and refused in one line when they are none."""

from __future__ import annotations

import json
from pathlib import Path

import made_reports
import pytest
from made_reports import INFINITY, record, text

from conformance.errors import ConformanceError
from conformance.report.reader import parse_record, parse_report
from conformance.report.records import as_line

RECORDS = [record("norm/rms/a"), record("norm/rms/b", "FAIL", ratio=INFINITY), record("gate/x/c", "UNSUPPORTED")]
WHOLE = text(RECORDS)
HERE = Path("report.jsonl")


def test_what_is_written_is_read() -> None:
    report = parse_report(HERE, WHOLE.encode())
    assert list(report.records) == RECORDS
    assert report.footer == made_reports.footer(RECORDS)
    assert not report.cut_off


@pytest.mark.parametrize("cut", range(0, len(WHOLE), 97))
def test_a_report_may_end_anywhere(cut: int) -> None:
    begins = WHOLE.index("\n")
    if cut < begins:
        with pytest.raises(ConformanceError, match=r"report\.jsonl: does not begin with the header"):
            parse_report(HERE, WHOLE[:cut].encode())
        return
    report = parse_report(HERE, WHOLE[:cut].encode())
    complete = WHOLE[:cut].count("\n") - 1
    assert list(report.records) == RECORDS[: len(report.records)]
    assert len(report.records) >= min(complete, len(RECORDS))
    assert report.footer is None
    assert report.cut_off == f"ends after {len(report.records)} of 3 cases: the run was killed"
    assert report.ending.exit_code == 2


def test_the_last_line_break_may_be_missing() -> None:
    assert parse_report(HERE, WHOLE.rstrip("\n").encode()).footer is not None


def test_fields_of_later_versions_are_ignored_and_those_of_earlier_ones_may_be_missing() -> None:
    line = json.loads(as_line(RECORDS[1]))
    line["invented later"] = {"a": 1}
    for name in ("deviations", "expectation", "matched"):
        line.pop(name)
    for name in ("layers", "histogram"):
        line["taps"][0].pop(name)
    read = parse_record(json.dumps(line))
    assert read.id == RECORDS[1].id
    assert read.taps[0].histogram == {}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"ratio": 0.5', '"ratio": "much"', "'much' is not a number"),
        ('"judged": 8', '"judged": 8.5', "'8.5' is not a whole number"),
        ('"judged": 8', '"judged": true', "'True' is not a whole number"),
        ('"status": "PASS"', '"status": "FINE"', "status: 'FINE' is not one of PASS, FAIL"),
        ('"level": "core"', '"level": "deep"', "level: 'deep' is not one of"),
        ('"taps": [', '"taps": 1, "t": [', "taps: '1' is not a list"),
        ('"why"', '"w"', "why is missing"),
        ('"ratio": 0.5', '"ratio": NaN', "'NaN' is not JSON"),
        ('"type": "case"', '"type": "song"', "no type of record"),
    ],
)
def test_a_damaged_line_is_named(old: str, new: str, problem: str) -> None:
    lines = WHOLE.splitlines()
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new, 1)
    with pytest.raises(ConformanceError) as refused:
        parse_report(HERE, "\n".join(lines).encode())
    message = str(refused.value)
    assert message.startswith("report.jsonl: line 2 is no record of a report: ")
    assert problem in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "does not begin with the header"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000 + b"\n" + WHOLE.encode(), "nested too deeply"),
        (WHOLE.encode() + WHOLE.encode(), "line 5 is a footer among cases"),
        (text([RECORDS[0], RECORDS[0]]).encode(), "case norm/rms/a is there twice"),
        ("\n".join(WHOLE.splitlines()[1:]).encode(), "does not begin with the header"),
        (WHOLE.replace(made_reports.LOCK, "x").encode(), "line 1 is no record of a report: fixtures/lock"),
    ],
)
def test_what_is_no_report_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(ConformanceError, match=problem):
        parse_report(HERE, content)
