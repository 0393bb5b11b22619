"""Triton without a GPU for ports whose kernels are Triton's: its interpreter, with the repairs of `optimized`.

Import this module before anything imports Triton, which decides at its own import how kernels run.  A process that has
it runs kernels on the CPU also where there is a GPU, so that a target's values do not depend on the machine.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

if importlib.util.find_spec("triton") is None:
    raise ImportError("its kernels need triton: pip install 'dsv41-conformance[optimized]' (Linux)")
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("triton was imported before the port: set TRITON_INTERPRET=1")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

import optimized.device  # noqa: F401  (installs the repairs)


def _of_arrays(function: Any) -> Any:
    """A function of numpy arrays as one of a kernel's fp32 tensors."""

    def call(*tensors: Any) -> Any:
        handles = [tensor.handle for tensor in tensors]
        result = function(*(handle.data for handle in handles))
        return tl.tensor(interpreter.TensorHandle(result, handles[0].dtype), tensors[0].type)

    return call


def _repair_comparisons() -> None:
    """A comparison's result is of one bit: as shipped it says it is of its operands' type, and no mask once splat."""
    shipped = interpreter.InterpreterBuilder.binary_op

    def operation(self: Any, left: Any, right: Any, function: Any) -> Any:
        result = shipped(self, left, right, function)
        if result.data.dtype == np.bool_:
            return interpreter.TensorHandle(result.data, tl.int1)
        return result

    interpreter.InterpreterBuilder.binary_op = operation


_repair_comparisons()

# The interpreter has no device library: its functions do nothing there and return nothing.
libdevice.rint = _of_arrays(np.rint)
libdevice.copysign = _of_arrays(np.copysign)
