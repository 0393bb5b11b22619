"""From the records of a run to what is said of it: one row a component, one sentence for the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from conformance.report.records import CaseRecord, Footer
from conformance.runner import FAILURES, Status

FAILED = (*FAILURES, "XPASS")
"""The statuses that are the target's fault; a pass that was not expected is one of them."""


TONES: Mapping[str, str] = {
    "PASS": "good",
    **dict.fromkeys((*FAILED, "BROKEN"), "bad"),
    **dict.fromkeys(("UNSUPPORTED", "XFAIL", "QUARANTINE"), "warn"),
    **dict.fromkeys(("conforms", "deviates"), "good"),
    **dict.fromkeys(("FAILS", "BROKEN"), "bad"),
}
"""How a status of a case, or the verdict on a component, is meant: good, bad, or (anything else) in between."""


@dataclass(frozen=True)
class ComponentRow:
    """What is said of one component."""

    component: str
    verdict: str
    """conforms, deviates (all cases pass, some by declared deviations), FAILS, BROKEN (the suite's own fault), xfail
    (fails as expected), partly (some cases unsupported or in quarantine), unsupported or quarantine."""
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
    elif counts["XFAIL"]:
        verdict = "xfail"
    elif counts["QUARANTINE"]:
        verdict = "partly" if counts["PASS"] else "quarantine"
    elif not counts["UNSUPPORTED"]:
        verdict = "deviates" if any(record.deviations for record in records) else "conforms"
    else:
        verdict = "partly" if counts["PASS"] else "unsupported"
    return ComponentRow(
        component,
        verdict,
        counts["PASS"],
        failed + counts["XFAIL"],
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


def make_footer(
    records: Sequence[CaseRecord], seconds: float, peak_memory_bytes: int, exit_code: int, stopped: str
) -> Footer:
    """The footer of these records; every status is counted, also those that did not occur."""
    counts = status_counts(records)
    return Footer({name: counts[name] for name in get_args(Status)}, seconds, peak_memory_bytes, exit_code, stopped)


def verdict_sentence(
    records: Sequence[CaseRecord], total: int, accumulator: str, deviations: Sequence[str] = ()
) -> str:
    """The result of a run in one line; `total` cases were to be run.

    Whoever declares another accumulator than the specified one, or deviations, was judged by other bounds: the verdict
    says so.
    """
    counts = status_counts(records)
    failed = sum(counts[status] for status in FAILURES)
    supported = sum(counts[status] for status in ("PASS", "XFAIL", *FAILED))
    if failed:
        parts = [f"does not conform: {failed} of {supported} supported cases failed"]
    elif counts["BROKEN"]:
        parts = [f"no verdict: {counts['PASS']} of {supported} supported cases passed"]
    elif counts["XPASS"]:
        parts = [f"not as expected: {counts['PASS']} of {supported} supported cases passed"]
    elif not records:
        parts = ["no verdict: nothing was judged"]
    elif not supported:
        parts = ["no verdict: no case is supported"]
    elif len(records) < total:
        parts = [f"no verdict: {counts['PASS']} of {supported} supported cases passed so far"]
    elif counts["XFAIL"]:
        parts = [f"does not conform, as expected: {counts['PASS']} of {supported} supported cases passed"]
    else:
        declared = [] if accumulator == "fp32" else [f"a declared {accumulator} accumulator"]
        declared += [f"declared deviations: {', '.join(deviations)}"] if deviations else []
        conforms = " with ".join(["conforms", *([" and ".join(declared)] if declared else [])])
        if counts["QUARANTINE"]:
            conforms = conforms.replace("conforms", "conforms in what was run", 1)
        elif counts["UNSUPPORTED"]:
            conforms = conforms.replace("conforms", "conforms in what it supports", 1)
        parts = [f"{conforms}{';' if deviations else ':'} {counts['PASS']} of {supported} supported cases passed"]
    if counts["BROKEN"]:
        parts.append(f"{counts['BROKEN']} broken in the suite itself")
    for status, words in (
        ("XFAIL", "failed as expected"),
        ("XPASS", "passed although expected not to: remove the entries"),
        ("QUARANTINE", "in quarantine"),
    ):
        if counts[status]:
            parts.append(f"{counts[status]} {words}")
    if counts["UNSUPPORTED"]:
        parts.append(f"{counts['UNSUPPORTED']} unsupported")
    if len(records) < total:
        parts.append(f"{total - len(records)} not run")
    return "; ".join(parts)
