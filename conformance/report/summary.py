"""From the records of a run to what is said of it: one row a component, one sentence for the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.report.records import CaseRecord

FAILED = ("FAIL", "CRASH")


@dataclass(frozen=True)
class ComponentRow:
    """What is said of one component."""

    component: str
    verdict: str
    """conforms, FAILS, BROKEN (the suite's own fault), partly (some cases unsupported) or unsupported."""
    passed: int
    failed: int
    unsupported: int
    judged: int
    ratio: float | None
    """Worst error over bound; None when nothing was judged."""
    modes: tuple[str, ...]


def component_rows(records: Sequence[CaseRecord]) -> list[ComponentRow]:
    """One row a component, in the order in which they were run."""
    groups: dict[str, list[CaseRecord]] = {}
    for record in records:
        groups.setdefault(record.component, []).append(record)
    return [_row(component, group) for component, group in groups.items()]


def _row(component: str, records: Sequence[CaseRecord]) -> ComponentRow:
    counts = status_counts(records)
    taps = [tap for record in records for tap in record.taps]
    failed = sum(counts[status] for status in FAILED)
    if failed:
        verdict = "FAILS"
    elif counts["BROKEN"]:
        verdict = "BROKEN"
    elif not counts["UNSUPPORTED"]:
        verdict = "conforms"
    else:
        verdict = "partly" if counts["PASS"] else "unsupported"
    return ComponentRow(
        component,
        verdict,
        counts["PASS"],
        failed,
        counts["UNSUPPORTED"],
        sum(record.judged for record in records),
        worst_ratio([tap.ratio for tap in taps]),
        tuple(dict.fromkeys(tap.mode for tap in taps)) or tuple(dict.fromkeys(record.mode for record in records)),
    )


def worst_ratio(ratios: Sequence[float]) -> float | None:
    """The largest, where NaN counts as larger than anything."""
    return max(ratios, key=lambda ratio: (ratio != ratio, ratio), default=None)


def status_counts(records: Sequence[CaseRecord]) -> Counter[str]:
    """Number of cases by status."""
    return Counter(record.status for record in records)


def verdict_sentence(records: Sequence[CaseRecord], total: int, accumulator: str) -> str:
    """The result of a run in one line; `total` cases were to be run.

    Whoever declares another accumulator than the specified one was judged by wider bounds: the verdict says so.
    """
    counts = status_counts(records)
    failed = sum(counts[status] for status in FAILED)
    supported = counts["PASS"] + failed
    if failed:
        parts = [f"does not conform: {failed} of {supported} supported cases failed"]
    elif counts["BROKEN"]:
        parts = [f"no verdict: {counts['PASS']} of {supported} supported cases passed"]
    elif not records:
        parts = ["no verdict: nothing was judged"]
    elif not supported:
        parts = ["no verdict: no case is supported"]
    elif len(records) < total:
        parts = [f"no verdict: {counts['PASS']} of {supported} supported cases passed so far"]
    else:
        conforms = "conforms" if accumulator == "fp32" else f"conforms with a declared {accumulator} accumulator"
        if counts["UNSUPPORTED"]:
            conforms = conforms.replace("conforms", "conforms in what it supports")
        parts = [f"{conforms}: {counts['PASS']} of {supported} supported cases passed"]
    if counts["BROKEN"]:
        parts.append(f"{counts['BROKEN']} broken in the suite itself")
    if counts["UNSUPPORTED"]:
        parts.append(f"{counts['UNSUPPORTED']} unsupported")
    if len(records) < total:
        parts.append(f"{total - len(records)} not run")
    return "; ".join(parts)
