"""`conformance compare`: what changed between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="The earlier report, JSON lines.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The later report, JSON lines.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write it as one HTML file.")] = None,
) -> int:
    """Compare two reports: exit code 0 without a regression, 1 with one, 2 if a report is not complete."""
    from contextlib import ExitStack

    from conformance.report.compare import compare as compare_reports
    from conformance.report.compare_terminal import print_comparison
    from conformance.report.output import OutputFile
    from conformance.report.reader import read_report
    from conformance.report.terminal import make_console

    with ExitStack() as stack:
        file = stack.enter_context(OutputFile.if_asked("--html", html))
        comparison = compare_reports(read_report(before), read_report(after))
        print_comparison(make_console(), comparison)
        if file is not None:
            from conformance.report.html.compare_page import compare_page

            file.write(compare_page(comparison))
    return comparison.exit_code
