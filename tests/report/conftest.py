"""`run`: the command line in this process, from an empty folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance import cli


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Outcome]:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["conformance", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(ended.value.code, int)
        if ended.value.code == 2:
            assert captured.err.count("\n") <= 1
        return Outcome(ended.value.code, captured.out, captured.err)

    return call
