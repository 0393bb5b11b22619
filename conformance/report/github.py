"""Annotations of GitHub Actions: a failure appears on the page of the run, not only in its log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from conformance.report.junit import summary_of
from conformance.report.records import CaseRecord
from conformance.runner import UNWANTED

SHOWN = 10
"""Actions shows at most ten errors of a step."""


def in_actions() -> bool:
    """Whether this process runs in GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def failure_annotations(records: Sequence[CaseRecord]) -> Iterator[str]:
    """One workflow command a failed case; where there are too many to be shown, the last says how many more."""
    failed = [record for record in records if record.status in UNWANTED]
    for record in failed[: SHOWN if len(failed) <= SHOWN else SHOWN - 1]:
        text = f"{summary_of(record)}\n{record.rerun}"
        yield f"::error title={_escape(f'{record.status} {record.id}', in_property=True)}::{_escape(text)}"
    if len(failed) > SHOWN:
        yield f"::error title=conformance::{len(failed) - SHOWN + 1} more cases failed; the report lists them"


def _escape(text: str, in_property: bool = False) -> str:
    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A"} | ({":": "%3A", ",": "%2C"} if in_property else {})
    return "".join(escapes.get(character, character) for character in text)
