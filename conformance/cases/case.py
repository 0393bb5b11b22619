"""What a case is: an identity, the reason for it, and the steps of a conversation with the implementation.

A step asks for one thing (a call, or one advance of a stateful object) and carries the rules for the answer.  Questions
never depend on earlier answers, so the same steps can be put to a function, to a process, or written to a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from conformance.judge.expectations import Axes, Expectation, Mode
from conformance.lazy import LazyTensors
from conformance.tensors import Tensor

Level = Literal["smoke", "core", "full"]
LEVELS: tuple[Level, ...] = ("smoke", "core", "full")

Arguments = Mapping[str, Any]
"""By name: a Tensor, weights (a mapping of Tensors), a configuration (a mapping of JSON values), a `Handle`, or a plain
number, string, list or None."""


@dataclass(frozen=True)
class Handle:
    """Names an object opened earlier in the same case, as an argument."""

    name: str


def is_weights(value: Any) -> bool:
    """Whether an argument is the weights of a unit, rather than a configuration."""
    return isinstance(value, LazyTensors) or (
        isinstance(value, Mapping) and any(isinstance(entry, Tensor) for entry in value.values())
    )


@dataclass(frozen=True)
class Call:
    """Call a stateless method; its results come back under the names in `METHODS`."""

    method: str
    arguments: Arguments


@dataclass(frozen=True)
class Open:
    """Make a stateful object (or a runtime) and keep it under `name` until the case ends."""

    name: str
    method: str
    arguments: Arguments


@dataclass(frozen=True)
class Advance:
    """Step the object `name`."""

    name: str
    inputs: Arguments


@dataclass(frozen=True)
class ReadState:
    """Read the state of the object `name`."""

    name: str


Request = Call | Open | Advance | ReadState


@dataclass(frozen=True)
class Place:
    """Where in a model and a trace a step stands, to name a bad element in words.

    `calls` and `positions` belong to the entries of the "position" axis (and, request by request, of "token"); a
    call is named with its scenario where several are joined.
    """

    layer: int | None = None
    calls: Sequence[int | str] = ()
    positions: Sequence[int] = ()

    def describe(self, axes: Axes, index: tuple[int, ...]) -> str:
        """Say layer, call, position and the remaining coordinates of an element."""
        words = [] if self.layer is None else [f"layer {self.layer}"]
        named = list(zip(axes, index, strict=False))
        if self.positions:
            flattened = next((i for axis, i in named if axis == "token"), None)
            if flattened is not None:
                request, place = divmod(flattened, len(self.positions))
                named = [("request", request), ("position", place), *[(a, i) for a, i in named if a != "token"]]
        place_index = next((i for axis, i in named if axis == "position"), 0)
        if self.calls:
            words.append(f"call {self.calls[min(place_index, len(self.calls) - 1)]}")
        for axis, i in named:
            words.append(f"{axis} {self.positions[i] if axis == 'position' and self.positions else i}")
        return ", ".join(words)


NOWHERE = Place()
Rules = Callable[[], Sequence[Expectation]]


def no_rules() -> Sequence[Expectation]:
    """For steps whose answer is not judged, such as opening an object."""
    return ()


@dataclass(frozen=True)
class Step:
    """One question and the rules for its answer, computed only when the answer is there.

    `optional` rules apply to taps that a stateful object may return beside its required results.
    """

    request: Request
    rules: Rules = no_rules
    place: Place = NOWHERE
    optional: Rules = no_rules


@dataclass(frozen=True)
class Case:
    """One entry of the catalogue.  Ids are immutable: `component/behaviour/variant`, named after the mistake caught."""

    id: str
    level: Level
    mode: Mode
    why: str
    """One sentence: which mistake an implementation would have made to fail here."""
    spec: str
    """Where the rule stands, such as `numerics.md 6.3`."""
    steps: Callable[[], Iterator[Step]] = field(repr=False)
    flags: tuple[str, ...] = ()
    source: str = ""
    """The golden set and scenarios, or the generator, that the inputs come from."""
    reading: Literal["intended", "literal"] | None = None
    """Set where the two readings of the published index-key slot differ; other targets skip the case."""

    @property
    def component(self) -> str:
        """The module the case belongs to."""
        return self.id.split("/", 1)[0]
