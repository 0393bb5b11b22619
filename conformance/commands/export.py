"""`conformance export`: questions for a port that answers elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must not exist, or be empty.")],
    level: Annotated[
        Literal["smoke", "core", "full"] | None,
        typer.Option(help="Up to this level (default: core; full with --set)."),
    ] = None,
    expression: Annotated[
        str | None, typer.Option("-k", metavar="EXPR", help="Only ids that match, as in `conformance check`.")
    ] = None,
    components: Annotated[
        list[str] | None, typer.Option("--component", metavar="NAME", help="Only this component; may be repeated.")
    ] = None,
    set_name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="Only cases whose inputs come from this golden set.")
    ] = None,
    fixtures: Annotated[
        Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets to use instead of the shipped ones.")
    ] = None,
    materialize: Annotated[
        bool, typer.Option("--materialize", help="Write weights that follow from the recipe instead of naming them.")
    ] = False,
) -> int:
    """Write cases without answers to a folder; `conformance check dir:DIR` judges what a port puts there."""
    from conformance.folder.export import ExportOptions, export as run
    from conformance.selection import Selection

    # Whoever names a set means all of it.
    chosen = level or ("core" if set_name is None else "full")
    selection = Selection(chosen, expression, tuple(components or ()), set_name)
    return run(ExportOptions(folder, selection, fixtures, materialize), print)
