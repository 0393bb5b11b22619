"""Many reports in one table: implementation by component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.interface import COMPONENTS
from conformance.report.reader import StoredReport
from conformance.report.summary import TONES, component_rows, verdict_sentence


@dataclass(frozen=True)
class Cell:
    """One implementation's result for one component."""

    verdict: str
    passed: int
    cases: int

    @property
    def tone(self) -> str:
        """How the verdict is meant."""
        return TONES.get(self.verdict, "warn")


@dataclass(frozen=True)
class Column:
    """One report."""

    title: str
    """Name and version of the implementation, with the report's file where two have the same."""
    report: StoredReport
    verdict: str
    rows: Mapping[str, Cell]
    """By component."""


@dataclass(frozen=True)
class Matrix:
    """Reports beside each other."""

    components: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def differing(self) -> Sequence[str]:
        """What makes columns hard to compare, in words."""
        headers = [column.report.header for column in self.columns]
        facts = {
            "versions of the suite": {header.suite for header in headers},
            "fixtures": {header.fixtures["lock"] for header in headers},
            "levels": {header.selection["level"] for header in headers},
            "readings": {header.reading for header in headers},
        }
        return [name for name, values in facts.items() if len(values) > 1]


def make_matrix(reports: Sequence[StoredReport]) -> Matrix:
    """The matrix of some reports, in their order."""
    columns = [_column(report) for report in reports]
    titles = Counter(column.title for column in columns)
    columns = [
        replace(column, title=f"{column.title} ({column.report.shown})") if titles[column.title] > 1 else column
        for column in columns
    ]
    found = {component for column in columns for component in column.rows}
    known = [component for component in COMPONENTS if component in found]
    return Matrix((*known, *sorted(found - set(known))), tuple(columns))


def _column(report: StoredReport) -> Column:
    implementation = report.header.implementation
    cases = Counter(record.component for record in report.records)
    rows = {
        row.component: Cell(row.verdict, row.passed, cases[row.component]) for row in component_rows(report.records)
    }
    sentence = verdict_sentence(
        report.records, report.header.cases, implementation["accumulator"], implementation.get("deviations", ())
    )
    return Column(f"{implementation['name']} {implementation['version']}", report, sentence, rows)


def as_markdown(matrix: Matrix) -> str:
    """The matrix as a Markdown table, then a line for each implementation."""
    lines = [
        _row(["component", *(column.title for column in matrix.columns)]),
        _row(["---"] * (len(matrix.columns) + 1), escape=False),
    ]
    for component in matrix.components:
        cells = [column.rows.get(component) for column in matrix.columns]
        lines.append(
            _row([component, *("–" if row is None else f"{row.verdict} {row.passed}/{row.cases}" for row in cells)])
        )
    lines.append("")
    lines += [f"- **{_escaped(column.title)}**: {_escaped(column.verdict)}" for column in matrix.columns]
    if matrix.differing:
        lines += ["", f"The reports differ in their {', '.join(matrix.differing)}."]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str], escape: bool = True) -> str:
    return f"| {' | '.join(map(_escaped, cells) if escape else cells)} |"


def _escaped(text: str) -> str:
    """A text of a port inside Markdown: no markup of its own, no HTML, one line."""
    shown = "".join(character if character.isprintable() else " " for character in text)[:200]
    return "".join(f"\\{character}" if character in "\\`*_[]()<>#|!~&" else character for character in shown)
