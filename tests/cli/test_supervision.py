"""The command as a user starts it: a target that ends the process does not choose the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PORT = """
import os, signal
import conformance


class Port(conformance.Implementation):
    def describe(self):
        return conformance.Description("ends", "0")

    def rms_norm(self, x, weight, eps):
        {end}
"""


def run(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    (folder / "ends.py").write_text(PORT.format(end=end))
    command = [sys.executable, "-m", "conformance", "check", "ends:Port", "-k", "norm/rms/zero-rows", "--explain", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(0)", "with exit code 0"), ("os.kill(os.getpid(), signal.SIGSEGV)", "by SIGSEGV")],
)
def test_a_target_that_ends_the_process_is_no_pass(end: str, how: str, tmp_path: Path) -> None:
    ended = run(tmp_path, end)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert how in ended.stderr


def test_the_exit_code_of_a_failed_check_is_handed_on(tmp_path: Path) -> None:
    assert run(tmp_path, "return x + 1").returncode == 1
