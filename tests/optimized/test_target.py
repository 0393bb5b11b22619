"""The target name `optimized`: what a user gets with Triton, and without."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from conformance.adapters.target import open_target
from conformance.cases.catalogue import catalogue
from conformance.errors import TargetError
from conformance.fixtures import Fixtures
from conformance.runner import run_case


def test_the_name_stands_for_the_kernels() -> None:
    session = open_target("optimized")
    description = session.describe()
    assert description.name == "optimized"
    assert description.conventions["architecture"]
    case = next(case for case in catalogue(Fixtures.open(None)) if case.id == "norm/rms/zero-rows")
    assert run_case(case, session).status == "PASS"


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_triton(name: str, *rest: Any) -> ModuleSpec | None:
        return None if name == "triton" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_triton)
    monkeypatch.delitem(sys.modules, "conformance.adapters.optimized", raising=False)
    with pytest.raises(TargetError, match="the kernels need triton: pip install") as caught:
        open_target("optimized")
    assert "\n" not in str(caught.value)
