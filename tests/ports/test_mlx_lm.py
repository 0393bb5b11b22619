"""mlx-lm, where it is installed: what its adapter adds must not add to its numbers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("mlx-lm is not installed", allow_module_level=True)

from conformance.ports.mlx_lm.arrays import to_mlx, to_torch
from conformance.ports.mlx_lm.indexing import in_order

CONFORMING = ("linear", "norm", "hyper_connections", "candidates", "experts", "sampling")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
def test_arrays_keep_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.arange(-40, 40).to(dtype).reshape(2, 5, 8) / (3 if dtype.is_floating_point else 1)
    assert torch.equal(to_torch(to_mlx(tensor.to(dtype))), tensor.to(dtype))


def test_selected_positions_are_told_in_order_with_nothing_last() -> None:
    assert in_order(torch.tensor([[3, -1, 0, 7, -1]])).tolist() == [[0, 3, 7, -1, -1]]


@pytest.mark.parametrize("component", CONFORMING)
def test_it_conforms_with_what_it_declares(component: str) -> None:
    command = [sys.executable, "-m", "conformance", "check", "mlx-lm", "--level", "smoke", "--component", component]
    assert subprocess.run(command, timeout=600).returncode == 0
