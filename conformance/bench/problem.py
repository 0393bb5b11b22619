"""What a benchmark puts to an implementation: inputs for several calls, and what may come back.

A judgement at the width of a benchmark would cost more than the benchmark if every row were different.  So the rows of
an input (tokens, queries, requests) are drawn from a small pool of different ones, each call in an order of its own:
bounds are computed for the pool alone, and every row of every output is judged by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from conformance.cases.model import released_configuration
from conformance.config import ModelConfig
from conformance.deviations import DEVIATIONS
from conformance.interface import METHODS, Implementation
from conformance.judge import accumulators, deviations
from conformance.judge.expectations import Verdict
from conformance.recipe import RecipeTensor, key
from conformance.tensors import Tensor

Ints = npt.NDArray[np.int64]
Sizes = Mapping[str, int]
Arguments = Mapping[str, Any]
Bind = Callable[[Implementation, Arguments], Callable[[], Any]]

Made = TypeVar("Made")

SEED = 20
POOL = 16
"""Different rows of an input."""


class SizesError(Exception):
    """Sizes that a kernel cannot have; the message names them."""


@dataclass(frozen=True)
class Counts:
    """What one call must do at least, from its shapes."""

    operations: float
    """Of the arithmetic that the equations state; a multiplication and its addition are two."""
    moved: int
    """Bytes of the arguments that are read and of the results, each once, in the types of the interface."""
    weights: int = 0
    """Bytes of packed weights among them."""
    packed: int = 0
    """Bytes of a cache in the model's packed form, where the interface has it unpacked."""


@dataclass(frozen=True)
class Problem:
    """One kernel at one shape."""

    rows: tuple[int, ...]
    """Leading axes of every result: each entry of them is a row."""
    pool: int
    """Number of different rows."""
    own: Callable[[int, Ints], Arguments]
    """Arguments of call number n, given which row of the pool each of its rows is."""
    judge: Callable[[Mapping[str, Tensor], Ints], Sequence[Verdict]]
    """Verdicts on rows [m, ...] of the results, given which row of the pool each is."""
    counts: Counts
    bind: Bind
    taps: tuple[str, ...]
    """Names of what `bind`'s calls return, in order."""
    shared: Arguments = field(default_factory=dict)
    """Arguments that all calls read: larger than any cache, or too small to matter."""

    def which(self, call: int) -> Ints:
        """The pool's rows of one call: each about equally often, in an order that no other call has."""
        count = int(np.prod(self.rows))
        if count == 1:
            return np.asarray([call % self.pool])
        order = np.random.default_rng([SEED, call]).permutation(count) % self.pool
        return np.asarray(order, dtype=np.int64)

    def arguments(self, call: int) -> Arguments:
        """All arguments of one call."""
        return {**self.shared, **self.own(call, self.which(call))}


def one_method(name: str) -> tuple[Bind, tuple[str, ...]]:
    """A kernel that is one method of the interface: how it is called, and its results."""

    def bind(implementation: Implementation, arguments: Arguments) -> Callable[[], Any]:
        method = getattr(implementation, name)
        return lambda: method(**arguments)

    return bind, METHODS[name].results


def lazily(compute: Callable[[], Made]) -> Callable[[], Made]:
    """Bounds that are computed when somebody asks, once for each accumulator and set of declared deviations."""
    known: dict[Any, Made] = {}

    def bounds() -> Made:
        way = (accumulators.current(), *(name for name in DEVIATIONS if deviations.active(name)))
        if way not in known:
            known[way] = compute()
        return known[way]

    return bounds


def made(name: str, kind: str, *shape: int) -> Tensor:
    """A tensor of a recipe's kind."""
    return RecipeTensor(f"bench/{name}", kind, shape, SEED).tensor()


def made_weight(name: str, kind: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """A quantised weight and its scales."""
    recipe = RecipeTensor(f"bench/{name}", kind, (outputs, inputs), SEED)
    return recipe.tensor(), recipe.scale.tensor()


def draws(name: str) -> np.random.Generator:
    """Random numbers of a name."""
    return np.random.default_rng(key(f"bench/{name}", SEED))


def nbytes(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.data.nbytes for tensor in tensors)


def configured(**sizes: int) -> tuple[Mapping[str, Any], ModelConfig]:
    """The released configuration with these sizes changed, as ports get it and as the judge reads it."""
    mapping = {**released_configuration(), **sizes}
    return mapping, ModelConfig.from_mapping(mapping, "a benchmark's configuration")


def require_multiple(sizes: Sizes, name: str, of: int) -> None:
    """Refuse a size that quantiser groups do not divide.

    Raises:
        SizesError: as said.
    """
    if sizes[name] % of:
        raise SizesError(f"{name} = {sizes[name]} is not a multiple of {of}")
