"""`conformance durations`: how long each case took, for balancing shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def durations(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="JSON lines of finished runs.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="conformance/cases/durations.json of a checkout.")],
) -> int:
    """Record how long cases took: the longest time of each, rounded to milliseconds, from reports."""
    import json

    from conformance.report.output import OutputFile
    from conformance.report.reader import read_report

    seconds: dict[str, float] = {}
    with OutputFile("--out", out) as file:
        for path in reports:
            for record in read_report(path).records:
                # A case that was refused or not launched took no time that a port which has it would take.
                if record.status not in ("UNSUPPORTED", "QUARANTINE"):
                    seconds[record.id] = max(seconds.get(record.id, 0.0), round(record.seconds, 3))
        file.write(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n")
    print(f"wrote {out}: {len(seconds)} cases")
    return 0
