"""What the `run` fixture gives: a command line that was run, and what it left behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from conformance import cli


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a run that was not possible."""
        assert self.code == 2
        assert self.err.startswith("conformance: ")
        assert self.err.count("\n") == 1
        return self.err


Run = Callable[..., Outcome]


def outcome_of(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Outcome:
    """Call `conformance` with arguments in this process."""
    monkeypatch.setattr(sys, "argv", ["conformance", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert isinstance(ended.value.code, int)
    return Outcome(ended.value.code, captured.out, captured.err)
