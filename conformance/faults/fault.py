"""What a fault is: one mistake that an implementation could make, as one change to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conformance.faults.patches import Change, patched


@dataclass(frozen=True)
class Fault:
    """One mistake.  Some case whose flags name `flag` must reject it."""

    component: str
    """Where the mistake is; the cases of this component are tried first."""
    name: str
    flag: str
    """The mistake's name in `conformance/cases/flags.toml`."""
    why: str
    """What somebody did, or would have done, to make it."""
    change: Change

    @property
    def id(self) -> str:
        """`component/name`."""
        return f"{self.component}/{self.name}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The reference makes the mistake as long as the context lasts."""
        with patched([self.change]):
            yield
