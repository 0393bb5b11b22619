"""Shards put together again: what is made of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Outcome, Run
from test_cli_report import VALIDATOR, read

PARTS = ("one.jsonl", "two.jsonl")


def make(run: Run, port: str = "Wrong", *arguments: str) -> None:
    for number, name in enumerate(PARTS, 1):
        run("check", f"cli_ports:{port}", "--shard", f"{number}/2", "--json", name, *arguments)


def merge(run: Run, *reports: str) -> Outcome:
    return run("merge", *(reports or PARTS), "--json", "merged.jsonl")


def change(path: Path, line: int, change: dict[str, Any]) -> None:
    lines = path.read_text().splitlines()
    fields = json.loads(lines[line])
    for key, value in change.items():
        if isinstance(value, dict):
            fields[key] |= value
        else:
            fields[key] = value
    lines[line] = json.dumps(fields)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("port", "code"), [("Good", 0), ("Wrong", 1), ("Nothing", 1)])
@pytest.mark.parametrize("order", [PARTS, PARTS[::-1]])
def test_shards_give_the_report_of_the_whole(
    run: Run, tmp_path: Path, port: str, code: int, order: tuple[str, str]
) -> None:
    whole = run("check", f"cli_ports:{port}", "--json", "whole.jsonl")
    make(run, port)
    outcome = merge(run, *order)
    assert outcome.code == whole.code == code
    assert whole.out.splitlines()[-2] == outcome.out.splitlines()[-2]
    merged, expected = read(tmp_path / "merged.jsonl"), read(tmp_path / "whole.jsonl")
    for record in merged:
        VALIDATOR.validate(record)
    assert {record["id"]: record["status"] for record in merged[1:-1]} == {
        record["id"]: record["status"] for record in expected[1:-1]
    }
    assert merged[-1]["counts"] == expected[-1]["counts"]
    same = ("target", "implementation", "reading", "selection", "fixtures", "cases", "left_out")
    assert all(merged[0][name] == expected[0][name] for name in same)


def test_a_missing_shard_is_named_and_the_rest_kept(run: Run, tmp_path: Path) -> None:
    make(run, "Good")
    outcome = merge(run, "two.jsonl")
    assert outcome.error == "conformance: shard 1/2 is missing\n"
    assert "stopped after 2 of 2 cases: shard 1/2 is missing" in outcome.out
    records = read(tmp_path / "merged.jsonl")
    assert len(records) == 4
    assert records[-1]["exit_code"] == 2


def test_a_shard_that_was_cut_off_is_named_and_the_rest_kept(run: Run, tmp_path: Path) -> None:
    make(run, "Good")
    text = (tmp_path / "one.jsonl").read_text()
    # In the middle of the second case.
    (tmp_path / "one.jsonl").write_text(text[: text.index('"case"', text.index('"case"') + 1) + 40])
    outcome = merge(run)
    assert outcome.error == "conformance: one.jsonl ends after 1 of 2 cases: the run was killed\n"
    assert len(read(tmp_path / "merged.jsonl")) == 5


def test_an_interrupted_shard_is_named(run: Run) -> None:
    make(run, "Interrupted")
    assert merge(run).error.count("interrupted") == 1


@pytest.mark.parametrize(
    ("line", "fields", "problem"),
    [
        (0, {"fixtures": {"lock": "0" * 64}}, "two.jsonl: lock '0000"),
        (0, {"target": "other:Port"}, "two.jsonl: target 'other:Port' differs from 'cli_ports:Wrong' of one.jsonl"),
        (0, {"reading": "literal"}, "two.jsonl: reading 'literal' differs"),
        (0, {"suite": "9.9"}, "two.jsonl: suite version '9.9' differs"),
        (0, {"selection": {"level": "full"}}, "two.jsonl: selection level 'full' differs"),
        (0, {"implementation": {"version": "2"}}, "two.jsonl: implementation version '2' differs"),
        (0, {"selection": {"shard": "2/3"}}, "two.jsonl: number of shards '3' differs"),
        (0, {"selection": {"shard": "1/2"}}, "two.jsonl: shard 1/2 is also in one.jsonl"),
        (1, {"id": "one of the first"}, " is also in one.jsonl"),
        (0, {"cases": "many"}, "two.jsonl: line 1 is no record of a report: cases:"),
        (1, {"status": "FINE"}, "two.jsonl: line 2 is no record of a report: status:"),
        (1, {"type": "header"}, "two.jsonl: line 2 is no record of a report"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    run: Run, tmp_path: Path, line: int, fields: dict[str, Any], problem: str
) -> None:
    make(run)
    if "id" in fields:
        fields = {"id": read(tmp_path / "one.jsonl")[1]["id"]}
    change(tmp_path / "two.jsonl", line, fields)
    assert problem in merge(run).error
    assert not (tmp_path / "merged.jsonl").exists()


def test_devices_may_differ(run: Run, tmp_path: Path) -> None:
    make(run)
    change(tmp_path / "two.jsonl", 0, {"implementation": {"device": "cuda"}})
    assert merge(run).code == 1
    assert read(tmp_path / "merged.jsonl")[0]["implementation"]["device"] == "cpu | cuda"


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"not json\n", b"[1]\n", b'{"type": "footer"}\n', b"\xff\n", b"[" * 99999]
)
def test_what_is_no_report_is_refused(run: Run, tmp_path: Path, text: bytes) -> None:
    make(run)
    (tmp_path / "two.jsonl").write_bytes(text)
    assert merge(run).error.startswith("conformance: two.jsonl: ")


def test_merged_reports_cannot_lose_what_was_there(run: Run, tmp_path: Path) -> None:
    make(run)
    (tmp_path / "merged.jsonl").write_text("old")
    assert merge(run, "one.jsonl", "missing.jsonl").code == 2
    assert (tmp_path / "merged.jsonl").read_text() == "old"
    assert "is a directory" in run("merge", *PARTS, "--json", ".").error


def test_durations_of_reports(run: Run, tmp_path: Path) -> None:
    make(run, "Good")
    change(tmp_path / "one.jsonl", 1, {"seconds": 1.23456})
    assert run("durations", *PARTS, "--out", "durations.json").out == "wrote durations.json: 3 cases\n"
    seconds = json.loads((tmp_path / "durations.json").read_text())
    assert seconds[read(tmp_path / "one.jsonl")[1]["id"]] == 1.235
    # `embed` was unsupported.
    assert "model/embed/row" not in seconds
