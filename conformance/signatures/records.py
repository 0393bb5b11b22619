"""From matches to the records of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from conformance.adapters.session import Session
from conformance.cases.case import Case
from conformance.report.records import CaseRecord, MatchRecord
from conformance.signatures.matcher import FoundMatch, explain

KEPT = 5
"""Matches of a case that are recorded: those after them are worse."""


def with_matches(
    records: Sequence[CaseRecord],
    cases: Sequence[Case],
    session: Session,
    seconds: float,
    progress: Callable[[str], None],
) -> list[CaseRecord]:
    """The records, failed ones with the known mistakes whose values they show."""
    by_id = {case.id: case for case in cases}
    failed = [(by_id[record.id], record.seconds) for record in records if record.status == "FAIL"]
    found = explain(failed, session, seconds, progress)
    return [with_found(record, found.get(record.id, ())) for record in records]


def with_found(record: CaseRecord, found: Sequence[FoundMatch]) -> CaseRecord:
    """A record with what was found for it, the best first."""
    return replace(record, matched=tuple(map(_record, found[:KEPT])))


def _record(found: FoundMatch) -> MatchRecord:
    match = found.match
    candidate = match.candidate
    return MatchRecord(
        candidate.kind,
        candidate.name,
        candidate.flag,
        candidate.words,
        found.rank,
        match.explained,
        match.wrong,
        match.nearness,
    )
