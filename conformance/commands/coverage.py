"""`conformance coverage`: how much of the golden data the cases use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def coverage(
    fixtures: Annotated[
        Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets to use instead of the shipped ones.")
    ] = None,
    set_names: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this golden set; may be repeated.")
    ] = None,
    names: Annotated[bool, typer.Option("--names", help="List every tensor that no case uses.")] = False,
) -> int:
    """Show which recorded tensors the cases use: exit code 0 if some of every tap, 1 if a tap is used by none."""
    from conformance.cases import catalogue
    from conformance.coverage import measure, never_used
    from conformance.fixtures import Fixtures
    from conformance.report.coverage import print_coverage
    from conformance.report.terminal import make_console

    opened = Fixtures.open(fixtures)
    files = measure(opened, catalogue.catalogue(opened), tuple(set_names or ()))
    print_coverage(make_console(), files, names)
    return 1 if never_used(files) else 0
