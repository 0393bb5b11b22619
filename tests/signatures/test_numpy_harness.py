"""The mistakes planted in the numpy example are named to it, asked as a process."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from conformance.adapters.process import TIMEOUT, open_process
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.fixtures import Fixtures
from conformance.runner import run_case
from conformance.signatures.matcher import explain

PROGRAM = Path(__file__).parents[1] / "transport" / "planted_faults.py"


def planted_faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_faults", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLANTED = planted_faults().PLANTED


@cache
def all_cases() -> dict[str, Case]:
    return {case.id: case for case in catalogue(Fixtures.open(verify=False))}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(name: str) -> None:
    fault = PLANTED[name]
    session = open_process(f"cmd:{shlex.join([sys.executable, str(PROGRAM), name])}", TIMEOUT)
    try:
        case = all_cases()[fault.case]
        assert run_case(case, session).status == "FAIL"
        found = explain([(case, 0.0)], session, 120.0)[case.id]
    finally:
        session.close()
    assert {entry.match.candidate.name for entry in found if entry.rank == 1} & set(fault.names)
