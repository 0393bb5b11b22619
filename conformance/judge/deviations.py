"""Which declared deviations the judge's equations follow: a declared property, as the accumulator is.

A rule that depends on a deviation asks `active` where the specification has the step that is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from conformance.deviations import DEVIATIONS
from conformance.formats import BF16, FP32, Format

_current: ContextVar[frozenset[str]] = ContextVar("deviations", default=frozenset())


def active(name: str) -> bool:
    """Whether the implementation that is being judged declares this deviation."""
    assert name in DEVIATIONS, name
    return name in _current.get()


def any_active() -> bool:
    """Whether it declares any."""
    return bool(_current.get())


def score_format() -> Format:
    """What index scores and everything they are added up from are rounded to (numerics.md 6.3)."""
    return FP32 if active("fp32-index-scores") else BF16


@contextmanager
def judging(names: Collection[str]) -> Iterator[None]:
    """Judge by the equations with these deviations while the context lasts."""
    token = _current.set(frozenset(names))
    try:
        yield
    finally:
        _current.reset(token)
