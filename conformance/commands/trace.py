"""`conformance trace`: where a whole model that runs freely first leaves the golden trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="As for check, or dir:DIR with SCENARIO/CALL.safetensors of dumped taps."
        ),
    ],
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this scenario; may be repeated.")
    ] = None,
    set_name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="The recorded model to trace (default: the first).")
    ] = None,
    fixtures: Annotated[
        Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets to use instead of the shipped ones.")
    ] = None,
    reading: Annotated[
        Literal["intended", "literal"] | None,
        typer.Option(help="Reading of the shared index-key slot (default: the one that the target declares)."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write every distance as JSON.")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="For cmd: targets, as for check.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="For upstream:DIR, execute the checkout's code.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The table of every scenario.")] = False,
) -> int:
    """Run the whole model freely and find the first tap that leaves the recording: exit code 1 if one does."""
    from contextlib import ExitStack

    from conformance.report.output import OutputFile
    from conformance.report.terminal import make_console
    from conformance.tracing import records, table, trace as tracing

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        file = stack.enter_context(OutputFile.if_asked("--json", json))
        options = tracing.TraceOptions(target, tuple(scenarios or ()), set_name, fixtures, reading, timeout, yes)
        traced = tracing.trace(options, progress)
        progress("")
        table.print_trace(make_console(), traced, verbose)
        if file is not None:
            file.write(records.trace_json(traced))
    return traced.exit_code
