"""Which recorded tensors the cases use: what no case asks for or judges by is golden data that proves nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.cases.case import Case
from conformance.errors import ConformanceError
from conformance.fixtures import Fixtures
from conformance.tensors import SafetensorsFile, one_line

_PLACE = re.compile(r"^(?:call\d+|state|image)/(?:layer\d+/)?")


@dataclass(frozen=True)
class FileCoverage:
    """One golden file: its tensors, and those of them that some case reads."""

    file: str
    """Set and file, without the suffix."""
    present: tuple[str, ...]
    used: frozenset[str]

    @property
    def unused(self) -> tuple[str, ...]:
        """Full names of the tensors that no case reads, in the order of the file."""
        return tuple(name for name in self.present if name not in self.used)

    def unused_taps(self) -> Counter[str]:
        """How many tensors no case reads, by tap."""
        return Counter(tap_of(name) for name in self.unused)


def tap_of(name: str) -> str:
    """The tap that a tensor is: its name without call and layer."""
    return _PLACE.sub("", name)


def never_used(files: Sequence[FileCoverage]) -> list[str]:
    """Taps of which no case reads any tensor, anywhere."""
    present = dict.fromkeys(tap_of(name) for file in files for name in file.present)
    used = {tap_of(name) for file in files for name in file.used}
    return [tap for tap in present if tap not in used]


def measure(fixtures: Fixtures, cases: Sequence[Case], set_names: Sequence[str] = ()) -> list[FileCoverage]:
    """Put together every question of every case, and every rule for its answer, and see which tensors that took.

    No implementation runs.  `cases` must have been made from `fixtures`, which must not have been read from before.

    Raises:
        ConformanceError: `set_names` holds a name that is no set.
    """
    for name in set_names:
        if name not in fixtures.sets:
            raise ConformanceError(f"--set {one_line(name)}: no such set; there are {', '.join(fixtures.sets)}")
    for case in cases:
        for step in case.steps():
            step.rules()
            step.optional()
    return [
        FileCoverage(f"{name}/{stem}", tuple(sorted(file)), frozenset(file.read_names))
        for name in fixtures.sets
        if not set_names or name in set_names
        for stem, file in _files(fixtures, name)
    ]


def _files(fixtures: Fixtures, name: str) -> Iterator[tuple[str, SafetensorsFile]]:
    """The files with recorded results of a set; weights are not results."""
    if fixtures.kind(name) == "recipe":
        yield from fixtures.recipe(name).parts.items()
        return
    for scenario in fixtures.model(name).scenarios.values():
        yield scenario.name, scenario.file
