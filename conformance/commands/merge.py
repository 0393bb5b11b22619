"""`conformance merge`: one report out of those of a run's shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="JSON lines of every shard of a run.")],
    json: Annotated[Path, typer.Option(metavar="FILE", help="Where the merged report goes.")],
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write it as JUnit XML.")] = None,
) -> int:
    """Make one report of the reports of shards; exit code as `check`, and 2 when a part is missing or cut off."""
    from contextlib import ExitStack

    from conformance.merging import merge as merge_reports
    from conformance.report.github import failure_annotations, in_actions
    from conformance.report.junit import junit_xml
    from conformance.report.output import OutputFile, refuse_same_file
    from conformance.report.reader import read_report
    from conformance.report.terminal import make_console, print_header, print_report
    from conformance.report.writer import ReportWriter

    merged = merge_reports([read_report(path) for path in reports])
    refuse_same_file({"--json": json, "--junit": junit})
    with ExitStack() as stack:
        writer = stack.enter_context(ReportWriter(json))
        file = stack.enter_context(OutputFile.if_asked("--junit", junit))
        writer.begin(merged.header)
        for record in merged.records:
            writer.write(record)
        writer.write(merged.footer)
        if file is not None:
            file.write(junit_xml(merged.header, merged.records, merged.footer))
    console = make_console()
    print_header(console, merged.header)
    print_report(console, merged.header, merged.records, merged.footer, compact=False, verbose=False)
    if in_actions():
        for line in failure_annotations(merged.records):
            console.print(line, soft_wrap=True)
    if merged.incomplete:
        print(f"conformance: {'; '.join(merged.incomplete)}", file=sys.stderr)
    return merged.footer.exit_code
