"""What the `run` fixture gives: a command line that was run, and what it left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.bench.devices import Device

DEVICE = Device("cpu", "a device", 1 << 10)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a run that was not possible."""
        assert self.code == 2
        assert self.err.startswith("conformance: ")
        assert self.err.count("\n") == 1
        return self.err


Run = Callable[..., Outcome]
