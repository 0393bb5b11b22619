"""Repairs of Triton's interpreter, which runs kernels as numpy on the CPU and is silently wrong on narrow floats.

As shipped, a cast to bf16 truncates, one to E4M3 rounds ties wrongly and does not saturate, arithmetic and `tl.dot` on
bf16 work on the bits as if they were integers, and sums over bf16 do so too.  Each repair below says what it mends.
They reach into Triton's own classes, so they are installed only into versions that the tests ran with.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

TESTED_VERSIONS = ("3.6.0", "3.9.0")

TORCH_DTYPES = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
"""Casts to these saturate, as the hardware's do."""

NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
"""Types that numpy does not have: the interpreter keeps their bits in unsigned integers."""

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

Handle = Any
"""Triton's `TensorHandle`: numpy data and a Triton type."""


def convert(data: np.ndarray[Any, Any], source: Any, target: Any) -> np.ndarray[Any, Any]:
    """Data of one floating type as bits of another, rounded to nearest even, saturating to 8-bit types; NaN stays."""
    size = data.dtype.itemsize
    values = torch.from_numpy(np.ascontiguousarray(data).view(_BITS[size]).copy()).view(TORCH_DTYPES[source])
    if target in LARGEST:
        # The cast itself saturates in some versions of torch only.
        wide = values.float()
        values = torch.where(wide.isnan(), wide, wide.clamp(-LARGEST[target], LARGEST[target]))
    converted = values.to(TORCH_DTYPES[target]).contiguous()
    bits = converted.view(_SIGNED[converted.element_size()]).numpy().reshape(data.shape)
    result: np.ndarray[Any, Any] = bits.view(interpreter._get_np_dtype(target))
    return result


def _narrow(handle: Handle) -> bool:
    return handle.dtype.scalar in NARROW


def _widened(handle: Handle) -> Handle:
    """A handle's values in fp32."""
    if not _narrow(handle):
        return handle
    return interpreter.TensorHandle(convert(handle.data, handle.dtype.scalar, tl.float32), tl.float32)


def _rounded(handle: Handle, dtype: Any) -> Handle:
    """A result of fp32 arithmetic in the narrow type; comparisons stay what they are."""
    if handle.data.dtype == np.bool_:
        return handle
    return interpreter.TensorHandle(convert(handle.data.astype(np.float32), tl.float32, dtype), dtype)


def _repair_casts(builder: Any) -> None:
    """Casts between floating types round to nearest even, and integers reach bf16 and FP8 by value, not by bits."""
    shipped = builder.cast_impl

    def cast(self: Any, source: Handle, target: Any) -> Handle:
        old, new = source.dtype.scalar, target.scalar
        if old in TORCH_DTYPES and new in TORCH_DTYPES:
            return interpreter.TensorHandle(convert(source.data, old, new), new)
        if new in NARROW:
            return interpreter.TensorHandle(convert(source.data.astype(np.float32), tl.float32, new), new)
        return shipped(self, _widened(source), target)

    builder.cast_impl = cast
    builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)


def _repair_arithmetic(builder: Any) -> None:
    """Arithmetic and comparisons of narrow types happen in fp32 and are rounded once."""

    def repaired(name: str, count: int) -> None:
        shipped = getattr(builder, name)

        def operation(self: Any, *arguments: Any) -> Handle:
            handles, rest = arguments[:count], arguments[count:]
            if not any(_narrow(handle) for handle in handles):
                return shipped(self, *arguments)
            dtype = next(handle.dtype.scalar for handle in handles if _narrow(handle))
            return _rounded(shipped(self, *map(_widened, handles), *rest), dtype)

        setattr(builder, name, operation)

    for name, count in (("binary_op", 2), ("unary_op", 1), ("create_fma", 3), ("create_clampf", 3)):
        repaired(name, count)


def _repair_dot(builder: Any) -> None:
    """`tl.dot` multiplies narrow operands by value; products of two of them are exact in fp32."""
    shipped = builder.create_dot

    def dot(self: Any, a: Handle, b: Handle, total: Handle, *rest: Any) -> Handle:
        return shipped(self, _widened(a), _widened(b), total, *rest)

    builder.create_dot = dot


def _refuse_narrow_reductions(builder: Any) -> None:
    """A reduction over narrow floats has no defined rounding: kernels must widen first."""
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        shipped = operations.apply

        def apply(self: Any, values: Any, shipped: Callable[..., Any] = shipped) -> Any:
            for value in values if isinstance(values, tuple) else (values,):
                if value.dtype.scalar in NARROW:
                    raise TypeError(f"reduction over {value.dtype}: cast to fp32 first")
            return shipped(self, values)

        operations.apply = apply


def _repair_scalar_bounds(builder: Any) -> None:
    """Loop bounds known only at run time are one-element arrays, which some numpy versions refuse as integers."""
    shipped = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        shipped(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch


def _repair_device_functions(builder: Any) -> None:
    """A function called by a kernel restores the language as it found it, also when it raises.

    The language is remapped once a launch, not again in every function that the kernel calls, which took most time.
    """
    shipped = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    remapped = False

    def patch(function: Any) -> Any:
        nonlocal remapped
        if remapped:
            return interpreter._LangPatchScope()
        scope = shipped(both)
        restore = scope.restore
        remapped = True

        def restored() -> None:
            nonlocal remapped
            remapped = False
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        scope = interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*arguments, **keywords)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    interpreter.InterpretedFunction.__call__ = call


REPAIRS: tuple[Callable[[Any], None], ...] = (
    _repair_casts,
    _repair_arithmetic,
    _repair_dot,
    _refuse_narrow_reductions,
    _repair_scalar_bounds,
    _repair_device_functions,
)
_installed = False


def install() -> None:
    """Install the repairs once.

    Raises:
        RuntimeError: a Triton version that they were not tested with.
    """
    global _installed
    if _installed:
        return
    if triton.__version__ not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        raise RuntimeError(f"triton {triton.__version__}: its interpreter is repaired for {tested} only")
    for repair in REPAIRS:
        repair(interpreter.InterpreterBuilder)
    _installed = True
