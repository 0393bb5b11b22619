"""`run`: the command line in this process, put to the hand-made catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cli_ports
import pytest
from cli_runs import Outcome, Run, outcome_of

from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.fixtures import Fixtures


@pytest.fixture(scope="session")
def shipped() -> Fixtures:
    """The shipped sets, hashed once for all tests."""
    return Fixtures.open()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, shipped: Fixtures) -> Run:
    """Call `conformance` with arguments; `cases` replaces the hand-made catalogue."""
    really_open = Fixtures.open
    monkeypatch.setattr(
        Fixtures, "open", lambda where=None, **options: shipped if where is None else really_open(where, **options)
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, cases: Sequence[Case] = cli_ports.CASES) -> Outcome:
        monkeypatch.setattr(catalogue, "catalogue", lambda fixtures: cases)
        if arguments[:1] == ("check",) and "--explain" not in arguments:
            # Naming the mistake behind each failure takes seconds, and has tests of its own.
            arguments = (*arguments, "--explain", "0")
        return outcome_of(arguments, monkeypatch, capsys)

    return call
