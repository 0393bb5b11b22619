"""Operands for which every order of an fp32 sum gives the same bits, so that a matrix product can be judged exactly.

All products are multiples of one power of two, the quantum.  While the sum of their absolute values stays below 2^24
quanta, every partial sum is a number of fp32: nothing is ever rounded before the output is.
"""

from __future__ import annotations

import numpy as np

from conformance.judge.bounded import Floats

FP32_SIGNIFICANDS = 2.0**24


def quantum(values: Floats) -> float:
    """The largest power of two that divides every value; 1 if all are zero."""
    nonzero = np.abs(values[values != 0])
    if not nonzero.size:
        return 1.0
    mantissa, exponent = np.frexp(nonzero)
    digits = (mantissa * 2.0**53).astype(np.int64)
    return float(np.ldexp((digits & -digits).astype(np.float64), exponent - 53).min())


def exact_product(a: Floats, b: Floats) -> Floats:
    """a [..., M, K] times b [..., N, K] transposed, exact: [..., M, N].

    Raises:
        ValueError: the operands are not on a lattice, some order of the sum could round.
    """
    quanta = np.abs(a) @ np.abs(b).swapaxes(-1, -2) / (quantum(a) * quantum(b))
    if quanta.max() >= FP32_SIGNIFICANDS:
        raise ValueError(f"not a lattice: sums of up to {quanta.max():.0f} quanta, fp32 holds 2^24")
    return np.asarray(a @ b.swapaxes(-1, -2))


def integers(seed: int, shape: tuple[int, ...], largest: int) -> Floats:
    """Whole numbers from -largest to largest."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float64)


def signs(seed: int, shape: tuple[int, ...]) -> Floats:
    """+1 and -1."""
    return np.asarray(np.random.default_rng(seed).integers(0, 2, shape) * 2.0 - 1.0, dtype=np.float64)
