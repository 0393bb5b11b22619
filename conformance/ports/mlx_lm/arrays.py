"""torch tensors as mlx arrays and back, and what mlx's CPU backend needs to run the model.

Imported only where mlx is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

mx: Any = importlib.import_module("mlx.core")
nn: Any = importlib.import_module("mlx.nn")

MATRIX_PRODUCTS = ("gather_mm", "gather_qmm", "quantized_matmul")
"""On the CPU the first takes no bf16 at all, the others sum bf16 products in bf16."""


def to_mlx(tensor: torch.Tensor) -> Any:
    """The same bits as an mlx array; 8-bit floats become uint8 codes, as mlx's own loader reads them."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        return mx.array(tensor.view(torch.uint8).numpy())
    return mx.array(tensor.numpy())


def to_torch(array: Any) -> torch.Tensor:
    """The same bits as a torch tensor; evaluates the array."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def repair_cpu_backend() -> bool:
    """Let the matrix products that need it compute in fp32 and round once; returns whether this device needs it.

    Acts on the module `mlx.core` of this process, once; a device other than the CPU keeps its own products.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return False
    for name in MATRIX_PRODUCTS:
        product = getattr(mx, name)
        if not hasattr(product, "__wrapped__"):
            setattr(mx, name, _in_fp32(product))
    return True


def _in_fp32(product: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(product)
    def call(x: Any, *operands: Any, **options: Any) -> Any:
        if x.dtype not in (mx.bfloat16, mx.float16):
            return product(x, *operands, **options)
        wide = [o.astype(mx.float32) if isinstance(o, mx.array) and o.dtype == x.dtype else o for o in operands]
        return product(x.astype(mx.float32), *wide, **options).astype(x.dtype)

    return call


class Given(nn.Module):  # type: ignore[misc]
    """Stands where a submodule stood and answers with what it was made with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = (answer,)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The answer, whatever the question."""
        return self._answer[0]
