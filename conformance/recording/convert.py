"""Between the recorder's torch tensors and the suite's `Tensor`; bits are moved, never rounded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from conformance.fixtures import TapSpec
from conformance.recording.upstream import RecordingError
from conformance.tensors import Tensor

#: Element type in a file by torch's name; packed FP4 is kept as its bytes.
DTYPES: Mapping[str, str] = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "uint8": "U8",
    "int8": "U8",
    "float4_e2m1fn_x2": "U8",
    "bool": "BOOL",
    "int32": "I32",
    "int64": "I64",
}
_INTEGERS = frozenset({"I32", "I64"})


def dtype_name(value: torch.Tensor) -> str:
    """Torch's name of the element type, such as `bfloat16`."""
    return str(value.dtype).removeprefix("torch.")


def tensor(value: torch.Tensor) -> Tensor:
    """The same bits as a `Tensor`.

    Raises:
        RecordingError: a type that no file holds.
    """
    name = dtype_name(value)
    if name not in DTYPES:
        raise RecordingError(f"no golden file holds elements of type {name}")
    flat = value.detach().contiguous().cpu()
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return Tensor.from_bytes(raw, DTYPES[name], tuple(flat.shape))


def tap(label: str, value: object, spec: TapSpec) -> Tensor:
    """A value seen at a tap, checked against what a file may hold there; integers may change their width.

    Raises:
        RecordingError: not a tensor, or of another type or number of axes.
    """
    if not isinstance(value, torch.Tensor):
        raise RecordingError(f"{label}: {type(value).__name__} instead of a tensor")
    seen = tensor(value)
    if seen.dtype in _INTEGERS and spec.dtype in _INTEGERS:
        seen = Tensor.from_values(seen.data, spec.dtype)
    if seen.dtype != spec.dtype or len(seen.shape) not in spec.ranks:
        raise RecordingError(f"{label}: {seen.dtype} {list(seen.shape)}, expected {spec.dtype} {list(spec.shapes)}")
    return seen


def fill(target: torch.Tensor, value: Tensor) -> None:
    """Overwrite a tensor of the same bytes with the bits of `value`."""
    raw = torch.from_numpy(np.frombuffer(bytearray(value.bits()), np.uint8))
    with torch.no_grad():
        target.data.view(torch.uint8).reshape(-1).copy_(raw)
