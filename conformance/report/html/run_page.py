"""The page of one run: what the template of a report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from conformance.cases.case import LEVELS
from conformance.cases.flags import Flag, load_flags
from conformance.report.causes import Cause, Consequence, Diagnosis, diagnose
from conformance.report.html import charts
from conformance.report.html.page import render
from conformance.report.records import CaseRecord, ExpectationRecord, Footer, Header
from conformance.report.summary import FAILED, TONES, component_rows, status_counts, verdict_sentence
from conformance.runner import FAILURES, Status

IN_FULL_BY_GROUP, IN_FULL = 6, 150
"""Failures shown in full: of one group, and of a whole page.  All others have a line in the table of every case."""
SHOWN_CAUSES = 12
SLOWEST = 8


@dataclass(frozen=True)
class Group:
    """Failures of one cause or consequence, in the list of failures."""

    title: str
    follows: tuple[str, ...]
    shown: tuple[CaseRecord, ...]
    rest: int


@dataclass(frozen=True)
class MatrixRow:
    """One component: its verdict, and by level how many of its cases passed."""

    component: str
    verdict: str
    tone: str
    levels: Mapping[str, tuple[int, int]]
    """Passed and all, by level that has cases."""
    judged: int
    ratio: float | None
    bars: Sequence[charts.Bar]
    seconds: float


@dataclass(frozen=True)
class Powerless:
    """Results that passed without a chance to fail."""

    case: str
    tap: str
    elements: int


def run_page(header: Header, records: Sequence[CaseRecord], footer: Footer | None) -> str:
    """The page, as text; without a footer, the run was killed."""
    failing = [record for record in records if record.status in (*FAILED, "BROKEN")]
    diagnosis = diagnose(records)
    maps = charts.heat_maps(records, header.fixtures["sets"])
    counts = status_counts(records)
    errors = charts.spread(records)
    return render(
        "run.html.j2",
        header=header,
        incomplete=_incomplete(header, records, footer),
        verdict=_verdict(header, records, footer),
        counts=[(status, counts[status]) for status in get_args(Status) if counts[status]],
        tones=TONES,
        facts=_facts(header, footer),
        diagnosis=diagnosis,
        shown_causes=SHOWN_CAUSES,
        flags=_flags(records),
        right=charts.right,
        failing=failing,
        matrix=_matrix(records),
        levels=[level for level in LEVELS if any(record.level == level for record in records)],
        maps=maps,
        divergences=[(heat.name, charts.divergence(heat)) for heat in maps if heat.name != charts.HAND_MADE],
        bars=charts.bars(errors),
        elements=sum(errors.values()),
        beyond=charts.beyond(errors),
        without_bound=charts.without_bound(errors),
        groups=_groups(diagnosis),
        broken=[record for record in records if record.status == "BROKEN"],
        unsupported=_by_reason(record for record in records if record.status == "UNSUPPORTED"),
        expected=_expected(records),
        powerless=_powerless(records),
        notes=_notes(records),
        slowest=sorted(records, key=lambda record: -record.seconds)[:SLOWEST],
        components=_by_component(records),
    )


def _incomplete(header: Header, records: Sequence[CaseRecord], footer: Footer | None) -> str:
    """Why not every case is there; empty when all are."""
    done = f"{len(records):,} of {header.cases:,} cases"
    if footer is None:
        return f"The run was killed; what it had found until then is here, {done}"
    return f"The run was stopped after {done}: {footer.stopped}" if footer.stopped else ""


def _verdict(header: Header, records: Sequence[CaseRecord], footer: Footer | None) -> Mapping[str, str]:
    """Word, rest of the sentence and tone; a run that was cut off never reads as a pass."""
    implementation = header.implementation
    deviations = implementation.get("deviations", ())
    sentence = verdict_sentence(records, header.cases, implementation["accumulator"], deviations)
    word, _, rest = sentence.partition(":")
    failed = any(record.status in FAILED for record in records)
    conforms = footer is not None and footer.exit_code == 0
    tone = "bad" if failed else "good" if conforms else "warn"
    return {"word": word[:1].upper() + word[1:], "rest": rest.strip(), "tone": tone}


def _facts(header: Header, footer: Footer | None) -> Mapping[str, str]:
    implementation, selection, fixtures = header.implementation, header.selection, header.fixtures
    seeds = ", ".join(f"{name} {seed}" for name, seed in fixtures.get("seeds", {}).items())
    chosen = {"-k": selection["expression"], "set": selection["set"], "part": selection["shard"]}
    facts = {
        "target": header.target,
        "language, device": ", ".join(filter(None, (implementation["language"], implementation["device"]))),
        "homepage": implementation["homepage"],
        "reading": header.reading,
        "accumulator": implementation["accumulator"],
        "deviations": ", ".join(implementation.get("deviations", ())),
        **{f"convention: {name}": text for name, text in implementation["conventions"].items()},
        "level": selection["level"],
        "components": ", ".join(selection["components"]),
        **{name: text for name, text in chosen.items() if text},
        "cases": f"{header.cases:,}; {header.left_out:,} of the other reading left out",
        "expectations": header.expectations or "",
        "fixtures": f"{fixtures['directory']}: {', '.join(fixtures['sets'])}",
        "fixtures lock": fixtures["lock"],
        "seeds": seeds,
        "suite": header.suite,
        "started": header.started,
        **{f"environment: {name}": text for name, text in header.environment.items()},
    }
    if footer is not None:
        facts["took"] = f"{footer.seconds:.1f} s, peak memory {footer.peak_memory_bytes / 2**20:,.0f} MiB"
        facts["exit code"] = str(footer.exit_code)
    return {name: text for name, text in facts.items() if text}


def _flags(records: Sequence[CaseRecord]) -> Mapping[str, Flag]:
    """Known mistakes in words, as far as this version of the suite knows those of the report."""
    known = load_flags()
    used = {flag for record in records for flag in record.flags}
    return {name: flag for name, flag in known.items() if name in used}


def _matrix(records: Sequence[CaseRecord]) -> list[MatrixRow]:
    grouped = _by_component(records)
    rows = []
    for row in component_rows(records):
        group = grouped[row.component]
        levels: dict[str, tuple[int, int]] = {}
        for level in LEVELS:
            statuses = [record.status for record in group if record.level == level]
            if statuses:
                levels[level] = (statuses.count("PASS"), len(statuses))
        bars = charts.bars(charts.spread(group))
        seconds = sum(record.seconds for record in group)
        tone = TONES.get(row.verdict, "warn")
        rows.append(MatrixRow(row.component, row.verdict, tone, levels, row.judged, row.ratio, bars, seconds))
    return rows


def _groups(diagnosis: Diagnosis) -> list[Group]:
    """Causes first, then consequences, until the page has enough."""
    left = IN_FULL
    groups = []
    sources: list[Cause | Consequence] = [*diagnosis.causes, *diagnosis.consequences]
    for source in sources:
        follows = source.may_follow_from if isinstance(source, Consequence) else ()
        title = f"{source.component}: {source.tap}" if isinstance(source, Consequence) else source.title
        shown = source.records[: min(IN_FULL_BY_GROUP, left)]
        left -= len(shown)
        groups.append(Group(title, follows, shown, len(source.records) - len(shown)))
    return groups


def _by_reason(records: Any) -> Mapping[str, list[CaseRecord]]:
    reasons: dict[str, list[CaseRecord]] = {}
    for record in records:
        reasons.setdefault(record.message, []).append(record)
    return reasons


def _by_component(records: Sequence[CaseRecord]) -> Mapping[str, list[CaseRecord]]:
    grouped: dict[str, list[CaseRecord]] = {}
    for record in records:
        grouped.setdefault(record.component, []).append(record)
    return grouped


def _expected(records: Sequence[CaseRecord]) -> Mapping[ExpectationRecord, list[CaseRecord]]:
    """Cases by the entry of the expectations file that they fall under; failures it does not cover are failures."""
    entries: dict[ExpectationRecord, list[CaseRecord]] = {}
    for record in records:
        if record.expectation is not None and record.status not in (*FAILURES, "BROKEN"):
            entries.setdefault(record.expectation, []).append(record)
    return entries


def _powerless(records: Sequence[CaseRecord]) -> list[Powerless]:
    """Results of passed cases in which no element could have failed: none was there, or every value was allowed."""
    return [
        Powerless(record.id, tap.tap, tap.judged)
        for record in records
        if record.status == "PASS"
        for tap in record.taps
        if tap.judged == charts.without_bound(tap.histogram)
    ]


def _notes(records: Sequence[CaseRecord]) -> Mapping[str, int]:
    notes: dict[str, set[str]] = {}
    for record in records:
        for tap in record.taps:
            if tap.note:
                notes.setdefault(tap.note, set()).add(record.id)
    return {note: len(ids) for note, ids in notes.items()}
