"""The declared benchmarks under pytest-benchmark, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.bench import store

pytest.importorskip("pytest_benchmark")
ROOT = Path(__file__).parents[2]


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shapes = folder / "tiny.toml"
    shapes.write_text(
        '[[shape]]\nkernel = "rms_norm"\nname = "tiny"\nset = "small"\nsizes = { tokens = 8, width = 64 }\n'
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"),
            *("--pyargs", "conformance.bench.test_kernels", "--conformance-bench-shapes", str(shapes)),
            *("--benchmark-max-time", "0.01", "--benchmark-min-rounds", "3", *arguments),
        ],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_it_stores_and_compares(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--conformance-bench", "bench_ports:Right", "--benchmark-json", "times.json")
    assert done.returncode == 0, done.stdout
    (stored,) = store.read(tmp_path / "times.json")
    assert stored.id == "rms_norm/tiny"
    (benchmark,) = json.loads((tmp_path / "times.json").read_text())["benchmarks"]
    assert stored.declaration in benchmark["fullname"]
    assert benchmark["options"]["timer"] == "device_time"


def test_a_kernel_that_is_wrong_once_it_is_timed_fails(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--conformance-bench", "bench_ports:WrongOnceTimed")
    assert done.returncode == 1
    assert "its results are wrong: out (composed)" in done.stdout, done.stdout
