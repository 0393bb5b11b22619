"""What an honest variant is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from conformance.adapters.in_process import InProcess
from conformance.adapters.reference import Reference
from conformance.faults.patches import Change, patched


@dataclass(frozen=True)
class HonestVariant:
    """One variant: how the reference is made, and what is changed in it."""

    name: str
    why: str
    """Why a conforming implementation may do this."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reference."""
    changes: tuple[Change, ...] = ()
    implementation: type[Reference] = Reference
    both_readings: bool = True
    """False where calls are put together differently: the literal reading depends on them (numerics.md 6.4)."""

    @contextmanager
    def session(self) -> Iterator[InProcess]:
        """A session with the variant; the change lasts as long as the context."""
        with patched(self.changes):
            yield InProcess(self.implementation(**self.options))
