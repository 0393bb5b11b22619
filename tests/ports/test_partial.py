"""Modules of a package that runs only in part, tried on a package that would not run as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.interface import Unsupported
from conformance.ports.partial import LeftOut, Parts

FILES = {
    "__init__.py": "raise RuntimeError('the whole engine was imported')",
    "layers/__init__.py": "raise RuntimeError('all layers were imported')",
    "layers/norm.py": """
from engine.platform import is_gpu
from engine.layers.linear import Linear, Config
from engine.layers import helpers, shared
from .shared import double
import engine.distributed.groups as groups

ON_GPU = is_gpu()

class Norm(Linear):
    def forward(self, x: Config | None) -> int:
        return (double(x) + shared.double(x)) // 2

def scattered(x):
    return groups.world().scatter(x)
""",
    "layers/shared.py": "def double(x):\n    return 2 * x\n",
    "layers/greedy.py": "from engine.platform import pick\nCHOSEN = pick()\n",
    "layers/counting.py": "from engine.platform import rows\nROWS = rows + 1\n",
    "layers/broken.py": "import a_package_that_is_not_installed\n",
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    for name, text in FILES.items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    modules = ("norm", "shared", "greedy", "counting", "broken", "gone")
    yield Parts("engine", tuple(f"engine.layers.{name}" for name in modules), {"engine.platform.is_gpu": lambda: False})
    for name in [name for name in sys.modules if name.partition(".")[0] == "engine"]:
        del sys.modules[name]


def test_a_listed_module_runs_and_nothing_above_it_does(parts: Parts) -> None:
    norm = parts.function("engine.layers.norm", "Norm")
    assert norm().forward(4) == 8
    assert parts.module("engine.layers.norm").ON_GPU is False


def test_what_is_left_out_says_so_when_it_is_used(parts: Parts) -> None:
    scattered = parts.function("engine.layers.norm", "scattered")
    with pytest.raises(LeftOut, match=r"engine\.distributed\.groups\.world is called"):
        scattered(1)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("gone", "anything", "No module named 'engine.layers.gone'"),
        ("norm", "anything", "engine.layers.norm has no anything"),
        ("norm", "Config", "engine.layers.norm has no Config"),
        ("greedy", "CHOSEN", "engine.platform.pick is called"),
        ("counting", "ROWS", "unsupported operand"),
        ("broken", "anything", "a_package_that_is_not_installed"),
    ],
)
def test_what_a_version_lacks_is_unsupported_with_the_reason(parts: Parts, module: str, name: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        parts.function(f"engine.layers.{module}", name)


def test_other_packages_are_none_of_its_business(parts: Parts) -> None:
    parts.function("engine.layers.norm", "Norm")
    with pytest.raises(ModuleNotFoundError):
        __import__("another_engine.layers")
