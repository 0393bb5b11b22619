"""Ports that others publish as targets: named, found or missing, and what is known of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import conformance.ports
from conformance.adapters.target import open_target
from conformance.cases import catalogue
from conformance.errors import TargetError
from conformance.expectations import read_expectations
from conformance.fixtures import Fixtures
from conformance.ports import PORTS, run
from conformance.ports.run import EXPECTATIONS, matrix
from conformance.report.reader import read_report

LIGHT = """
import sys, conformance.cli, conformance.ports
print(*(set(sys.modules) & {'mlx', 'mlx_lm', 'transformers', 'sglang', 'vllm', 'triton'}))
"""


def test_naming_the_ports_imports_none_of_them() -> None:
    assert subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("name", PORTS)
def test_a_port_without_its_package_is_one_line_that_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance.ports.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(TargetError) as error:
        open_target(name)
    assert f"the package {PORTS[name].packages[0]} is not installed; pip install" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_engines_are_installed_without_what_they_depend_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their dependencies are CUDA: 11 GB."""
    assert "pip install --no-deps" in PORTS[name].install
    commands: list[list[str]] = []
    site = tmp_path / name / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    monkeypatch.setattr(run.venv, "create", lambda *_, **__: site.mkdir(parents=True))
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: commands.append(command))
    run._environment(tmp_path / name, PORTS[name])
    assert [command[3:6] for command in commands] == [["--quiet", "install", "--no-deps"]]
    assert (tmp_path / name / ".ready").is_file()


@pytest.mark.parametrize("path", sorted(EXPECTATIONS.glob("*.toml")), ids=lambda path: path.stem)
def test_what_is_expected_of_a_port_is_of_a_port_and_about_cases_that_there_are(path: Path) -> None:
    assert path.stem in PORTS
    assert read_expectations(path).matching(catalogue.catalogue(Fixtures.open(None)))


def test_the_matrix_counts_cases_by_component(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "conformance", "check", "reference", "--json", str(report), "--level", "smoke"]
    subprocess.run([*command, "--component", "norm"], check=True, capture_output=True, timeout=300)
    table = matrix({"reference": read_report(report)})
    names, counts = (list(column.cells) for column in table.columns)
    assert counts[names.index("norm")] == "1 pass"
    assert counts[names.index("rotary")] == "-"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_conforms_where_it_shares_code_with_the_model() -> None:
    command = [sys.executable, "-m", "conformance", "check", "transformers", "--component", "norm"]
    assert subprocess.run([*command, "--component", "rotary"], timeout=300).returncode == 0
