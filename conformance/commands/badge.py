"""`conformance badge`: a badge from a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def badge(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="JSON lines that `check --json` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the JSON goes.")],
) -> int:
    """Write a report's verdict as a badge, in the endpoint form of shields.io."""
    from conformance.report.badge import badge as as_badge
    from conformance.report.output import OutputFile
    from conformance.report.reader import read_report

    with OutputFile("--out", out) as file:
        file.write(as_badge(read_report(report)))
    return 0
