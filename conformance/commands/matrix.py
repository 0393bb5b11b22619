"""`conformance matrix`: many reports in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def matrix(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Reports, JSON lines, one a column.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write it as one HTML file.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write it as a Markdown table.")] = None,
) -> int:
    """Show implementations beside each other, component by component."""
    from contextlib import ExitStack

    from conformance.report.compare_terminal import print_matrix
    from conformance.report.matrix import as_markdown, make_matrix
    from conformance.report.output import OutputFile, refuse_same_file
    from conformance.report.reader import read_report
    from conformance.report.terminal import make_console

    refuse_same_file({"--html": html, "--markdown": markdown})
    with ExitStack() as stack:
        page = stack.enter_context(OutputFile.if_asked("--html", html))
        table = stack.enter_context(OutputFile.if_asked("--markdown", markdown))
        made = make_matrix([read_report(path) for path in reports])
        print_matrix(make_console(), made)
        if page is not None:
            from conformance.report.html.compare_page import matrix_page

            page.write(matrix_page(made))
        if table is not None:
            table.write(as_markdown(made))
    return 0
