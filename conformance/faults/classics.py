"""The classics: what every case must notice, whatever it is about, done to the answers of the plain reference.

Only the required results are altered, and optional taps are withheld: a port need not show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapters.session import Answer
from conformance.faults.prepared import Given, PreparedCase, Results
from conformance.runner import FAILURES
from conformance.tensors import Tensor

Alteration = Callable[[Tensor, Tensor | None], Tensor]
"""Of a result and of the same result of the request before, if there was one of the same shape."""

NAN_CODES: Mapping[str, int] = {"F8_E4M3": 0x7F, "F8_E8M0": 0xFF, "BF16": 0x7FC0}


def zeros(result: Tensor, before: Tensor | None) -> Tensor:
    """Everything is zero: memory that was never written."""
    return Tensor(result.dtype, np.zeros_like(result.data))


def stale_row(result: Tensor, before: Tensor | None) -> Tensor:
    """The last row is the one before it, or the last call's where there is only one."""
    data = result.data.copy()
    axis = 1 if data.ndim > 2 else 0
    if data.ndim == 0 or not data.size:
        return result
    last = (slice(None),) * axis + (-1,)
    if data.shape[axis] > 1:
        data[last] = data[(slice(None),) * axis + (-2,)]
    elif before is not None:
        data[last] = before.data[last]
    return Tensor(result.dtype, data)


def one_nan(result: Tensor, before: Tensor | None) -> Tensor:
    """One element is NaN, in types that have one."""
    data = result.data.copy()
    if data.size and result.dtype in NAN_CODES:
        data.flat[data.size // 2] = NAN_CODES[result.dtype]
    elif data.size and result.dtype in ("F32", "F64", "F16"):
        data.flat[data.size // 2] = np.nan
    return Tensor(result.dtype, data)


CLASSICS: Mapping[str, Alteration] = {"zeros": zeros, "stale row": stale_row, "NaN": one_nan}
STATE = "state of "


@dataclass(frozen=True)
class Power:
    """Which classics a case was put to, and which it did not notice."""

    tried: tuple[str, ...]
    missed: tuple[str, ...]


def power(prepared: PreparedCase) -> Power:
    """Put all classics to a case: to its results, and to the states that it reads."""
    tried, missed = [], []
    requested = prepared.requested()
    for of_state in (False, True):
        for name, alter in CLASSICS.items():
            altered = _altered(prepared.answers, requested, alter, of_state)
            if altered is None:
                continue
            label = f"{name} in state" if of_state else name
            tried.append(label)
            if prepared.judge(altered).status not in FAILURES:
                missed.append(label)
    return Power(tuple(tried), tuple(missed))


def _altered(
    answers: Sequence[Given],
    requested: Sequence[tuple[str, tuple[str, ...]]],
    alter: Alteration,
    of_state: bool,
) -> list[Given] | None:
    """The answers with every required result, or every state, altered; None where that changes nothing."""
    before: dict[tuple[str, str], Tensor] = {}
    altered: list[Given] = []
    changed = False
    for given, (target, required) in zip(answers, requested, strict=True):
        assert not isinstance(given, Answer)
        is_state = target.startswith(STATE)
        names = tuple(given) if is_state or "counts" in required else required
        kept: Results = {name: given[name] for name in names if name in given}
        if is_state != of_state:
            altered.append(kept)
            continue
        result: dict[str, Tensor] = {}
        for name, tensor in kept.items():
            previous = before.get((target, name))
            usable = previous if previous is not None and previous.shape == tensor.shape else None
            result[name] = alter(tensor, usable)
            before[target, name] = tensor
            changed |= not np.array_equal(_numbers(result[name]), _numbers(tensor))
        altered.append(result)
    return altered if changed else None


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = np.asarray(tensor.values(), dtype=np.float64)
    return values
