"""The shipped cases, prepared once for all tests of this folder."""

from __future__ import annotations

import pytest

from conformance.faults.matrix import Workbench
from conformance.fixtures import Fixtures
from reference.config import Config


@pytest.fixture(scope="session")
def bench() -> Workbench:
    return Workbench(None)


@pytest.fixture(scope="session")
def tiny_reference_config() -> Config:
    return Config.from_mapping(Fixtures.open(None).model("tiny").config)
