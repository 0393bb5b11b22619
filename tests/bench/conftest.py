"""A benchmark of milliseconds: small roofs, small samples, a device of which nothing is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_runs import DEVICE
from cli_runs import Outcome, Run, outcome_of

from conformance.bench import devices, inputs, measure, roofs

SHAPES = """
[goals]
device = "a device"
source = "made up"

[[shape]]
kernel = "rms_norm"
name = "tiny"
set = "small"
sizes = { tokens = 8, width = 64 }
goal = { percent = 1e-6, below = 1e-3 }
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofs, "COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(roofs, "MATRIX", {"cpu": 16})
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", {"cpu": 1e-4})
    monkeypatch.setattr(inputs, "MOST", 3)
    monkeypatch.setattr(devices, "find", lambda wanted: DEVICE)


@pytest.fixture
def run(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Call `conformance bench` with arguments, in a folder that has `tiny.toml`."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "tiny.toml").write_text(SHAPES)

    def call(*arguments: str) -> Outcome:
        return outcome_of(("bench", *arguments), monkeypatch, capsys)

    return call
