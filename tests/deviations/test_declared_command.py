"""What the command line says of ports that declare deviations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PORTS = """
from dataclasses import replace
from conformance.adapters.reference import Reference


class Unknown(Reference):
    def describe(self):
        return replace(super().describe(), deviations=("no-quantiser",))


class NoTuple(Reference):
    def describe(self):
        return replace(super().describe(), deviations="no-activation-quantiser")


class CombTransposed(Reference):
    def hyper_connection_write(self, y, h, post, comb):
        return super().hyper_connection_write(y, h, post, comb.transpose(-1, -2))
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "ports.py").write_text(PORTS, encoding="utf-8")
    command = [sys.executable, "-m", "conformance", "check", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("port", "what"), [("Unknown", "'no-quantiser'"), ("NoTuple", "tuple of names")])
def test_an_unknown_deviation_ends_the_run(tmp_path: Path, port: str, what: str) -> None:
    run = check(tmp_path, f"ports:{port}", "-k", "linear/lattice-fp8/ties")
    assert run.returncode == 2
    assert what in run.stderr
    assert run.stderr.count("\n") == 1


def test_the_report_names_the_mistake_and_folds_what_is_alike(tmp_path: Path) -> None:
    run = check(tmp_path, "ports:CombTransposed", "-k", "hyper_connections/write", "--json", "report.jsonl")
    assert run.returncode == 1
    assert "your values equal ours with: The write sums over the second index" in " ".join(run.stdout.split())
    records = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [records[0]["type"], records[-1]["type"]] == ["header", "footer"]
    failed = [record for record in records if record.get("status") == "FAIL"]
    assert len(failed) > 3
    assert all(record["matched"][0]["flag"] == "comb-transposed" for record in failed)
    assert run.stdout.count("  why ") == 3
    assert all(record["id"] in run.stdout for record in failed)


def test_nothing_is_compared_without_time_for_it(tmp_path: Path) -> None:
    run = check(tmp_path, "ports:CombTransposed", "-k", "hyper_connections/write", "--explain", "0")
    assert run.returncode == 1
    assert "your values equal" not in run.stdout
