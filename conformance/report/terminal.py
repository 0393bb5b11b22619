"""The report as a person reads it: header, table of components, failures, what was not judged, verdict.

Written for 80 columns, with or without colour: nothing is said by colour alone, and piped output has no drawing.
Records are printed as plain text, never as rich markup, since ids, shapes and a port's words hold brackets.
"""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.report.records import CaseRecord, ElementRecord, ExpectationRecord, Footer, Header, TapRecord
from conformance.report.summary import component_rows, verdict_sentence
from conformance.runner import FAILURES

STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "CRASH": "bold red",
    "TIMEOUT": "bold red",
    "PROTOCOL": "bold red",
    "BROKEN": "bold magenta",
    "UNSUPPORTED": "yellow",
    "XFAIL": "yellow",
    "XPASS": "bold red",
    "QUARANTINE": "yellow",
    "conforms": "green",
    "deviates": "cyan",
    "FAILS": "bold red",
    "partly": "yellow",
    "xfail": "yellow",
    "quarantine": "yellow",
    "unsupported": "yellow",
}


SHOWN_ALIKE = 3
"""Failures of one cause that are printed in full."""
SHOWN_MATCHES = 2
"""Mistakes that are named where several give the values."""

NOT_IMPLEMENTED = " is not implemented"
"""How sessions answer for a method that an implementation does not have."""


class _ReportConsole(Console):
    def on_broken_pipe(self) -> None:
        """Go on silently: the reader of a pipe has left, the run and its exit code still count."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            return


def make_console() -> Console:
    """The console of every report: standard output, no markup and no highlighting of what ports say.

    The stream is the one of this moment: a port that replaces `sys.stdout` later does not take the report with it.
    """
    return _ReportConsole(file=sys.stdout, markup=False, highlight=False, emoji=False)


def print_header(console: Console, header: Header) -> None:
    """What is about to be run against what."""
    implementation = header.implementation
    fixtures = header.fixtures
    selection = header.selection
    cases = f"{header.cases} at level {selection['level']}"
    if selection["shard"]:
        cases += f", part {selection['shard']}"
    if header.left_out:
        cases += f"; {header.left_out} of the other reading left out"
    console.print(f"DeepSeek-V4.1-Flash conformance {header.suite}", style="bold")
    fields = {
        "target": f"{header.target}: {implementation['name']} {implementation['version']}{runs_on(implementation)}",
        "reading": header.reading,
        "accumulator": implementation["accumulator"],
        "fixtures": f"{fixtures['directory']}, lock {fixtures['lock'][:12]}: {', '.join(fixtures['sets'])}",
        "cases": cases,
    }
    if implementation.get("deviations"):
        fields["deviations"] = ", ".join(implementation["deviations"])
    fields |= {f"  {name}": str(text) for name, text in implementation["conventions"].items()}
    print_fields(console, fields)
    console.print()


def runs_on(implementation: Mapping[str, Any]) -> str:
    """Language and device in brackets, as far as they are stated."""
    stated = ", ".join(filter(None, (implementation["language"], implementation["device"])))
    return f" ({stated})" if stated else ""


def print_case(console: Console, record: CaseRecord) -> None:
    """One line for a case that has just ended."""
    line = Text(f"{record.status:<11} ", style=STYLES[record.status])
    line.append(f"{record.id}  {record.seconds:.2f} s", style="default")
    if record.taps:
        line.append(f"  error/bound {ratio_text(record.ratio)}", style="default")
    console.print(line, soft_wrap=True)


def print_report(
    console: Console, header: Header, records: Sequence[CaseRecord], footer: Footer, compact: bool, verbose: bool
) -> None:
    """Everything that follows the run.  `compact` says less of failures, `verbose` lists every tap of them."""
    if records:
        console.print(_component_table(records))
        console.print()
    broken = [record for record in records if record.status == "BROKEN"]
    failures = [record for record in records if record.status in FAILURES]
    shown = failures if verbose else [record for group in _alike(failures) for record in group[:SHOWN_ALIKE]]
    for record in failures:
        if record in shown:
            _print_failure(console, record, compact, verbose)
    _print_folded(console, _alike(failures), shown, compact)
    if broken:
        console.print("Faults of the suite itself, not of the target; please report them:", style=STYLES["BROKEN"])
        for record in broken:
            _print_failure(console, record, compact, verbose)
    _print_expected(console, records)
    if not compact:
        _print_unsupported(console, records)
        _print_notes(console, records)
    if footer.stopped:
        done = f"after {len(records)} of {header.cases} cases"
        console.print(f"stopped {done}: {footer.stopped}", style="bold yellow", soft_wrap=True)
    style = {0: "bold green", 1: "bold red"}.get(footer.exit_code, "bold yellow")
    implementation = header.implementation
    sentence = verdict_sentence(
        records, header.cases, implementation["accumulator"], implementation.get("deviations", ())
    )
    console.print(sentence, style=style, soft_wrap=True)
    console.print(f"{footer.seconds:.1f} s, peak memory {footer.peak_memory_bytes / 2**20:,.0f} MiB")


def _alike(failures: Sequence[CaseRecord]) -> list[list[CaseRecord]]:
    """Failures of one component by the known mistake whose values they show, or else by the result that was wrong.

    First of each group come the cases that were made to catch that mistake: they say most about it.
    """
    groups: dict[tuple[str, ...], list[CaseRecord]] = {}
    for record in failures:
        names = tuple(match.name for match in record.matched if match.rank == 1)
        wrong = (record.first_failure.tap,) if record.first_failure and not record.message else (record.message,)
        groups.setdefault((record.status, record.component, *(names or wrong)), []).append(record)
    return [sorted(group, key=_made_for_another_mistake) for group in groups.values()]


def _made_for_another_mistake(record: CaseRecord) -> bool:
    return not any(match.flag in record.flags for match in record.matched if match.rank == 1)


def _print_folded(
    console: Console, groups: Sequence[Sequence[CaseRecord]], shown: Sequence[CaseRecord], compact: bool
) -> None:
    """What is not shown in full, under what it is like."""
    folded = [(group[0], [record.id for record in group if record not in shown]) for group in groups]
    if not any(ids for _, ids in folded):
        return
    where = "" if compact else ", in full with --verbose or --json"
    console.print(f"More failures like these{where}:", style="bold")
    for first, ids in folded:
        if ids:
            wrong = f"{first.first_failure.tap} is wrong" if first.first_failure else first.status
            cause = matches_in_words(first) or first.message or wrong
            _print_indented(console, f"{first.component}, {cases_in_words(len(ids))}: {cause}")
            for case_id in ids:
                console.print(f"    {case_id}", soft_wrap=True)
    console.print()


def matches_in_words(record: CaseRecord) -> str:
    """The known mistakes whose values came back; several where they cannot be told apart; empty for none."""
    best = [match for match in record.matched if match.rank == 1][:SHOWN_MATCHES]
    if not best:
        return ""
    said = [f"{match.words.rstrip('.')} ({match.flag or match.name})" for match in best]
    return f"your values equal ours with: {'; or: '.join(said)}"


def _component_table(records: Sequence[CaseRecord]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("component", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for title in ("pass", "fail", "unsup", "judged", "err/bnd"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("modes")
    for row in component_rows(records):
        table.add_row(
            row.component,
            Text(row.verdict, style=STYLES.get(row.verdict, STYLES["BROKEN"])),
            str(row.passed),
            str(row.failed),
            str(row.unsupported),
            _count(row.judged),
            "-" if row.ratio is None else ratio_text(row.ratio),
            ", ".join(row.modes),
        )
    return table


def failure_text(record: CaseRecord, width: int = 100) -> str:
    """What is printed for a failed case, without colour."""
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False, color_system=None)
    _print_failure(console, record, compact=False, verbose=True)
    return text.getvalue().rstrip()


def _print_failure(console: Console, record: CaseRecord, compact: bool, verbose: bool) -> None:
    console.print(Text(f"{record.status}  {record.id}", style=STYLES[record.status]), soft_wrap=True)
    element = record.first_failure
    if compact:
        found = record.message or (f"{element.tap}: {element.message}" if element else "")
        matches = matches_in_words(record)
        said = {"matches": matches} if matches else {}
        print_fields(console, {**said, "found": found, "re-run": record.rerun}, copyable="re-run")
        console.print()
        return
    fields: dict[str, str] = {}
    if record.matched:
        fields["matches"] = matches_in_words(record)
    if record.message:
        fields["message"] = record.message
        fields["where"] = ", ".join(filter(None, (record.component, record.reached)))
    if record.expectation is not None:
        fields["expected"] = f"{record.expectation.status}: {record.expectation.reason}\n{record.expectation.url}"
    if element is not None:
        if record.message:
            fields["before"] = f"{element.tap} ({element.mode}) was already wrong"
        fields |= _element_fields(record.component, element)
    others = [tap for tap in record.taps if not _good(tap) and (element is None or tap.tap != element.tap)]
    if others:
        fields["also wrong"] = "; ".join(_tap_line(tap) for tap in others)
    if element is not None and element.ratio > 0 and not record.message:
        # Without a wrong value there is nothing that the case's mistakes could explain.
        fields["why"] = record.why
        if record.flags:
            fields["flags"] = ", ".join(record.flags)
    fields["spec"] = record.spec
    if record.source:
        fields["inputs"] = record.source
    if verbose and record.taps:
        fields["taps"] = "\n".join(_tap_line(tap) for tap in record.taps)
    fields["re-run"] = record.rerun
    print_fields(console, fields, copyable="re-run")
    console.print()


def _element_fields(component: str, element: ElementRecord) -> dict[str, str]:
    fields = {
        "tap": f"{element.tap} ({element.mode}): {element.message}",
        "where": ", ".join(filter(None, (component, element.where))),
    }
    if element.actual is not None and element.expected is not None:
        fields["actual"] = f"{element.actual!r:<24} {element.actual_bits}".rstrip()
        fields["expected"] = f"{element.expected!r:<24} {element.expected_bits}".rstrip()
        error = f"{abs(element.actual - element.expected):.4g}"
        if not element.bound:
            fields["error"] = f"{error} (none is allowed)"
        else:
            fields["error"] = f"{error} (bound {element.bound:.4g}); worst error/bound {ratio_text(element.ratio)}"
    return fields


def _good(tap: TapRecord) -> bool:
    return not tap.wrong and not tap.worst.message


def _tap_line(tap: TapRecord) -> str:
    line = f"{tap.tap} ({tap.mode}) {tap.wrong} of {tap.judged} wrong, error/bound {ratio_text(tap.ratio)}"
    if tap.bias is not None:
        line += f", bias {tap.bias:+.1f} sigma"
    return line


def _print_expected(console: Console, records: Sequence[CaseRecord]) -> None:
    entries: dict[ExpectationRecord, list[CaseRecord]] = {}
    for record in records:
        # A failure that was not expected is shown as a failure.
        if record.expectation is not None and record.status not in (*FAILURES, "BROKEN"):
            entries.setdefault(record.expectation, []).append(record)
    stale = {entry for entry, group in entries.items() if any(record.status == "XPASS" for record in group)}
    for title, chosen in (
        (
            "These pass now: remove their entries, or narrow them (`conformance expect update` does it):",
            stale,
        ),
        ("As the expectations say:", entries.keys() - stale),
    ):
        if not chosen:
            continue
        console.print(title, style=STYLES["XPASS"] if chosen is stale else "bold", soft_wrap=True)
        for entry, group in entries.items():
            if entry in chosen:
                _print_entry(console, entry, group)
        console.print()


def _print_entry(console: Console, entry: ExpectationRecord, records: Sequence[CaseRecord]) -> None:
    statuses = [record.status for record in records]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    console.print(f"  {entry.pattern}: {entry.status} expected, {counts}", soft_wrap=True)
    for line in (*_wrapped(entry.reason, console.width - 4), entry.url):
        console.print(f"    {line}", soft_wrap=True)
    for record in records:
        if record.status == "XPASS":
            console.print(f"    XPASS  {record.id}", soft_wrap=True)


def _print_unsupported(console: Console, records: Sequence[CaseRecord]) -> None:
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.status == "UNSUPPORTED":
            reasons.setdefault(record.message, []).append(record.component)
    if not reasons:
        return
    console.print("Unsupported, not judged:", style="bold")
    absent = [reason.removesuffix(NOT_IMPLEMENTED) for reason in reasons if reason.endswith(NOT_IMPLEMENTED)]
    if absent:
        _print_indented(console, f"not implemented: {', '.join(absent)}")
    for reason, components in reasons.items():
        if reason.endswith(NOT_IMPLEMENTED):
            continue
        where = ", ".join(dict.fromkeys(components))
        _print_indented(console, f"{reason} ({cases_in_words(len(components))} of {where})")
    console.print()


def _print_notes(console: Console, records: Sequence[CaseRecord]) -> None:
    notes: dict[str, set[str]] = {}
    for record in records:
        for tap in record.taps:
            if tap.note:
                notes.setdefault(tap.note, set()).add(record.id)
    if not notes:
        return
    console.print("Notes on the rules:", style="bold")
    for note, ids in notes.items():
        _print_indented(console, f"{note} ({cases_in_words(len(ids))})")
    console.print()


def print_fields(console: Console, fields: Mapping[str, str], copyable: str = "") -> None:
    """Names and texts in two columns; the `copyable` one is never broken over lines."""
    width = max(len(name) for name in fields)
    for name, text in fields.items():
        lines = [text] if name == copyable else _wrapped(text, console.width - width - 4)
        for number, line in enumerate(lines):
            console.print(f"  {'' if number else name:<{width}}  {line}", soft_wrap=True)


def _print_indented(console: Console, text: str) -> None:
    for line in _wrapped(text, console.width - 2):
        console.print(f"  {line}", soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    # Not through rich, which fills every line with blanks up to the width.
    lines = [textwrap.wrap(line, max(width, 20), break_on_hyphens=False) for line in text.splitlines()]
    return [part for line in lines for part in line] or [""]


def cases_in_words(count: int) -> str:
    """A number of cases, "1 case" included."""
    return "1 case" if count == 1 else f"{count} cases"


def _count(number: int) -> str:
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.1f}M"


def ratio_text(ratio: float) -> str:
    """Error over bound in three digits; beyond a million the digits say nothing more."""
    if 1e6 < ratio < math.inf:
        return ">1e6"
    text = f"{ratio:.3g}"
    # A ratio just above one must not look like the largest one that passes.
    return ">1" if text == "1" and ratio > 1 else text
