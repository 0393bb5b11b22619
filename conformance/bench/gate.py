"""The gate: results are judged by the suite's own bounds before a time is taken and after it.

What is judged after it are the results of the timed calls themselves, in memory that was overwritten before they ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from conformance.adapters.in_process import from_port
from conformance.bench.problem import Ints, Problem
from conformance.errors import in_one_line
from conformance.interface import Description
from conformance.judge import accumulators, deviations, fp4_codes
from conformance.judge.expectations import Verdict
from conformance.tensors import Tensor

PIECE = 1 << 22
"""Elements judged at a time."""
POISON = 0xFF
"""Byte that results are overwritten with: a NaN in every float format of the suite, -1 as an integer."""


class Refused(Exception):
    """A kernel whose results are wrong gets no number; the message says what is wrong."""


def judge(problem: Problem, description: Description, call: int, returned: Any) -> None:
    """Judge what one call returned.

    Raises:
        Refused: something is wrong with it.
    """
    results = _named(problem, returned)
    which = problem.which(call)
    with (
        accumulators.judging(description.accumulator),
        deviations.judging(description.deviations),
        fp4_codes.judging(description.conventions),
    ):
        for rows in _different(results, which):
            part = {tap: tensor[rows] for tap, tensor in results.items()}
            for verdict in problem.judge(part, which[rows]):
                if not verdict.passed:
                    raise Refused(_words(verdict, rows))


def _named(problem: Problem, returned: Any) -> Mapping[str, Tensor]:
    """Results by tap, their leading axes joined to one of rows."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    if len(values) != len(problem.taps):
        raise Refused(f"expected {len(problem.taps)} results ({', '.join(problem.taps)}), got {len(values)}")
    results = {}
    for tap, value in zip(problem.taps, values, strict=True):
        try:
            tensor = from_port(value)
        except Exception as error:
            raise Refused(f"{tap}: {in_one_line(error)}") from error
        lead = len(problem.rows)
        if tensor.shape[:lead] != problem.rows:
            raise Refused(f"{tap}: wrong shape {list(tensor.shape)}, expected {list(problem.rows)} in front")
        results[tap] = tensor.reshape(int(np.prod(problem.rows)), *tensor.shape[lead:])
    return results


def _different(results: Mapping[str, Tensor], which: Ints) -> Iterator[Ints]:
    """Rows to judge, a piece at a time: of those with the same inputs and the same bits, the first."""
    flat = [np.ascontiguousarray(tensor.data).reshape(len(which), -1) for tensor in results.values()]
    seen: dict[tuple[int, ...], int] = {}
    for row, source in enumerate(which.tolist()):
        seen.setdefault((source, *(hash(part[row].tobytes()) for part in flat)), row)
    rows = np.asarray(sorted(seen.values()))
    step = max(1, PIECE // max(1, *(part.shape[1] for part in flat)))
    yield from (rows[start : start + step] for start in range(0, len(rows), step))


def _words(verdict: Verdict, rows: Ints) -> str:
    index = verdict.index
    place = ""
    if verdict.axes and index and index[-len(verdict.axes)] < len(rows):
        row = int(rows[index[verdict.axes.index("row")]]) if "row" in verdict.axes else int(rows[0])
        place = f", first in row {row}"
    return f"{verdict.tap} ({verdict.mode}): {verdict.message}{place}; worst error/bound {verdict.ratio:.3g}"


def poison(returned: Any) -> None:
    """Overwrite results: whoever hands out the same memory again must write it again."""
    for value in returned if isinstance(returned, tuple | list) else (returned,):
        if isinstance(value, torch.Tensor):
            # What cannot be written in one piece, such as an element repeated by strides, stays as it is.
            with suppress(RuntimeError), torch.inference_mode():
                value.view(torch.uint8).fill_(POISON)
        elif isinstance(value, np.ndarray) and value.flags.writeable and value.flags.c_contiguous:
            value.reshape(-1).view(np.uint8)[...] = POISON


def aliased(returned: Any, inputs: Sequence[Any]) -> bool:
    """Whether a result lies in the memory of an input, which must not be overwritten."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    held = {_memory(value) for value in inputs if isinstance(value, torch.Tensor)} - {None}
    if any(isinstance(value, torch.Tensor) and _memory(value) in held for value in values):
        return True
    given = [value for value in inputs if isinstance(value, np.ndarray)]
    return any(np.may_share_memory(array, value) for array in arrays for value in given)


def _memory(tensor: torch.Tensor) -> int | None:
    """Where a tensor's elements lie; None if it has none, or is of a kind without memory in one piece."""
    with suppress(NotImplementedError):
        return tensor.untyped_storage().data_ptr() if tensor.numel() else None
    return None
