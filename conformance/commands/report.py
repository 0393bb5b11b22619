"""`conformance report`: what is derived from a stored report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[Path, typer.Argument(metavar="REPORT", help="JSON lines that `check --json` wrote.")],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as one HTML file.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as JUnit XML.")] = None,
) -> int:
    """Show a stored report, on the terminal or as files; exit code 0 whatever it says, 2 if it cannot be read."""
    from contextlib import ExitStack

    from conformance.report.output import OutputFile, refuse_same_file
    from conformance.report.reader import read_report

    refuse_same_file({"--html": html, "--junit": junit})
    with ExitStack() as stack:
        files = {
            option: stack.enter_context(OutputFile(option, file))
            for option, file in (("--html", html), ("--junit", junit))
            if file is not None
        }
        stored = read_report(path)
        header, records, footer = stored.header, stored.records, stored.ending
        if "--html" in files:
            from conformance.report.html.run_page import run_page

            files["--html"].write(run_page(header, records, stored.footer))
        if "--junit" in files:
            from conformance.report.junit import junit_xml

            files["--junit"].write(junit_xml(header, records, footer))
        if not files:
            from conformance.report.terminal import make_console, print_header, print_report

            console = make_console()
            print_header(console, header)
            print_report(console, header, records, footer, compact=False, verbose=False)
    if stored.footer is None:
        print(f"conformance: {stored.shown}: {stored.cut_off}", file=sys.stderr)
    return 0
