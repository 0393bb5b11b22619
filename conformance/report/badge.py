"""A badge in the endpoint form of shields.io, from a report."""

from __future__ import annotations

import json

from conformance.report.reader import StoredReport
from conformance.report.summary import FAILED, status_counts, verdict_sentence
from conformance.report.terminal import cases_in_words

LABEL = "DeepSeek-V4.1-Flash"
COLOURS = {"conforms": "brightgreen", "in part": "yellow", "fails": "red", "no verdict": "lightgrey"}
"""By outcome; `in part` is also for a declared accumulator or deviation."""


def badge(report: StoredReport) -> str:
    """The JSON text: what the verdict comes down to, in a few words."""
    outcome, message = _outcome(report)
    fields = {"schemaVersion": 1, "label": LABEL, "message": message, "color": COLOURS[outcome]}
    if outcome == "no verdict":
        fields["isError"] = True
    return json.dumps(fields, indent=2) + "\n"


def _outcome(report: StoredReport) -> tuple[str, str]:
    header, counts = report.header, status_counts(report.records)
    failed = sum(counts[status] for status in FAILED)
    if failed:
        return "fails", f"{failed:,} of {len(report.records):,} cases fail"
    if report.footer is None or report.footer.exit_code != 0 or report.footer.stopped:
        return "no verdict", "no verdict"
    implementation = header.implementation
    sentence = verdict_sentence(
        report.records, header.cases, implementation["accumulator"], implementation.get("deviations", ())
    )
    word = sentence.partition(":")[0]
    chosen = header.selection
    scope = ", ".join(
        [chosen["level"], *chosen["components"], *filter(None, (chosen["expression"], chosen["set"], chosen["shard"]))]
    )
    if word == "conforms":
        return "conforms", f"conforms, {cases_in_words(counts['PASS'])} ({scope})"
    return "in part", f"{word} ({scope})"
