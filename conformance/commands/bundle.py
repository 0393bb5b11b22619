"""`conformance bundle` and `conformance verify-bundle`: submissions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SHOWN = 20

FixturesDirectory = Annotated[
    Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets to use instead of the shipped ones.")
]


def bundle(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="JSON lines that `check --json` wrote.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="A new ZIP file (.zip), or a new folder.")],
    expect: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The expectations that the run was made with.")
    ] = None,
    fixtures: FixturesDirectory = None,
) -> int:
    """Pack a report with its lock, expectations and environment, for others to verify."""
    from conformance.fixtures import Fixtures
    from conformance.report.bundle import make_bundle, write_bundle
    from conformance.report.reader import read_report
    from conformance.tensors import one_line

    files = make_bundle(read_report(report), Fixtures.open(fixtures), expect)
    write_bundle(files, out)
    print(f"{one_line(str(out))}: {', '.join(files)}")
    return 0


def verify_bundle(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A ZIP file or folder that `bundle` wrote.")],
    fixtures: FixturesDirectory = None,
) -> int:
    """Judge a bundle again: exit code 0 if it is as it must be and conforms, 1 if not, 2 if it is none."""
    from conformance.fixtures import Fixtures
    from conformance.report.bundle import read_bundle
    from conformance.report.rejudge import rejudge
    from conformance.report.summary import verdict_sentence
    from conformance.tensors import one_line

    found = rejudge(path, read_bundle(path), Fixtures.open(fixtures))
    header = found.report.header
    implementation = header.implementation
    for problem in found.problems[:SHOWN]:
        print(f"differs: {problem}")
    if len(found.problems) > SHOWN:
        print(f"differs: and {len(found.problems) - SHOWN:,} more")
    sentence = verdict_sentence(
        found.report.records, header.cases, implementation["accumulator"], implementation.get("deviations", ())
    )
    print(f"{one_line(implementation['name'])} {one_line(implementation['version'])}: {one_line(sentence)}")
    print("verified" if not found.problems else f"not verified: {len(found.problems):,} differences")
    return 1 if found.problems else found.exit_code
