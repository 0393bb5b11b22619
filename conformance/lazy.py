"""Weights that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from conformance.recipe import RecipeScale, RecipeTensor
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, made at each look-up and kept by nobody: whoever walks through one holds one at a time.

    Iteration lists what a case needs; look-up knows every name of the model.
    """

    @abstractmethod
    def rows(self, name: str, rows: Ints) -> Tensor:
        """Rows [...] of a matrix without making the others: [..., K]."""

    def recipe(self, name: str) -> RecipeTensor | RecipeScale | None:
        """How a tensor is made, for those who make it themselves; None where no recipe says it."""
        return None

    def within(self, prefix: str) -> LazyTensors:
        """The tensors whose names begin with `prefix`, by the rest of the name."""
        return _Part(self, prefix)


class _Part(LazyTensors):
    def __init__(self, whole: LazyTensors, prefix: str) -> None:
        self._whole, self._prefix = whole, prefix

    def rows(self, name: str, rows: Ints) -> Tensor:
        return self._whole.rows(self._prefix + name, rows)

    def recipe(self, name: str) -> RecipeTensor | RecipeScale | None:
        return self._whole.recipe(self._prefix + name)

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._whole

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._whole if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
