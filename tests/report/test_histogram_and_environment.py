"""What records and headers gained: counts of elements by error over bound, and what a run ran on."""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conformance.judge.bounded import Bounded
from conformance.judge.expectations import Exact, Ulp, Within
from conformance.judge.histogram import EDGES, OPEN, combined, histogram, of_equality
from conformance.report import environment
from conformance.tensors import Tensor


@pytest.mark.parametrize(
    ("ratio", "edge"),
    [
        (0.0, "0"),
        (5e-324, "0.00390625"),
        (2.0**-8, "0.00390625"),
        (np.nextafter(2.0**-8, 1), "0.0078125"),
        (0.5, "0.5"),
        (np.nextafter(0.5, 1), "1"),
        (1.0, "1"),
        (np.nextafter(1, 2), "2"),
        (256.0, "256"),
        (np.nextafter(256, 257), "inf"),
        (1e300, "inf"),
        (np.inf, "inf"),
        (np.nan, "inf"),
    ],
)
def test_a_bin_ends_at_its_name(ratio: float, edge: str) -> None:
    assert histogram(np.array([[ratio, ratio]])) == {edge: 2}


def test_every_element_is_counted_once() -> None:
    ratios = np.abs(np.random.default_rng(1).standard_cauchy(10_000))
    counts = histogram(ratios)
    assert sum(counts.values()) == 10_000
    assert sum(counts.get(edge, 0) for edge in EDGES[: EDGES.index("1") + 1]) == (ratios <= 1).sum()
    assert combined(counts, histogram(np.zeros(3))) == {**counts, "0": 3}


def test_of_equality() -> None:
    assert of_equality(8, 0) == {"0": 8}
    assert of_equality(8, 8) == {"inf": 8}


def test_rules_count_their_elements() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    actual = {"x": Tensor.from_values(np.array([1.0, 2.0, 3.5, 4.0]), "F32")}
    exact = Exact("x", Tensor.from_values(values, "F32"), ("feature",)).judge(actual)
    assert exact.histogram == {"0": 3, "inf": 1}
    open_ended = Bounded(values, np.array([0.1, 0.1, 1.0, np.inf]))
    within = Within("x", open_ended, "F32", ("feature",)).judge(actual)
    assert within.passed
    assert within.histogram == {"0": 2, "0.5": 1, "open": 1}
    steps = Ulp("x", values, "F32", 1, ("feature",)).judge(actual)
    assert steps.histogram == {"0": 3, "inf": 1}


def test_the_schema_names_the_bins() -> None:
    schema = json.loads(resources.files("conformance.report").joinpath("schemas/report.json").read_text())
    assert schema["$defs"]["tap"]["properties"]["histogram"]["propertyNames"]["enum"] == [*EDGES, OPEN]


def test_environment_names_devices_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda n: f"GPU {n}")
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8"))
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC version: 12\n")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", driver)
    found = environment.environment()
    assert found["devices"] == "GPU 0, GPU 1"
    assert found["cuda"] == "12.8"
    assert "550.54.15" in found["driver"]
    assert found["numpy"] == np.__version__


def test_environment_of_a_torch_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(environment, "NVIDIA_DRIVER", tmp_path / "missing")
    assert not {"devices", "cuda", "driver"} & set(environment.environment())
