"""Ports of this folder as targets, and the golden model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.cases.traces import GoldenModel, Trace
from conformance.fixtures import Fixtures

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def ports_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(HERE))
    yield
    sys.modules.pop("layer_faults", None)


@pytest.fixture(scope="session")
def traces() -> dict[str, Trace]:
    return {trace.name: trace for trace in GoldenModel(Fixtures.open().model("tiny")).traces}
