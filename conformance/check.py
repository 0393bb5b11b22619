"""One run of the suite against one target: open, select, run, report."""

from __future__ import annotations

import datetime
import platform
import resource
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import conformance
from conformance.adapters.session import Session
from conformance.adapters.target import open_target
from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.errors import ConformanceError, TargetError
from conformance.fixtures import Fixtures
from conformance.interface import AccumulatorName, Description, Reading
from conformance.report.records import CaseRecord, Footer, Header, case_record
from conformance.report.summary import FAILED, status_counts
from conformance.report.terminal import make_console, print_case, print_header, print_report
from conformance.report.writer import ReportWriter
from conformance.runner import CaseResult, exit_code, run_case
from conformance.selection import Selection, of_reading, select, shard

INTERRUPTED = 130
COULD_NOT_RUN = 2


@dataclass(frozen=True)
class CheckOptions:
    """What `conformance check` was asked to do."""

    target: str
    selection: Selection
    fixtures: Path | None = None
    reading: Reading | None = None
    """None: the reading that the target declares."""
    shard: str | None = None
    json: Path | None = None
    fail_fast: bool = False
    verbose: bool = False
    compact: bool = False


def check(options: CheckOptions) -> int:
    """Run, print the report, and return the exit code.

    Raises:
        ConformanceError: the run could not begin, or a fixture turned out damaged; what was found is in the report.
    """
    try:
        return _check(options)
    except KeyboardInterrupt:
        print("conformance: interrupted before the first case", file=sys.stderr)
        return INTERRUPTED


def _check(options: CheckOptions) -> int:
    with ExitStack() as stack:
        console = make_console()
        writer = None if options.json is None else stack.enter_context(ReportWriter(options.json))
        fixtures = Fixtures.open(options.fixtures)
        cases = select(catalogue.catalogue(fixtures), options.selection)
        with _blaming(options.target):
            session = open_target(options.target)
        stack.callback(session.close)
        description = _description(options.target, session)
        reading = options.reading or description.reading
        applicable = of_reading(cases, reading)
        part = shard(applicable, options.shard)
        header = _header(options, fixtures, description, reading, len(part), len(cases) - len(applicable))
        if writer is not None:
            writer.begin(header)
        return _Run(options, header, writer, console).run(part, session)


class _Run:
    """The part of a check that leaves something behind, however it ends."""

    def __init__(self, options: CheckOptions, header: Header, writer: ReportWriter | None, console: Console) -> None:
        self._options = options
        self._header = header
        self._writer = writer
        self._console = console
        self._results: list[CaseResult] = []
        self._records: list[CaseRecord] = []
        self._start = time.perf_counter()

    def run(self, cases: Sequence[Case], session: Session) -> int:
        if not self._options.compact:
            print_header(self._console, self._header)
        stopped = ""
        try:
            stopped = self._run_cases(cases, session)
        except KeyboardInterrupt:
            return self._end(INTERRUPTED, "interrupted")
        except ConformanceError as error:
            self._end(COULD_NOT_RUN, str(error))
            raise
        return self._end(exit_code(self._results), stopped)

    def _run_cases(self, cases: Sequence[Case], session: Session) -> str:
        with self._progress() as progress:
            task = progress.add_task("", total=len(cases))
            for case in cases:
                progress.update(task, description=case.id)
                with _blaming(self._options.target):
                    result = run_case(case, session)
                self._keep(result)
                progress.advance(task)
                if self._options.fail_fast and self._results[-1].status in (*FAILED, "BROKEN"):
                    return "fail-fast" if len(self._results) < len(cases) else ""
        return ""

    def _progress(self) -> Progress:
        console = Console(stderr=True)
        # Verbose prints a line for each case, which a live line would tear.
        off = self._options.verbose or not console.is_terminal
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        return Progress(*columns, console=console, transient=True, disable=off)

    def _keep(self, result: CaseResult) -> None:
        record = case_record(result, rerun_command(self._options, result.case))
        self._results.append(result)
        self._records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        if self._options.verbose:
            print_case(self._console, record)

    def _end(self, code: int, stopped: str) -> int:
        counts = status_counts(self._records)
        names = ("PASS", "FAIL", "CRASH", "UNSUPPORTED", "BROKEN")
        footer = Footer(
            counts={name: counts[name] for name in names},
            seconds=time.perf_counter() - self._start,
            peak_memory_bytes=_peak_memory(),
            exit_code=code,
            stopped=stopped,
        )
        options = self._options
        if options.verbose and self._records:
            self._console.print()
        # Neither a closed terminal nor a full disk may cost the other copy of the findings.
        try:
            print_report(self._console, self._header, self._records, footer, options.compact, options.verbose)
        finally:
            if self._writer is not None:
                self._writer.write(footer)
        return code


@contextmanager
def _blaming(target: str) -> Iterator[None]:
    """A target that ends the process would otherwise choose this program's exit code."""
    try:
        yield
    except SystemExit as error:
        raise TargetError(f"target {target!r} tried to end the process with exit code {error.code}") from error


def _description(target: str, session: Session) -> Description:
    description = session.describe()
    for what, value, known in (
        ("reading", description.reading, get_args(Reading)),
        ("accumulator", description.accumulator, get_args(AccumulatorName)),
    ):
        if value not in known:
            raise TargetError(f"target {target!r}: declares {what} {value!r}, not {' or '.join(known)}")
    if not isinstance(description.conventions, Mapping):
        raise TargetError(f"target {target!r}: declares conventions that are not a mapping")
    return description


def _header(
    options: CheckOptions, fixtures: Fixtures, description: Description, reading: Reading, cases: int, left_out: int
) -> Header:
    selection = options.selection
    return Header(
        suite=conformance.__version__,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        target=options.target,
        implementation={
            "name": str(description.name),
            "version": str(description.version),
            "language": str(description.language),
            "device": str(description.device),
            "homepage": str(description.homepage),
            "reading": description.reading,
            "accumulator": description.accumulator,
            "conventions": {str(name): str(text) for name, text in description.conventions.items()},
        },
        reading=reading,
        selection={
            "level": selection.level,
            "expression": selection.expression,
            "components": list(selection.components),
            "set": selection.set_name,
            "shard": options.shard,
        },
        left_out=left_out,
        fixtures={
            "directory": "shipped" if options.fixtures is None else str(options.fixtures),
            "lock": fixtures.lock_hash,
            "sets": list(fixtures.sets),
        },
        cases=cases,
        environment=_environment(),
    )


def _environment() -> Mapping[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(), "numpy": np.__version__}
    torch: Any = sys.modules.get("torch")
    return versions if torch is None else {**versions, "torch": str(torch.__version__)}


def rerun_command(options: CheckOptions, case: Case) -> str:
    """The command that runs one case alone, with the same fixtures and reading."""
    words = ["conformance", "check", options.target]
    if options.fixtures is not None:
        words += ["--fixtures", str(options.fixtures)]
    if options.selection.set_name is not None:
        words += ["--set", options.selection.set_name]
    if options.reading is not None:
        words += ["--reading", options.reading]
    if case.level == "full":
        words += ["--level", "full"]
    return shlex.join([*words, "-k", case.id])


def _peak_memory() -> int:
    """Bytes; the system reports KiB, except macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
