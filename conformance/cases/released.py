"""Cases of a recipe set: components at the released widths, weights and inputs from a formula.

The cheap ones are part of every run; what takes seconds has level `full`, which `--set` includes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from conformance.cases import released_attention, released_engram, released_kernels, released_mixture, released_small
from conformance.cases.case import Case
from conformance.cases.released_set import Released
from conformance.fixtures import RecipeSet
from conformance.judge.noise import Floors


def cases(recipe: RecipeSet, floors: Floors) -> Iterator[Case]:
    """All cases of the set: those whose recordings are there, and those that need none."""
    released = Released(recipe)
    makers: Mapping[str, Callable[[Released, str], Iterator[Case]]] = {
        "attention": partial(released_attention.cases, floors=floors),
        "attention_short": partial(released_attention.cases, floors=floors),
        "hyper_connections": released_small.hyper_connections,
        "rotary": released_small.rotary,
        "moe": released_mixture.cases,
        "engram": released_engram.cases,
    }
    for stem, make in makers.items():
        if stem in released.parts:
            yield from make(released, stem)
    yield from released_kernels.cases(released)
    yield from released_small.storage(released)
