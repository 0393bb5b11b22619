"""Which package may import which, and which modules must exist: the layout that the design fixes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.interface import COMPONENTS, METHODS

ROOT = Path(__file__).parents[1]
KNOWING = {Path("conformance/adapters"), Path("conformance/faults")}
"""The only packages of the suite that may know an implementation by name."""


def modules(package: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Names of modules that a file imports, wherever in it, with their lines; also by `import_module("...")`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), node.lineno


def imports_of(path: Path, packages: set[str]) -> list[str]:
    return [f"{path}:{line}: {name}" for name, line in imported(path) if name.partition(".")[0] in packages]


def test_there_is_something_to_look_at() -> None:
    assert len(modules("reference")) > len(COMPONENTS)
    assert len(modules("conformance")) > len(COMPONENTS)
    assert any(name == "reference.attention" for name, _ in imported(Path("conformance/adapters/reference.py")))


@pytest.mark.parametrize("path", modules("reference"), ids=str)
def test_the_reference_stands_alone(path: Path) -> None:
    """numpy, torch and the standard library: whoever reads it needs nothing else, and it cannot lean on the judge."""
    assert not imports_of(path, {"conformance", "optimized", "fixtures", "tests"})
    foreign = {"__future__", "reference", "numpy", "torch"}
    standard = {"collections", "dataclasses", "functools", "math", "typing", "enum", "itertools", "io", "abc"}
    # An optional extra: only pixels that must be resampled need it.
    extra = {"PIL"} if path.name == "images.py" else set()
    assert {name.partition(".")[0] for name, _ in imported(path)} <= foreign | standard | extra


@pytest.mark.parametrize("path", modules("optimized"), ids=str)
def test_the_kernels_do_not_lean_on_the_reference(path: Path) -> None:
    assert not imports_of(path, {"reference", "conformance", "tests"})


@pytest.mark.parametrize("path", modules("conformance"), ids=str)
def test_the_suite_knows_implementations_only_by_their_adapters(path: Path) -> None:
    if KNOWING.isdisjoint(path.parents):
        assert not imports_of(path, {"reference", "optimized"})
    assert not imports_of(path, {"tests"})


def test_what_judges_shares_no_code_with_what_computes() -> None:
    """The judge and its formats are numpy only: a rounding that torch has wrong must not be wrong in both."""
    for package in ("conformance/judge", "conformance/formats"):
        for path in modules(package):
            assert not imports_of(path, {"torch"})


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_is_a_module_under_the_same_name(component: str) -> None:
    assert (ROOT / "reference" / f"{component}.py").is_file()
    assert (ROOT / "conformance" / "cases" / f"{component}.py").is_file()
    assert any(method.component == component for method in METHODS.values())


def test_components_are_named_once_and_methods_belong_to_them() -> None:
    assert len(set(COMPONENTS)) == len(COMPONENTS)
    assert {method.component for method in METHODS.values()} <= set(COMPONENTS)
