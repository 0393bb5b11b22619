"""Judging a bundle again: everything in a report that follows from something else is worked out anew.

Which cases belong to the run follows from the catalogue and the selection, a status from the results beside it, an
expected failure from the expectations, totals and exit code from the statuses, fixtures from the lock.  What cannot be
worked out is whether the numbers are those of the port: only running it says that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import conformance
from conformance.cases import catalogue
from conformance.cases.case import Case, Level
from conformance.cases.durations import durations
from conformance.errors import ConformanceError
from conformance.expectations import Entry, Run, is_launched, parse_expectations
from conformance.fixtures import LOCK, Fixtures
from conformance.interface import Reading
from conformance.judge.histogram import EDGES
from conformance.report.bundle import EXPECTATIONS, REPORT
from conformance.report.reader import StoredReport, parse_report
from conformance.report.records import CaseRecord
from conformance.report.summary import status_counts
from conformance.runner import FAILURES, Status, exit_code
from conformance.selection import Selection, of_reading, select, shard
from conformance.tensors import one_line

DECLARED = ("component", "level", "mode", "why", "spec", "flags", "source")
"""Fields of a record that the catalogue declares."""
BEYOND = EDGES[EDGES.index("1") + 1 :]
SYSTEMS = {"Linux": "linux", "macOS": "darwin", "Darwin": "darwin", "Windows": "win32"}
"""`sys.platform` by how `platform.platform()` begins."""


@dataclass(frozen=True)
class Rejudged:
    """What became of a bundle."""

    report: StoredReport
    problems: tuple[str, ...]
    """Everything that does not follow, one line each; empty when the report is as it must be."""
    exit_code: int
    """Of the run, worked out anew."""


def rejudge(path: Path, files: Mapping[str, bytes], fixtures: Fixtures) -> Rejudged:
    """Judge the files of a bundle again by these fixtures.

    Raises:
        ConformanceError: the report or the expectations cannot be read at all.
    """
    report = parse_report(path / REPORT, files[REPORT])
    cases = catalogue.catalogue(fixtures)
    expected = _expected(report, files, path, cases)
    problems = [
        *_fixtures(report, files, fixtures),
        *_whole(report, cases),
        *_cases(report, {case.id: case for case in cases}),
        *(problem for record in report.records for problem in _result(record)),
        *(problem for record in report.records for problem in _expectation(record, expected.get(record.id))),
        *_footer(report),
    ]
    return Rejudged(report, tuple(problems), exit_code(report.records))


def _expected(
    report: StoredReport, files: Mapping[str, bytes], path: Path, cases: Sequence[Case]
) -> Mapping[str, Entry]:
    if EXPECTATIONS not in files:
        return {}
    header = report.header
    try:
        text = files[EXPECTATIONS].decode("utf-8")
    except UnicodeDecodeError:
        raise ConformanceError(f"{one_line(str(path / EXPECTATIONS))}: is not UTF-8 text") from None
    implementation = header.implementation
    system = header.environment.get("platform", "").partition("-")[0]
    run = Run(
        implementation["device"],
        implementation["version"],
        header.reading,
        implementation["accumulator"],
        SYSTEMS.get(system, system),
    )
    return parse_expectations(path / EXPECTATIONS, text).of_run(cases, run)


def _fixtures(report: StoredReport, files: Mapping[str, bytes], fixtures: Fixtures) -> Iterator[str]:
    claimed = report.header.fixtures["lock"]
    if hashlib.sha256(files[LOCK]).hexdigest() != claimed:
        yield f"fixtures: the report names lock {claimed[:12]}, which is not the one in the bundle"
    if claimed != fixtures.lock_hash:
        yield f"fixtures: the report names lock {claimed[:12]}, here they have {fixtures.lock_hash[:12]}"
    if report.header.suite != conformance.__version__:
        yield f"suite: the report is of version {one_line(report.header.suite)}, this is {conformance.__version__}"
    if (EXPECTATIONS in files) != (report.header.expectations is not None):
        yield "expectations: the run had some and the bundle has none, or the reverse"


def _whole(report: StoredReport, cases: Sequence[Case]) -> Iterator[str]:
    """Whether these are the cases of the selection, all of them."""
    header = report.header
    chosen = header.selection
    selection = Selection(
        cast(Level, chosen["level"]), chosen["expression"], tuple(chosen["components"]), chosen["set"]
    )
    try:
        applicable = of_reading(select(cases, selection), cast(Reading, header.reading))
        wanted = {case.id for case in shard(applicable, chosen["shard"], durations())}
    except ConformanceError as error:
        yield f"selection: {error}"
        return
    found = {record.id for record in report.records}
    for what, ids in (("missing", wanted - found), ("not of the selection", found - wanted)):
        if ids:
            yield f"cases: {len(ids)} {what}, such as {one_line(min(ids))}"
    if header.cases != len(wanted):
        yield f"header: announces {header.cases} cases, the selection has {len(wanted)}"


def _cases(report: StoredReport, known: Mapping[str, Case]) -> Iterator[str]:
    for record in report.records:
        case = known.get(record.id)
        wrong = [] if case is None else [name for name in DECLARED if getattr(record, name) != getattr(case, name)]
        if wrong:
            yield f"{one_line(record.id)}: {', '.join(wrong)} not as in the catalogue"


def _result(record: CaseRecord) -> Iterator[str]:
    """Whether the status is what the results make it."""
    name = one_line(record.id)
    worst = max((tap.ratio for tap in record.taps), default=0.0)
    if not (record.ratio == worst or (math.isnan(record.ratio) and math.isnan(worst))):
        yield f"{name}: worst error/bound {record.ratio:.3g}, its results have {worst:.3g}"
    if record.judged != sum(tap.judged for tap in record.taps):
        yield f"{name}: {record.judged} elements judged, its results have {sum(tap.judged for tap in record.taps)}"
    wrong = [tap.tap for tap in record.taps if tap.wrong or tap.worst.message or not tap.ratio <= 1]
    wrong += [tap.tap for tap in record.taps if any(tap.histogram.get(edge) for edge in BEYOND)]
    wrong += [tap.tap for tap in record.taps if not all(layer.passed for layer in tap.layers)]
    failed = bool(wrong) or record.first_failure is not None
    if record.status in ("PASS", "XPASS") and failed:
        yield f"{name}: is {record.status}, but {one_line((wrong or ['a result'])[0])} is wrong"
    if record.status == "PASS" and not record.taps:
        yield f"{name}: is PASS, but nothing was judged"
    if record.status in (*FAILURES, "XFAIL") and not failed and not record.message:
        yield f"{name}: is {record.status}, but nothing is wrong"


def _expectation(record: CaseRecord, entry: Entry | None) -> Iterator[str]:
    name = one_line(record.id)
    known = record.expectation
    stated = None if known is None else (known.pattern, known.status, known.reason, known.url)
    declared = None if entry is None else (entry.pattern, entry.status, entry.reason, entry.url)
    if stated != declared:
        yield f"{name}: falls under {'no entry' if entry is None else entry} of the expectations, the record differs"
    allowed = {
        "PASS": entry is None,
        "XPASS": entry is not None,
        "XFAIL": entry is not None and entry.status == "xfail",
        "QUARANTINE": not is_launched(entry),
    }
    if not allowed.get(record.status, True):
        yield f"{name}: is {record.status}, which the expectations do not make it"


def _footer(report: StoredReport) -> Iterator[str]:
    if report.footer is None or report.footer.stopped:
        yield f"report: is not complete: {one_line(report.cut_off)}"
    if report.footer is None:
        return
    counts = status_counts(report.records)
    for status in get_args(Status):
        if report.footer.counts.get(status, 0) != counts[status]:
            yield f"footer: counts {report.footer.counts.get(status, 0)} {status}, there are {counts[status]}"
    if report.footer.exit_code != exit_code(report.records):
        yield f"footer: exit code {report.footer.exit_code}, the records make it {exit_code(report.records)}"
