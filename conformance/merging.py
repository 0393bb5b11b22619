"""Making one report of the reports of a run's shards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.errors import COULD_NOT_RUN, ConformanceError
from conformance.interface import COMPONENTS
from conformance.report.reader import StoredReport
from conformance.report.records import CaseRecord, Footer, Header
from conformance.report.summary import make_footer
from conformance.runner import exit_code
from conformance.tensors import one_line

COMPARABLE = ("device",)
"""What the description of one target may differ in from shard to shard."""


@dataclass(frozen=True)
class Merged:
    """One report out of several."""

    header: Header
    records: tuple[CaseRecord, ...]
    footer: Footer
    incomplete: tuple[str, ...]
    """What is missing, in words; empty when nothing is."""


def merge(reports: Sequence[StoredReport]) -> Merged:
    """Merge the reports of shards; one report alone must be that of a whole run.

    Raises:
        ConformanceError: they are not of one run, or two hold the same shard or case.
    """
    first = reports[0]
    for report in reports[1:]:
        _require_same(first, report)
    parts = _parts(reports)
    incomplete = [f"{one_line(str(report.path))} {report.cut_off}" for report in reports if report.cut_off]
    missing = sorted(set(range(1, parts + 1)) - {_part(report)[0] for report in reports})
    incomplete[:0] = [f"shard {part}/{parts} is missing" for part in missing]
    records = _records(reports)
    code = COULD_NOT_RUN if incomplete else exit_code(records)
    footers = [report.footer for report in reports if report.footer is not None]
    footer = make_footer(
        records,
        sum(footer.seconds for footer in footers),
        max((footer.peak_memory_bytes for footer in footers), default=0),
        code,
        "; ".join(incomplete),
    )
    return Merged(_header(reports), tuple(records), footer, tuple(incomplete))


def _part(report: StoredReport) -> tuple[int, int]:
    which = report.header.selection["shard"] or "1/1"
    part, parts = map(int, re.findall("[0-9]+", which))
    return part, parts


def _parts(reports: Sequence[StoredReport]) -> int:
    seen: dict[int, StoredReport] = {}
    parts = _part(reports[0])[1]
    for report in reports:
        part, of = _part(report)
        if of != parts:
            raise _differ(reports[0], report, "number of shards", parts, of)
        if part in seen:
            raise ConformanceError(
                f"{one_line(str(report.path))}: shard {part}/{of} is also in {one_line(str(seen[part].path))}"
            )
        seen[part] = report
    return parts


def _records(reports: Sequence[StoredReport]) -> list[CaseRecord]:
    found: dict[str, tuple[CaseRecord, StoredReport]] = {}
    for report in reports:
        for record in report.records:
            if record.id in found:
                other = found[record.id][1]
                raise ConformanceError(
                    f"{one_line(str(report.path))}: case {one_line(record.id)} is also in {one_line(str(other.path))}"
                )
            found[record.id] = record, report
    order = {component: number for number, component in enumerate(COMPONENTS)}
    records = [record for record, _ in found.values()]
    return sorted(records, key=lambda record: (order.get(record.component, len(order)), record.id))


def _identity(header: Header) -> Mapping[str, Any]:
    """What must be the same in all shards of a run, by the words for it."""
    described = {name: value for name, value in header.implementation.items() if name not in COMPARABLE}
    return {
        "lock": header.fixtures["lock"],
        "target": header.target,
        "reading": header.reading,
        "suite version": header.suite,
        **{f"implementation {name}": value for name, value in described.items()},
        **{f"selection {name}": value for name, value in header.selection.items() if name != "shard"},
        "expectations": header.expectations,
    }


def _require_same(first: StoredReport, other: StoredReport) -> None:
    ours, theirs = _identity(first.header), _identity(other.header)
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise _differ(first, other, name, ours.get(name), theirs.get(name))


def _differ(first: StoredReport, other: StoredReport, name: str, ours: Any, theirs: Any) -> ConformanceError:
    return ConformanceError(
        f"{one_line(str(other.path))}: {name} {one_line(str(theirs))!r} differs from {one_line(str(ours))!r} of "
        f"{one_line(str(first.path))}: not shards of one run"
    )


def _header(reports: Sequence[StoredReport]) -> Header:
    headers = [report.header for report in reports]
    first = headers[0]
    environments = {name for header in headers for name in header.environment}
    return replace(
        first,
        started=min(header.started for header in headers),
        selection={**first.selection, "shard": None},
        cases=sum(header.cases for header in headers),
        implementation={
            **first.implementation,
            **{name: _joined([header.implementation[name] for header in headers]) for name in COMPARABLE},
        },
        environment={
            name: _joined([header.environment[name] for header in headers if name in header.environment])
            for name in sorted(environments)
        },
    )


def _joined(values: Sequence[Any]) -> str:
    return " | ".join(dict.fromkeys(map(str, values)))
