"""One run of the suite against one target: open, select, run, report."""

from __future__ import annotations

import datetime
import resource
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import conformance
from conformance.adapters.folder import FolderSession
from conformance.adapters.session import Session
from conformance.adapters.target import open_target
from conformance.cases import catalogue
from conformance.cases.case import Case
from conformance.cases.durations import durations
from conformance.deviations import unknown_deviations
from conformance.errors import COULD_NOT_RUN, ConformanceError, TargetError, in_one_line, printable
from conformance.expectations import Entry, Run, as_expected, is_launched, not_launched, read_expectations
from conformance.fixtures import Fixtures
from conformance.interface import AccumulatorName, Description, Reading
from conformance.judge import fp4_codes
from conformance.parallel import in_order
from conformance.report.environment import environment
from conformance.report.github import failure_annotations, in_actions
from conformance.report.html.run_page import run_page
from conformance.report.junit import junit_xml
from conformance.report.output import OutputFile, refuse_same_file
from conformance.report.records import CaseRecord, Header, case_record
from conformance.report.summary import make_footer
from conformance.report.terminal import make_console, print_case, print_header, print_report
from conformance.report.writer import ReportWriter
from conformance.runner import UNWANTED, CaseResult, exit_code, run_case
from conformance.selection import Selection, of_reading, select, shard

INTERRUPTED = 130


@dataclass(frozen=True)
class CheckOptions:
    """What `conformance check` was asked to do."""

    target: str
    selection: Selection
    fixtures: Path | None = None
    checkpoint: Path | None = None
    """The weights of a set that was recorded from a checkpoint."""
    against: str | None = None
    """What `fixtures` were recorded from for this run alone: "reference"; None for fixtures that stay."""
    reading: Reading | None = None
    """None: the reading that the target declares."""
    shard: str | None = None
    agreed: bool = False
    """Whether the code of an `upstream:` checkout may be executed."""
    timeout: float | None = None
    """Seconds that a process has for one answer; None for the default."""
    jobs: int = 1
    """Processes that cases are put to at the same time."""
    world_size: int = 1
    """Ranks of a tensor-parallel target, each a process; 1 for a target that is none."""
    expect: Path | None = None
    """Known failures: see `conformance.expectations`."""
    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    explain: float = 0.0
    """Seconds to look for the known mistakes whose values failed cases show; 0 for not at all."""
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
    refuse_same_file({"--json": options.json, "--junit": options.junit, "--html": options.html})
    with ExitStack() as stack:
        console = make_console()
        writer = None if options.json is None else stack.enter_context(ReportWriter(options.json))
        junit = stack.enter_context(OutputFile.if_asked("--junit", options.junit))
        html = stack.enter_context(OutputFile.if_asked("--html", options.html))
        opened = open_run(options, stack)
        if writer is not None:
            writer.begin(opened.header)
        return _Run(options, opened, writer, junit, html, console).run()


@dataclass(frozen=True)
class OpenedRun:
    """Everything that a run needs, however its cases are then put to the target."""

    session: Session
    cases: Sequence[Case]
    header: Header
    expected: Mapping[str, Entry]
    """What is expected of cases, by id."""

    def judge(self, case: Case, rerun: str) -> CaseRecord:
        """Run one case and see it in the light of what is expected.

        Raises:
            ConformanceError: a fixture is damaged.
        """
        entry = self.expected.get(case.id)
        if entry is not None and not is_launched(entry):
            result = not_launched(case, entry)
        else:
            with _blaming(self.header.target):
                result = as_expected(run_case(case, self.session), entry)
        return case_record(result, rerun)


def open_run(options: CheckOptions, stack: ExitStack) -> OpenedRun:
    """Open fixtures and target and choose the cases; `stack` closes the target.

    Raises:
        ConformanceError: the run cannot begin.
    """
    expectations = None if options.expect is None else read_expectations(options.expect)
    fixtures = Fixtures.open(options.fixtures, checkpoint=options.checkpoint)
    everything = catalogue.catalogue(fixtures)
    if options.against is not None:
        # The noise of a set that was just made is not known.
        everything = [case for case in everything if case.mode != "propagated"]
    cases = select(everything, options.selection)
    with _blaming(options.target):
        session = _open_session(options)
    stack.callback(session.close)
    if isinstance(session, FolderSession):
        cases = session.answered(fixtures, cases)
    description = _description(options.target, session)
    reading = options.reading or description.reading
    applicable = of_reading(cases, reading)
    part = shard(applicable, options.shard, durations())
    run = Run(str(description.device), str(description.version), reading, description.accumulator)
    expected = {} if expectations is None else expectations.of_run(everything, run)
    header = _header(options, fixtures, description, reading, len(part), len(cases) - len(applicable))
    return OpenedRun(session, part, header, expected)


def _open_session(options: CheckOptions) -> Session:
    if options.world_size == 1:
        return open_target(options.target, options.timeout, options.agreed)
    from conformance.adapters.ranks import RanksSession

    return RanksSession(options.target, options.world_size, options.timeout)


class _Run:
    """The part of a check that leaves something behind, however it ends."""

    def __init__(
        self,
        options: CheckOptions,
        opened: OpenedRun,
        writer: ReportWriter | None,
        junit: OutputFile | None,
        html: OutputFile | None,
        console: Console,
    ) -> None:
        self._options = options
        self._opened = opened
        self._header = opened.header
        self._writer = writer
        self._junit = junit
        self._html = html
        self._console = console
        self._records: list[CaseRecord] = []
        self._start = time.perf_counter()

    def run(self) -> int:
        if not self._options.compact:
            print_header(self._console, self._header)
        stopped = ""
        try:
            stopped = self._run_cases(self._opened.cases)
        except KeyboardInterrupt:
            return self._end(INTERRUPTED, "interrupted")
        except ConformanceError as error:
            self._end(COULD_NOT_RUN, str(error))
            raise
        self._explain()
        return self._end(exit_code(self._records), stopped)

    def _explain(self) -> None:
        """Look for the known mistakes whose values the failed cases show, as long as the options allow.

        The run is over: an explanation that cannot be had costs nothing of what it found.
        """
        failed = [record.id for record in self._records if record.status == "FAIL"]
        if not failed or not self._options.explain:
            return
        # Imported late: a run without failures needs no catalogue of faults.
        from conformance.signatures.records import with_matches

        with ExitStack() as stack, self._progress() as progress:
            task = progress.add_task("", total=len(failed))

            def looking_at(case_id: str) -> None:
                progress.update(task, description=f"explaining {case_id}", advance=1)

            try:
                # The processes of a parallel run have taken their sessions with them.
                opened = self._opened if self._options.jobs == 1 else open_run(self._options, stack)
                seconds = self._options.explain
                self._records = with_matches(self._records, opened.cases, opened.session, seconds, looking_at)
            except KeyboardInterrupt:
                return
            except Exception as error:
                why = in_one_line(error)
                print(f"conformance: failures could not be compared with known mistakes: {why}", file=sys.stderr)

    def _run_cases(self, cases: Sequence[Case]) -> str:
        judge_all = self._one_by_one if self._options.jobs == 1 else self._in_parallel
        with self._progress() as progress, closing(judge_all(cases, progress)) as records:
            task = progress.add_task("", total=len(cases))
            for record in records:
                self._keep(record)
                progress.advance(task)
                if self._options.fail_fast and record.status in UNWANTED:
                    return "fail-fast" if len(self._records) < len(cases) else ""
        return ""

    def _one_by_one(self, cases: Sequence[Case], progress: Progress) -> Generator[CaseRecord]:
        for case in cases:
            for task in progress.task_ids:
                progress.update(task, description=case.id)
            yield self._opened.judge(case, rerun_command(self._options, case))

    def _in_parallel(self, cases: Sequence[Case], progress: Progress) -> Generator[CaseRecord]:
        def died(item: int, how: str) -> CaseRecord:
            case = cases[item]
            result = CaseResult(case, "CRASH", 0.0, message=f"the process ended {how}")
            return case_record(
                as_expected(result, self._opened.expected.get(case.id)), rerun_command(self._options, case)
            )

        # Every process opens the target for itself.
        self._opened.session.close()
        yield from in_order(partial(_prepare, self._options), len(cases), self._options.jobs, died)

    def _progress(self) -> Progress:
        console = Console(stderr=True)
        # Verbose prints a line for each case, which a live line would tear.
        off = self._options.verbose or not console.is_terminal
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        return Progress(*columns, console=console, transient=True, disable=off)

    def _keep(self, record: CaseRecord) -> None:
        self._records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        if self._options.verbose:
            print_case(self._console, record)

    def _end(self, code: int, stopped: str) -> int:
        footer = make_footer(self._records, time.perf_counter() - self._start, peak_memory(), code, stopped)
        options = self._options
        if options.verbose and self._records:
            self._console.print()
        # Neither a closed terminal nor a full disk may cost the other copy of the findings.
        try:
            print_report(self._console, self._header, self._records, footer, options.compact, options.verbose)
        finally:
            if self._writer is not None:
                if any(record.matched for record in self._records):
                    self._writer.rewrite([self._header, *self._records])
                self._writer.write(footer)
            if self._junit is not None:
                self._junit.write(junit_xml(self._header, self._records, footer))
            if self._html is not None:
                self._html.write(run_page(self._header, self._records, footer))
            if in_actions():
                for line in failure_annotations(self._records):
                    self._console.print(line, soft_wrap=True)
        return code


def _prepare(options: CheckOptions, stack: ExitStack) -> Callable[[int], CaseRecord]:
    """Open a run in another process; cases have the same numbers there."""
    opened = open_run(options, stack)

    def judge(number: int) -> CaseRecord:
        case = opened.cases[number]
        return opened.judge(case, rerun_command(options, case))

    return judge


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
    wrong = unknown_deviations(description.deviations)
    if wrong:
        raise TargetError(f"target {target!r}: declares {wrong}")
    if not isinstance(description.conventions, Mapping):
        raise TargetError(f"target {target!r}: declares conventions that are not a mapping")
    sign = description.conventions.get(fp4_codes.CONVENTION, fp4_codes.KEPT)
    if sign not in fp4_codes.VALUES:
        values = " or ".join(fp4_codes.VALUES)
        raise TargetError(f"target {target!r}: declares convention {fp4_codes.CONVENTION} {sign!r}, not {values}")
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
            "name": printable(description.name),
            "version": printable(description.version),
            "language": printable(description.language),
            "device": printable(description.device),
            "homepage": printable(description.homepage),
            "reading": description.reading,
            "accumulator": description.accumulator,
            "deviations": list(description.deviations),
            "conventions": {printable(name): printable(text) for name, text in description.conventions.items()},
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
            "directory": _directory(options),
            "lock": fixtures.lock_hash,
            "sets": list(fixtures.sets),
            "seeds": _seeds(fixtures),
        },
        cases=cases,
        environment=environment(),
        expectations=None if options.expect is None else str(options.expect),
    )


def _directory(options: CheckOptions) -> str:
    if options.against is not None:
        return f"made from the {options.against} for this run"
    return "shipped" if options.fixtures is None else str(options.fixtures)


def _seeds(fixtures: Fixtures) -> Mapping[str, int]:
    """What the golden data was drawn from: the recording's seed, and that of each set's weights recipe."""
    recorded = fixtures.manifest.get("seed")
    seeds = {"recording": recorded} if type(recorded) is int else {}
    return {**seeds, **{name: fixtures.recipe(name).seed for name in fixtures.sets if fixtures.kind(name) == "recipe"}}


def rerun_command(options: CheckOptions, case: Case) -> str:
    """The command that runs one case alone, with the same fixtures and reading."""
    words = ["conformance", "check", options.target]
    if options.against is not None:
        words += ["--against", options.against]
    elif options.fixtures is not None:
        words += ["--fixtures", str(options.fixtures)]
    if options.checkpoint is not None:
        words += ["--checkpoint", str(options.checkpoint)]
    if options.selection.set_name is not None and options.against is None:
        words += ["--set", options.selection.set_name]
    if options.reading is not None:
        words += ["--reading", options.reading]
    if options.agreed:
        words.append("--yes")
    if options.timeout is not None:
        words += ["--timeout", f"{options.timeout:g}"]
    if options.world_size != 1:
        words += ["--world-size", str(options.world_size)]
    if case.level == "full":
        words += ["--level", "full"]
    return shlex.join([*words, "-k", case.id])


def peak_memory() -> int:
    """Bytes of the largest process of the run, this one or one that has ended; systems count KiB, except macOS."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak if sys.platform == "darwin" else peak * 1024
