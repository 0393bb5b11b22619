"""A port with known faults, whose report a person must be able to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.adapters.reference import Reference
from conformance.faults.catalogue import FAULTS
from conformance.faults.patches import patched
from conformance.interface import METHODS, Description, Stateful

THREE_FAULTS = ("rotary/half-split-pairs", "compressor/carry-lost", "gate/route-scale-missing")
"""Of three components, one of which feeds another: the hardest thing that a report has to take apart."""
CHANGES = [fault.change for fault in FAULTS if fault.id in THREE_FAULTS]


class FaultyStateful(Stateful):
    """Makes the mistakes while it steps."""

    def __init__(self, inner: Stateful) -> None:
        self.inner = inner

    def step(self, **inputs: Any) -> Mapping[str, Any]:
        with patched(CHANGES):
            return self.inner.step(**inputs)

    def state(self) -> Mapping[str, Any]:
        return self.inner.state()


def faulty(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of the reference, which makes the mistakes as long as it runs: others may need it without."""

    def call(self: Reference, **arguments: Any) -> Any:
        with patched(CHANGES):
            result = method(self, **arguments)
        return FaultyStateful(result) if isinstance(result, Stateful) else result

    return call


class ThreeFaults(Reference):
    """The reference with three mistakes."""

    def describe(self) -> Description:
        return Description("three faults", "1", conventions={"compute": "float32"})


for name in METHODS:
    setattr(ThreeFaults, name, faulty(getattr(Reference, name)))
assert len(CHANGES) == len(THREE_FAULTS)
