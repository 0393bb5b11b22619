"""The suite rejects mistakes in kernels, and accepts the kernels themselves: through the adapter, case by case."""

from __future__ import annotations

from optimized.device import INTERPRETED

# ruff: isort: split
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_faults import FAULTS, SEVERAL_PROGRAMS, SEVERAL_TILES, KernelFault

import conformance.adapters.optimized as shipped_adapter
import optimized
from conformance.adapters.in_process import InProcess
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.fixtures import Fixtures
from conformance.interface import Implementation
from conformance.runner import run_case
from optimized import selection

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="faults are interpreted: some read what is not theirs")

SOURCES = sorted(Path(optimized.__file__).parent.glob("*.py"))
ADAPTERS = sorted(Path(shipped_adapter.__file__).parent.glob("optimized*.py"))
KEPT = ("device", "interpreter")
"""Not copied: they have set Triton up for this process."""
NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    return {case.id: case for case in catalogue(Fixtures.open(None))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path; modules imported from it are forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def renamed(text: str, package: str) -> str:
    """Imports of `optimized` become those of a copy, but for what is not copied."""
    for source in SOURCES:
        if source.stem not in KEPT:
            text = text.replace(f"from optimized.{source.stem} import", f"from {package}.{source.stem} import")
            text = text.replace(f"import optimized.{source.stem}\n", f"import {package}.{source.stem}\n")
            text = text.replace(f" optimized.{source.stem}.", f" {package}.{source.stem}.")
    return text


def faulty(fault: KernelFault, folder: Path) -> Implementation:
    """The adapter over a copy of the kernels that holds the fault."""
    package = f"faulty_kernels_{next(NUMBERS)}"
    (folder / package).mkdir()
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        if source.stem == fault.module:
            assert text.count(fault.old) == 1, f"{fault.name}: stands {text.count(fault.old)} times"
            text = text.replace(fault.old, fault.new)
        if source.stem not in KEPT:
            (folder / package / source.name).write_text(renamed(text, package), encoding="utf-8")
    for adapter in ADAPTERS:
        text = renamed(adapter.read_text(encoding="utf-8"), package)
        text = text.replace("from conformance.adapters.optimized_", f"from {package}.adapters.optimized_")
        (folder / package / "adapters").mkdir(exist_ok=True)
        (folder / package / "adapters" / adapter.name).write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    module = importlib.import_module(f"{package}.{fault.module}")
    for name, value in fault.sizes.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    made: Implementation = importlib.import_module(f"{package}.adapters.optimized").Optimized()
    return made


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS}))
def test_the_kernels_conform(case: str, cases: dict[str, Case]) -> None:
    result = run_case(cases[case], InProcess(shipped_adapter.Optimized()))
    assert result.status == "PASS", result.message


def test_the_kernels_conform_by_several_programs(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SEVERAL_PROGRAMS.items():
        monkeypatch.setattr(selection, name, value)
    result = run_case(cases[SEVERAL_TILES], InProcess(shipped_adapter.Optimized()))
    assert result.status == "PASS", result.message


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_rejected(fault: KernelFault, cases: dict[str, Case], folder: Path) -> None:
    result = run_case(cases[fault.case], InProcess(faulty(fault, folder)))
    assert result.status == "FAIL", f"{result.status}: {result.message}"
