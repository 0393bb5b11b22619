"""`run`: the command line in this process, from an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import Outcome, Run, outcome_of


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        outcome = outcome_of(arguments, monkeypatch, capsys)
        if outcome.code == 2:
            assert outcome.err.count("\n") <= 1
        return outcome

    return call
