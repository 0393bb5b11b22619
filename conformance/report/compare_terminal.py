"""What `conformance compare` and `conformance matrix` print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.report.compare import Change, Comparison, sections
from conformance.report.matrix import Matrix
from conformance.report.terminal import STYLES, cases_in_words, print_fields, ratio_text
from conformance.tensors import one_line

SHOWN = 20
"""Lines of each list; the HTML page has them all."""


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Circumstances that differ, lists of cases, verdict."""
    reports = {"before": comparison.before, "after": comparison.after}
    print_fields(
        console,
        {
            side: f"{report.shown}: {one_line(report.header.implementation['name'])} "
            f"{one_line(report.header.implementation['version'])}, {cases_in_words(len(report.records))}"
            for side, report in reports.items()
        },
    )
    console.print()
    if comparison.differences:
        console.print("The runs differ in:", style="bold")
        fields = {
            one_line(entry.name): f"{one_line(entry.before) or '-'} -> {one_line(entry.after) or '-'}"
            for entry in comparison.differences
        }
        print_fields(console, fields)
        console.print()
    for title, changes in sections(comparison):
        _print_changes(console, title, changes)
    for title, records in (("Only before", comparison.only_before), ("Only after", comparison.only_after)):
        if records:
            failing = sum(record.status in ("FAIL", "CRASH", "TIMEOUT", "PROTOCOL") for record in records)
            note = f", {failing} of them failing" if failing else ""
            console.print(f"{title}: {cases_in_words(len(records))}{note}", soft_wrap=True)
    style = {0: "bold green", 1: "bold red"}.get(comparison.exit_code, "bold yellow")
    console.print(comparison.sentence, style=style, soft_wrap=True)


def _print_changes(console: Console, title: str, changes: Sequence[Change]) -> None:
    if not changes:
        return
    console.print(f"{title}: {len(changes)}", style="bold")
    for change in changes[:SHOWN]:
        before, after = change.before, change.after
        if before.status == after.status:
            line = Text(f"  {ratio_text(before.ratio)} -> {ratio_text(after.ratio)}", style="default")
        else:
            line = Text(f"  {before.status} -> ")
            line.append(after.status, style=STYLES[after.status])
        line.append(f"  {one_line(change.id)}", style="default")
        console.print(line, soft_wrap=True)
    if len(changes) > SHOWN:
        console.print(f"  and {len(changes) - SHOWN:,} more", soft_wrap=True)
    console.print()


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Components down, implementations across."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("component", no_wrap=True)
    for column in matrix.columns:
        table.add_column(one_line(column.title))
    for component in matrix.components:
        cells = [column.rows.get(component) for column in matrix.columns]
        table.add_row(
            one_line(component),
            *(
                Text("-")
                if row is None
                else Text(f"{row.verdict} {row.passed}/{row.cases}", STYLES.get(row.verdict, ""))
                for row in cells
            ),
        )
    console.print(table)
    console.print()
    for column in matrix.columns:
        console.print(f"{one_line(column.title)}: {column.verdict}", soft_wrap=True)
