"""SGLang and vLLM as targets, with packages that have a function or two of theirs and nothing else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SGLANG_QUANTIZE = """
import torch
from sglang.srt.distributed import group
def fake_quant_fp4(x):
    grid = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
    scaled = groups / scale
    distance = (scaled.abs().unsqueeze(-1) - grid).abs()
    even = torch.arange(8) % 2
    nearest = (distance + even * 1e-6).argmin(-1)
    return (grid[nearest] * scaled.sign() * scale).flatten(-2).to(x.dtype)
"""
VLLM_WRITE = """
import torch
from vllm.distributed import group
def mhc_post_torch(x, residual, post, comb):
    mixed = torch.einsum("...ij,...ih->...jh", comb, residual.float())
    return (mixed + post * x.unsqueeze(-2).float()).to(residual.dtype)
"""
ENGINES = {
    "sglang": ("kernels/ops/quantization/fp4_fake_quant.py", SGLANG_QUANTIZE, "quantize/fp4-e8m0-ties"),
    "vllm": ("model_executor/kernels/mhc/torch.py", VLLM_WRITE, "hyper_connections/lattice-write"),
}
FAULTS = {"sglang": ("even * 1e-6", "even * -1e-6"), "vllm": ('"...ij,...ih->...jh"', '"...ji,...ih->...jh"')}
CASES = {"sglang": "quantize/fp4-e8m0-fake/trace", "vllm": "hyper_connections/lattice-write/one-token"}
WRONG = {"sglang": "quantize/fp4-e8m0-every-value/fake", "vllm": "hyper_connections/lattice-write/one-hot-comb"}


def check(folder: Path, name: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Judge a package that has one module."""
    module = folder / name / ENGINES[name][0]
    module.parent.mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('the engine was imported')")
    module.write_text(text)
    (folder / "msgspec.py").write_text("")
    metadata = folder / f"{name}-7.0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.0\n")
    command = [sys.executable, "-m", "conformance", "check", name, "--explain", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("name", ENGINES)
def test_a_function_of_an_engine_is_judged_and_what_is_not_there_is_unsupported(name: str, tmp_path: Path) -> None:
    there, missing = CASES[name], "engram/layout/released"
    done = check(tmp_path, name, ENGINES[name][1], "-k", f"{there} or {missing}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 supported cases passed; 1 unsupported" in done.stdout
    assert f"{name} 7.0" in done.stdout
    assert f"No module named '{name}" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", ENGINES)
def test_a_mistake_of_an_engine_is_found(name: str, tmp_path: Path) -> None:
    text = ENGINES[name][1]
    assert FAULTS[name][0] in text
    done = check(tmp_path, name, text.replace(*FAULTS[name]), "-k", WRONG[name])
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAIL  {WRONG[name]}" in done.stdout


KERNEL = """
import torch
import conformance.adapters.interpreted_triton
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def kernel(table, chosen, out, first, end):
    row = tl.load(chosen).to(tl.int64)
    owned = (row >= first) & (row < end)
    x = tl.load(table + tl.where(owned, row, 0) * 4 + tl.arange(0, 4), mask=owned, other=9.0)
    tl.store(out + tl.arange(0, 4), libdevice.copysign(libdevice.rint(x), -x))


for chosen in (1, 5):
    table, out = torch.tensor([[0.0] * 4, [0.5, 1.5, -2.5, 3.7]]), torch.empty(4)
    kernel[(1,)](table, torch.tensor([chosen]), out, 0, 2)
    print(*out.tolist())
"""


def test_the_interpreter_has_what_the_engines_kernels_need(tmp_path: Path) -> None:
    """Rounding and signs of the device library, and a mask that is one comparison for a whole row."""
    script = tmp_path / "kernel_of_an_engine.py"
    script.write_text(KERNEL)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["-0.0 -2.0 2.0 -4.0", "-9.0 -9.0 -9.0 -9.0"]


def test_triton_that_was_imported_before_is_told(tmp_path: Path) -> None:
    script = tmp_path / "too_late.py"
    script.write_text("import triton\nimport conformance.adapters.interpreted_triton\n")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stderr.splitlines()[-1] == "ImportError: triton was imported before the port: set TRITON_INTERPRET=1"
