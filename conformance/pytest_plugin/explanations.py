"""Known mistakes named at the item that fails: that is where a CI system shows a reader what is wrong."""

from __future__ import annotations

from conformance.adapters.session import Session
from conformance.cases.case import Case
from conformance.report.records import CaseRecord
from conformance.signatures.matcher import Matcher
from conformance.signatures.records import with_found

MOST_FOR_ONE = 5.0
"""Seconds for one item: items come in the order of the run, and a slow one must leave time for those after it."""


class Explanations:
    """What the failed items of one process look like, as long as there is time.

    What has explained one item is tried first on the next: many failures of one mistake cost little more than one.
    """

    def __init__(self, session: Session, seconds: float) -> None:
        self._session, self._seconds = session, seconds
        self._matcher: Matcher | None = None

    def of(self, record: CaseRecord, case: Case) -> CaseRecord:
        """The record, with the known mistakes whose values it shows if it is of a failure."""
        if record.status != "FAIL" or not self._seconds:
            return record
        self._matcher = self._matcher or Matcher(self._session, self._seconds)
        found = self._matcher.look(case, record.seconds, MOST_FOR_ONE)
        return with_found(record, self._matcher.ranked(case, found))
