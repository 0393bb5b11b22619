"""What launchers require of their arguments: a kernel reads memory as it is told, whatever lies there."""

from __future__ import annotations

import torch


def require_bf16(name: str, x: torch.Tensor) -> torch.Tensor:
    """A contiguous bf16 tensor with at least one axis.

    Raises:
        TypeError: another dtype.
    """
    if x.dtype != torch.bfloat16 or x.dim() == 0:
        raise TypeError(f"{name}: expected bf16 with at least one axis, got {x.dtype} {list(x.shape)}")
    return x.contiguous()


def require_codes(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor of 8-bit codes, contiguous uint8; they may come as uint8 already.

    Raises:
        TypeError: another dtype.
    """
    if x.dtype not in (dtype, torch.uint8):
        raise TypeError(f"{name}: expected {dtype} or its bytes as torch.uint8, got {x.dtype}")
    return x.contiguous().view(torch.uint8)


def require_shape(name: str, x: torch.Tensor, *shape: int) -> torch.Tensor:
    """A contiguous tensor of this shape.

    Raises:
        ValueError: another shape.
    """
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    return x.contiguous()


def require_state(name: str, x: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """State that a kernel writes to in place: [slots, rows, width], contiguous, at least one row.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or not contiguous: a copy would be written to instead.
    """
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if x.dim() != 3 or x.shape[-1] != width or not x.numel():
        raise ValueError(f"{name}: expected [slots, rows, {width}] with at least one row, got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: not contiguous, a copy of it would be written to")
    return x
