"""Rounding points and the arithmetic between them (numerics.md 0).

Every function of this package that does floating-point arithmetic takes `compute`, the type of the arithmetic between
two rounding points.  float32 is the model's own.  With float64 the rounding points stay where they are and the error
in between all but vanishes, which makes a yardstick for implementations that sum in another order.
"""

from __future__ import annotations

import torch

BF16_SIGNIFICAND_BITS = 8
BF16_SMALLEST_EXPONENT = -133
"""The smallest positive bf16 number is 2**-133."""


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as float64, built from its bits: int [...] in -1022..1023 -> float64 [...]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even into `dtype`: [...] -> [...] (numerics.md 0).

    A conversion from float64 to bf16 that passes through float32 rounds twice.  The value is therefore rounded to a
    multiple of bf16's spacing while it is still float64, after which the conversion is exact.
    """
    if x.dtype != torch.float64 or dtype != torch.bfloat16:
        return x.to(dtype)
    _, exponent = torch.frexp(x)
    spacing = power_of_two((exponent - BF16_SIGNIFICAND_BITS).clamp(min=BF16_SMALLEST_EXPONENT))
    return (torch.round(x / spacing) * spacing).to(dtype)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The arrow "→bf16" of numerics.md: [...] -> bf16 [...]."""
    return round_to(x, torch.bfloat16)
