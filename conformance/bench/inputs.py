"""Inputs in memory: as many sets of them as no cache holds, each call getting the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from conformance.bench.problem import Arguments, Problem
from conformance.bench.subjects import Subject
from conformance.bench.units import scaled
from conformance.cases.case import is_weights
from conformance.errors import ConformanceError
from conformance.tensors import Tensor

FEWEST, MOST = 2, 16
"""Sets of inputs: two at least, so that a result kept from the call before is a wrong one."""
COLD = 2
"""Sets take so many times the last cache, where `MOST` of them can."""


class TooLarge(ConformanceError):
    """The inputs do not fit into the memory that is free."""


def nbytes(arguments: Arguments) -> int:
    """Bytes of all tensors among arguments."""
    return sum(tensor.data.nbytes for _, tensor in _tensors(arguments))


def _tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif is_weights(value):
            yield from ((f"{name}[{key}]", tensor) for key, tensor in value.items())


class Inputs:
    """The sets of one problem for subjects that take the same kind of tensors on the same device.

    Attributes:
        sets: arguments as they are handed over, one set a call.

    Raises:
        TooLarge: two sets do not fit.
    """

    def __init__(self, problem: Problem, subject: Subject) -> None:
        self._problem, self._subject = problem, subject
        free = subject.device.free_bytes()
        if free is not None and problem.counts.moved > free:
            # Said before any input is made.
            moved = scaled(problem.counts.moved, "B")
            raise TooLarge(f"its arguments and results take {moved}, and {scaled(free, 'B')} are free")
        shared, own = nbytes(problem.shared), nbytes(problem.own(0, problem.which(0)))
        wanted = COLD * subject.device.cache
        # The results, and what an implementation keeps for itself, need room too.
        fitting = MOST if free is None else (free // 2 - shared) // max(1, own)
        if fitting < FEWEST:
            needed = scaled(shared + FEWEST * own, "B")
            raise TooLarge(f"its inputs take {needed}, more than half of the {scaled(free or 0, 'B')} that are free")
        count = min(MOST, int(fitting), max(FEWEST, -(-wanted // max(1, own))))
        self._wanted, self._shared, self._own = wanted, shared, own
        convert = subject.convert
        kept = {name: _placed(value, convert) for name, value in problem.shared.items()}
        self.sets = [
            {**kept, **{name: _placed(value, convert) for name, value in problem.own(n, problem.which(n)).items()}}
            for n in range(count)
        ]

    def cold(self, count: int) -> bool:
        """Whether a call finds none of its inputs in the last cache: so many sets are larger than it, `COLD` times."""
        return count * self._own >= self._wanted or self._shared >= self._wanted

    def handed_over(self, number: int) -> list[Any]:
        """Every tensor of a set."""
        found: list[Any] = []
        for value in self.sets[number].values():
            found += value.values() if isinstance(value, Mapping) else [value]
        return [value for value in found if isinstance(value, torch.Tensor | np.ndarray)]

    def changed(self) -> str:
        """Name of an argument that is not what it was any more, empty if all are."""
        for number, given in enumerate(self.sets):
            original = self._problem.own(number, self._problem.which(number))
            for name, tensor in _tensors({**original, **(self._problem.shared if number == 0 else {})}):
                outer, _, key = name.partition("[")
                value = given[outer][key.removesuffix("]")] if key else given[outer]
                if not _equal(value, self._subject.convert(tensor)):
                    return name
        return ""


def _placed(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    return {name: convert(tensor) for name, tensor in value.items()} if is_weights(value) else value


def _equal(first: Any, second: Any) -> bool:
    """The same bits."""
    if isinstance(first, np.ndarray):
        return bool(first.tobytes() == np.asarray(second).tobytes())
    if not first.numel() or not first.dim():
        return bool((first == second).all())
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
