"""Two reports beside each other: what got worse, what got better, and whether they may be compared at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.report.reader import StoredReport
from conformance.report.records import CaseRecord
from conformance.runner import UNWANTED

GOOD = ("PASS",)
SAME, REGRESSION, COULD_NOT = 0, 1, 2


@dataclass(frozen=True)
class Change:
    """One case in both reports."""

    before: CaseRecord
    after: CaseRecord

    @property
    def id(self) -> str:
        """The case's id."""
        return self.after.id

    @property
    def factor(self) -> float:
        """How many times as large the worst error over bound has become."""
        before, after = self.before.ratio, self.after.ratio
        if before == after or (math.isnan(before) and math.isnan(after)):
            return 1.0
        return after / before if before > 0 else float("inf")


@dataclass(frozen=True)
class Difference:
    """Something of the runs themselves that differs."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Everything that differs between two reports."""

    before: StoredReport
    after: StoredReport
    newly_failing: tuple[Change, ...]
    no_longer_passing: tuple[Change, ...]
    """Passed before, and now neither passes nor fails: unsupported, in quarantine, expected to fail."""
    newly_passing: tuple[Change, ...]
    other_statuses: tuple[Change, ...]
    changed: tuple[Change, ...]
    """The same status with another worst error over bound, the largest growth first."""
    only_before: tuple[CaseRecord, ...]
    only_after: tuple[CaseRecord, ...]
    differences: tuple[Difference, ...]
    """Of the runs: suite, fixtures, reading, conventions, environment."""

    @property
    def only_after_failing(self) -> tuple[CaseRecord, ...]:
        """Cases that the first report does not have, and that fail."""
        return tuple(record for record in self.only_after if record.status in UNWANTED)

    @property
    def regressed(self) -> bool:
        """Whether a case that passed does not any more, or one fails that did not."""
        return bool(self.newly_failing or self.no_longer_passing)

    @property
    def obstacle(self) -> str:
        """Why nothing can be said of the absence of regressions; empty when it can."""
        for report in (self.before, self.after):
            if report.cut_off:
                return f"{report.shown} is not complete: {report.cut_off}"
        if not {record.id for record in self.before.records} & {record.id for record in self.after.records}:
            return "the reports have no case in common"
        return ""

    @property
    def exit_code(self) -> int:
        """0 without a regression, 1 with one, 2 when there is none but a report is not complete."""
        return REGRESSION if self.regressed else COULD_NOT if self.obstacle else SAME

    @property
    def sentence(self) -> str:
        """The result in one line."""
        if self.regressed:
            return (
                f"regression: {len(self.newly_failing)} newly failing, "
                f"{len(self.no_longer_passing)} no longer passing, {len(self.newly_passing)} newly passing"
            )
        if self.obstacle:
            return f"no verdict: {self.obstacle}"
        return f"no regression: {len(self.newly_passing)} newly passing, {len(self.changed)} with other errors"


def compare(before: StoredReport, after: StoredReport) -> Comparison:
    """Compare two reports case by case."""
    first = {record.id: record for record in before.records}
    second = {record.id: record for record in after.records}
    both = [Change(first[id], record) for id, record in second.items() if id in first]
    moved = [change for change in both if change.before.status != change.after.status]
    failing = [c for c in moved if c.after.status in UNWANTED and c.before.status not in UNWANTED]
    lost = [c for c in moved if c.before.status in GOOD and c.after.status not in (*GOOD, *UNWANTED)]
    passing = [c for c in moved if c.after.status in GOOD]
    named = {change.id for change in (*failing, *lost, *passing)}
    changed = [c for c in both if c.before.status == c.after.status and c.factor != 1.0]
    return Comparison(
        before,
        after,
        tuple(failing),
        tuple(lost),
        tuple(passing),
        tuple(change for change in moved if change.id not in named),
        tuple(sorted(changed, key=lambda change: (-change.factor, change.id))),
        tuple(record for id, record in first.items() if id not in second),
        tuple(record for id, record in second.items() if id not in first),
        tuple(_differences(_circumstances(before), _circumstances(after))),
    )


def _circumstances(report: StoredReport) -> Mapping[str, str]:
    """What a result depends on besides the port's code, as texts by name."""
    header = report.header
    implementation = dict(header.implementation)
    conventions = implementation.pop("conventions")
    return {
        "suite": header.suite,
        "fixtures lock": header.fixtures["lock"],
        "reading": header.reading,
        "expectations": header.expectations or "",
        **{f"implementation: {name}": _words(value) for name, value in implementation.items() if name != "reading"},
        **{f"convention: {name}": _words(value) for name, value in conventions.items()},
        **{f"selection: {name}": _words(value) for name, value in header.selection.items()},
        **{f"environment: {name}": value for name, value in header.environment.items()},
    }


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys((*before, *after)):
        first, second = before.get(name, ""), after.get(name, "")
        if first != second:
            yield Difference(name, first, second)


def sections(comparison: Comparison) -> Sequence[tuple[str, Sequence[Change]]]:
    """The lists of cases in both reports, worst first, with their titles."""
    return (
        ("Newly failing", comparison.newly_failing),
        ("No longer passing", comparison.no_longer_passing),
        ("Newly passing", comparison.newly_passing),
        ("Other changes of status", comparison.other_statuses),
        ("Same status, other error over bound", comparison.changed),
    )
