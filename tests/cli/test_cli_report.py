"""The JSON lines: valid by the schema, complete, and readable however the run ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cli_ports import BROKEN_CASE, CASES
from cli_runs import Run

SCHEMA = json.loads(resources.files("conformance.report").joinpath("schemas/report.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "port", ["Good", "Wrong", "Raises", "WrongShape", "ReturnsNan", "Nothing", "Interrupted", "Quits"]
)
def test_every_line_is_valid(run: Run, tmp_path: Path, port: str) -> None:
    outcome = run("check", f"cli_ports:{port}", "--json", "report.jsonl", cases=[*CASES, BROKEN_CASE])
    records = read(tmp_path / "report.jsonl")
    for record in records:
        VALIDATOR.validate(record)
    assert [record["type"] for record in records] == ["header", *["case"] * (len(records) - 2), "footer"]
    footer = records[-1]
    assert footer["exit_code"] == outcome.code
    assert sum(footer["counts"].values()) == len(records) - 2
    assert bool(footer["stopped"]) == (len(records) - 2 < records[0]["cases"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.jsonl"]


def test_case_record(run: Run, tmp_path: Path) -> None:
    run("check", "cli_ports:ReturnsNan", "--json", "report.jsonl", "-k", "quantize/identity/rows-1")
    case = read(tmp_path / "report.jsonl")[1]
    assert case["status"] == "FAIL"
    assert case["ratio"] == "inf"
    assert case["first_failure"]["actual"] == "nan"
    assert case["first_failure"]["actual_bits"] == "0x7fc0"
    assert case["taps"][0]["judged"] == 8
    assert case["rerun"] == "conformance check cli_ports:ReturnsNan -k quantize/identity/rows-1"


def test_unknown_fields_are_valid(run: Run, tmp_path: Path) -> None:
    run("check", "cli_ports:Good", "--json", "report.jsonl")
    for record in read(tmp_path / "report.jsonl"):
        VALIDATOR.validate({**record, "added_later": 1})
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({**record, "type": "other"})


@pytest.mark.parametrize("path", [".", "missing/report.jsonl", "file/report.jsonl", "/dev/full"])
def test_unwritable_path_is_refused_before_the_run(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    assert f"--json {path}: " in run("check", "cli_ports:Good", "--json", path).error
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_run_that_cannot_begin_keeps_the_old_report(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    report.write_text("old")
    assert run("check", "nowhere", "--json", str(report)).code == 2
    assert report.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.jsonl"]
    assert run("check", "cli_ports:Good", "--json", str(report)).code == 0
    assert read(report)[-1]["type"] == "footer"


def test_report_through_a_link_and_a_device(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    assert run("check", "cli_ports:Good", "--json", "link.jsonl").code == 0
    assert (tmp_path / "link.jsonl").is_symlink()
    assert read(tmp_path / "real.jsonl")[0]["type"] == "header"
    assert run("check", "cli_ports:Good", "--json", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


DRIVER = """
from conformance import cli
from conformance.cases import catalogue
import cli_ports
catalogue.catalogue = lambda fixtures: cli_ports.CASES
cli.main()
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", DRIVER, *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("sent", "code", "last"), [(signal.SIGINT, 130, "footer"), (signal.SIGKILL, -signal.SIGKILL, "case")]
)
def test_ended_run_leaves_a_readable_report(tmp_path: Path, sent: signal.Signals, code: int, last: str) -> None:
    process = start(tmp_path, "check", "cli_ports:Sleeps", "--json", "report.jsonl")
    assert process.stdout is not None
    for line in process.stdout:
        if line == "asleep\n":
            break
    process.send_signal(sent)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in out + err
    records = read(tmp_path / "report.jsonl")
    assert [record["type"] for record in records[:3]] == ["header", "case", "case"]
    assert records[-1]["type"] == last
    for record in records:
        VALIDATOR.validate(record)


def test_reader_of_a_pipe_that_leaves_changes_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "check", "cli_ports:Wrong", "--json", "report.jsonl")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 1
    assert read(tmp_path / "report.jsonl")[-1]["exit_code"] == 1


@pytest.mark.parametrize("name", ["one", "./one", "missing/../one"])
def test_two_options_do_not_write_to_one_file(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "missing").mkdir()
    (tmp_path / "one").write_text("kept")
    outcome = run("check", "cli_ports:Good", "--json", "one", "--html", name)
    assert outcome.code == 2
    assert outcome.error == f"conformance: --html {Path(name)}: --json writes to it too\n"
    assert (tmp_path / "one").read_text() == "kept"


def test_what_is_no_file_may_be_named_twice(run: Run) -> None:
    assert run("check", "cli_ports:Good", "--junit", os.devnull, "--html", os.devnull).code == 0
