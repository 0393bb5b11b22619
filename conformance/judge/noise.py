"""Noise floors: how far honest variants of the reference land from the recorded traces.

They are measured, never derived, so that a reader can see what a `propagated` verdict rests on: each floor is the
largest distance of any variant, times a stated margin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from conformance.errors import FixtureError

MARGIN = 4.0
"""A few variants are few samples of a maximum; faults of interest move a tap by far more than four times the noise."""


class Distance(NamedTuple):
    """How far a tap is from a recorded trace over a case."""

    largest: float
    """Largest relative distance of a call."""
    median: float
    """Median relative distance of the positions."""
    scale: float
    """Largest |log2| of a call's norm over the recorded norm: noise turns a tensor but hardly shrinks it."""


LEAST = Distance(2.0**-8, 2.0**-8, 2.0**-8)
"""No floor below half a bf16 ulp: variants that happened to be bit equal say nothing about the next one."""

LEAST_FREE_RUNNING = Distance(2.0**-3, 2.0**-3, 2.0**-5)
"""The same where several layers run freely: the step of an FP8 code relative to its element, for the norm a quarter.

A relative difference d before a quantiser with code spacing s makes d/s of its elements take the other code, each wrong
by s: sqrt(d·s) in norm.  With FP8's s between 2^-4 and 2^-3, half a bf16 ulp becomes 1 % behind one quantiser and 3 %
behind two, and tends to s itself.  Where the rounding of the probabilities was relative to another maximum, a first
layer's ffn_in was seen to move by 0.8 ‰, its ffn_out by 1 %, and the second layer's attn_out by 6 %.
"""

FREE_RUNNING = ("stack/", "model/", "dspark/model-")
"""How the ids of cases begin that run several layers freely."""

LARGEST = 2.0
"""Two tensors of equal norm are at most twice that norm apart."""

Distances = Mapping[str, Distance]
"""By tap."""

Allowing = Callable[[str, Distance], Distance]
"""What is allowed a tap in place of what its rule allows."""

_allowing: ContextVar[Allowing | None] = ContextVar("allowing", default=None)


@contextmanager
def allowing(instead: Allowing) -> Iterator[None]:
    """Allow `propagated` taps something else than their rules do while the context lasts."""
    token = _allowing.set(instead)
    try:
        yield
    finally:
        _allowing.reset(token)


def allowed(tap: str, by_rule: Distance) -> Distance:
    """What a tap is allowed."""
    instead = _allowing.get()
    return by_rule if instead is None else instead(tap, by_rule)


class Floors(Protocol):
    """The allowance of each tap of a `propagated` case."""

    def allowance(self, case_id: str, tap: str) -> Distance:
        """Allowed relative distances of a tap in a case."""

    def describe(self) -> str:
        """One line for reports."""


class UnitFloors:
    """Floors of one: error over bound is then the distance itself, as it is needed for measuring."""

    def allowance(self, case_id: str, tap: str) -> Distance:
        """One, whatever the tap."""
        return Distance(1.0, 1.0, math.inf)

    def describe(self) -> str:
        """One line for reports."""
        return "the distance itself"


@dataclass
class NoiseFloors:
    """Distances by case and tap: from a file where it knows the case, measured on first use elsewhere."""

    measure: Callable[[str], Distances]
    """Runs the honest variants through a case, by id."""
    known: dict[str, Distances] = field(default_factory=dict)
    origin: str = "measured in this run"

    def allowance(self, case_id: str, tap: str) -> Distance:
        """Allowed relative distances of a tap in a case."""
        if case_id not in self.known:
            self.known[case_id] = self.measure(case_id)
        least = LEAST_FREE_RUNNING if case_id.startswith(FREE_RUNNING) else LEAST
        return with_margin(self.known[case_id], tap, least)

    def describe(self) -> str:
        """One line for reports."""
        return f"{MARGIN:g} times the farthest of the reference's honest variants, {self.origin}"


def with_margin(seen: Distances, tap: str, least: Distance) -> Distance:
    """The allowance that follows from what was seen of a tap, if anything was, and not less than `least`."""
    farthest = seen.get(tap, Distance(0.0, 0.0, 0.0))
    return Distance(*(max(MARGIN * distance, floor) for distance, floor in zip(farthest, least, strict=True)))


BySet = dict[str, dict[str, Distances]]
"""By golden set and case."""


def read(path: Path, lock_hash: str) -> BySet:
    """Stored distances, empty when there is no file or it was made for other recordings.

    Raises:
        FixtureError: the file is not of the format; one line.
    """
    if not path.is_file():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != 1:
            raise FixtureError(f"{path.name}: format {content['format']!r} is not known, expected 1")
        stored: BySet = {
            name: {case: {tap: _distance(numbers) for tap, numbers in taps.items()} for case, taps in cases.items()}
            for name, cases in content["distances"].items()
        }
        return stored if content["lock"] == lock_hash else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise FixtureError(f"{path.name}: not a noise floor file: {type(error).__name__}: {error}") from error


def _distance(numbers: Any) -> Distance:
    """Three stored numbers, as a measurement can give them: noise does not reach beyond `LARGEST`."""
    if not isinstance(numbers, list) or len(numbers) != len(Distance._fields):
        raise ValueError(f"expected {len(Distance._fields)} numbers, got {str(numbers)[:40]}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= LARGEST:
            raise ValueError(f"{str(number)[:40]} is not a distance between 0 and {LARGEST:g}")
    return Distance(*map(float, numbers))


def write(path: Path, lock_hash: str, made: Mapping[str, Any], distances: BySet) -> None:
    """Store distances with how they were made."""
    content = {"format": 1, "lock": lock_hash, "made": made, "distances": distances}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
