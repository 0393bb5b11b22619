"""The kernels, interpreted, pass the gate of every benchmark: what a GPU would time is right at small sizes."""

from __future__ import annotations

import importlib.util

import pytest
from bench_problems import handed_over

from conformance.bench import gate, targets
from conformance.bench.declarations import Declaration
from conformance.bench.kernels import KERNELS
from conformance.errors import TargetError

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)

# Triton decides at its import whether kernels are interpreted.
import optimized.device
from conformance.adapters.optimized import Optimized
from conformance.bench.devices import Device

ROWS = {"tokens": 20, "width": 128}
PRODUCT = {"tokens": 20, "inputs": 128, "outputs": 96}
SIZES = {
    **dict.fromkeys(KERNELS, ROWS),
    **{name: PRODUCT for name in KERNELS if name.startswith("linear")},
    "compressed_rows": {"rows": 20},
    "experts": {"tokens": 9, "width": 128, "inner": 64, "experts": 16},
    "sparse_attention": {"requests": 1, "tokens": 9, "heads": 16, "rows": 64, "listed": 48},
    "index_select": {"requests": 1, "positions": 1024},
    "gate": {"tokens": 20, "width": 128, "experts": 64},
    "engram_hash": {"requests": 4, "tokens": 8},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_pass_the_gate(kernel: str) -> None:
    implementation = Optimized()
    problem = Declaration(kernel, "tiny", "small", SIZES[kernel]).problem()
    returned = problem.bind(implementation, handed_over(problem, 1))()
    gate.judge(problem, implementation.describe(), 1, returned)


@pytest.mark.skipif(not optimized.device.INTERPRETED, reason="the kernels are compiled here")
def test_interpreted_kernels_are_not_timed() -> None:
    with pytest.raises(TargetError, match="its kernels are interpreted here"):
        targets.open_subject("optimized", Device("cpu", "a device", 1), agreed=False)
