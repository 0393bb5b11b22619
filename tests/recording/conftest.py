"""Recordings of the stand-in, made once, and copies of it to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recording_options import STANDIN, options

from conformance.recording.record import record


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sets of `small.toml`."""
    out = tmp_path_factory.mktemp("recorded") / "golden"
    assert record(options(out), lambda line: None) == 0
    return out


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of the stand-in with one place of its model changed."""

    def change(old: str, new: str) -> Path:
        directory = tmp_path / "inference"
        shutil.copytree(STANDIN, directory, ignore=shutil.ignore_patterns("__pycache__"))
        text = (directory / "model.py").read_text()
        assert old in text
        (directory / "model.py").write_text(text.replace(old, new))
        return directory

    return change
