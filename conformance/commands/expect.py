"""`conformance expect`: the file of what is known of an implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Work on an expectations file.", no_args_is_help=True)


@app.command()
def update(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="JSON lines of a run.")],
    expect: Annotated[Path, typer.Option("--expect", metavar="FILE", help="The file; made if there is none.")],
    url: Annotated[
        str | None, typer.Option("--url", metavar="ISSUE", help="The issue that new entries are about.")
    ] = None,
    fixtures: Annotated[
        Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets that the run used.")
    ] = None,
) -> int:
    """Add entries for new failures, remove or narrow those whose cases pass; links, comments and order stay."""
    from conformance.cases import catalogue
    from conformance.errors import ConformanceError
    from conformance.expectation_updates import update as updated
    from conformance.fixtures import Fixtures
    from conformance.report.output import OutputFile
    from conformance.report.reader import read_report

    stored = read_report(report)
    opened = Fixtures.open(fixtures)
    if stored.header.fixtures["lock"] != opened.lock_hash:
        raise ConformanceError(f"{report}: was made with other fixtures; name them with --fixtures DIR")
    try:
        text = expect.read_text(encoding="utf-8") if expect.exists() else ""
    except UnicodeDecodeError:
        raise ConformanceError(f"--expect {expect}: is not UTF-8 text") from None
    result = updated(text, expect, catalogue.catalogue(opened), stored, url)
    if result.text != text:
        with OutputFile("--expect", expect) as file:
            file.write(result.text)
    for line in result.done or ["nothing to do"]:
        print(line)
    return 0
