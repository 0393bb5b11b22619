"""Sessions with harnesses of this folder; afterwards no process and no file may be left."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_sessions import OpenSession, command, processes_with

from conformance.adapters.process import ProcessSession, open_process


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder for temporary files; empty at the end, with every process started meanwhile gone."""
    mark, folder = uuid.uuid4().hex, tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TRANSPORT_TEST", mark)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not processes_with(mark)
    assert not list(folder.iterdir())


@pytest.fixture
def session(nothing_left: Path) -> Iterator[OpenSession]:
    """Opens sessions with scripts of this folder and closes them."""
    opened: list[ProcessSession] = []

    def start(script: str, *arguments: str, timeout: float = 60.0) -> ProcessSession:
        opened.append(open_process(command(script, *arguments), timeout))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
