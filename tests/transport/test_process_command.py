"""`conformance check cmd:...` as a user runs it: statuses in the report, exit codes, several processes, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transport_sessions import command

SMALL = "quantize/fp8-floor"
"""Four cases, of which the harnesses of this folder are asked the one whose method they have."""


def start(*arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "conformance", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=300)
    # A harness's own traceback is quoted, behind the words that say so.
    assert not any(line.startswith("Traceback") for line in (out + err).splitlines())
    return process.returncode, out, err


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(path: Path) -> list[tuple[str, str]]:
    return [(record["id"], record["status"]) for record in records(path) if record["type"] == "case"]


def statuses(path: Path) -> Mapping[str, int]:
    counts: Mapping[str, int] = records(path)[-1]["counts"]
    return {status: count for status, count in counts.items() if count}


@pytest.mark.parametrize(
    ("trait", "status", "text"),
    [
        ("junk", "PROTOCOL", "call fake_quantize_fp8: reply: not valid JSON"),
        ("dies-by-signal", "CRASH", "call fake_quantize_fp8: the process ended by signal SIGSEGV"),
        ("hangs", "TIMEOUT", "call fake_quantize_fp8: no answer within 3 s"),
    ],
)
def test_statuses_are_reported(trait: str, status: str, text: str, nothing_left: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    target = command("misbehaving.py", trait)
    code, out, err = run("check", target, "-k", SMALL, "--timeout", "3", "--json", str(report))
    assert (code, err) == (1, "")
    assert statuses(report)[status] == 1
    assert len(outcomes(report)) == records(report)[0]["cases"]
    assert f"{status}  quantize/fp8-floor/fake\n" in out
    assert text in " ".join(out.split())
    assert "--timeout 3 -k quantize/fp8-floor/fake\n" in out


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("cmd:", "no command after cmd:"),
        ("cmd:'./harness", "No closing quotation"),
        ("cmd:./no-such-harness --fast", "cannot start ./no-such-harness: No such file or directory"),
        ("cmd:false", "start: the process ended with exit code 1 instead of an answer"),
        ("cmd:echo ready", "start: reply: not valid JSON: Expecting value: line 1 column 1 (char 0): 'ready'"),
        ("cmd:cat", "start: reply: 'status' is a required property"),
        (command("misbehaving.py"), "IndexError: list index out of range"),
    ],
)
def test_a_harness_that_cannot_be_started_is_one_line(target: str, text: str, nothing_left: Path) -> None:
    code, out, err = run("check", target, "-k", SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


def test_the_shell_is_not_involved(nothing_left: Path, tmp_path: Path) -> None:
    code, _, _ = run("check", f"cmd:true; touch {tmp_path}/made", "-k", SMALL)
    assert code == 2
    assert not list(tmp_path.iterdir())


def test_several_processes_keep_the_order_and_the_statuses(nothing_left: Path, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "3"):
        report = tmp_path / f"{jobs}.jsonl"
        target = command("misbehaving.py", "dies-and-leaves-children")
        assert run("check", target, "-k", SMALL, "--jobs", jobs, "--json", str(report))[0] == 1
        found.append(outcomes(report))
    assert found[0] == found[1]
    assert "CRASH" in dict(found[0]).values()


PORT = """
import os, signal
from conformance.adapters.reference import Reference

class Port(Reference):
    def fake_quantize_fp8(self, x):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_with_several_processes_a_class_may_end_its_own(
    nothing_left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_port.py").write_text(PORT)
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "report.jsonl"
    code, out, _ = run("check", "dying_port:Port", "-k", SMALL, "--jobs", "2", "--json", str(report))
    assert code == 1
    assert "the process ended by signal SIGSEGV" in out
    assert statuses(report) == {"PASS": 3, "CRASH": 1}


def asked(folder: Path) -> bool:
    try:
        return any(folder.rglob("arguments.safetensors"))
    except FileNotFoundError:  # A folder went while it was being looked through.
        return False


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything(number: signal.Signals, jobs: str, nothing_left: Path, tmp_path: Path) -> None:
    """The harness hangs in the first case; `nothing_left` sees that it and its folder go."""
    report = tmp_path / "report.jsonl"
    target = command("misbehaving.py", "hangs")
    process = start("check", target, "-k", SMALL, "--jobs", jobs, "--json", str(report))
    while not asked(nothing_left):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in out
    assert records(report)[-1]["exit_code"] == 130


def test_a_timeout_is_for_processes_only() -> None:
    code, _, err = run("check", "reference", "--timeout", "5", "-k", SMALL)
    assert code == 2
    assert "--timeout is for cmd:" in err
