"""The report of a pytest run, written by the process that the user started: with pytest-xdist the controller.

Records arrive with the outcomes of the items, from whatever worker, and are written at once: a run that is killed
leaves a readable report.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conformance.errors import ConformanceError
from conformance.report.github import failure_annotations, in_actions
from conformance.report.reader import parse_record
from conformance.report.records import CaseRecord, Header
from conformance.report.summary import make_footer, verdict_sentence
from conformance.report.writer import ReportWriter
from conformance.runner import exit_code

INTERRUPTED = 130


class Report:
    """Collects the records of a run."""

    def __init__(self, config: pytest.Config) -> None:
        path = config.option.conformance_report
        try:
            self._writer = None if path is None else ReportWriter(Path(path))
        except ConformanceError as error:
            raise pytest.UsageError(str(error).replace("--json", "--conformance-report", 1)) from error
        self._header: Header | None = None
        self._records: list[CaseRecord] = []
        self._lost: list[str] = []
        self._peak = 0
        self._start = time.perf_counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record that came with a report."""
        line: str | None = getattr(report, "conformance_record", None)
        if line is None:
            if report.failed and report.nodeid.startswith("conformance::"):
                # The process died, or a fixture is damaged: there is an outcome without a record.
                self._lost.append(report.nodeid.removeprefix("conformance::"))
            return
        record = parse_record(line)
        assert isinstance(record, CaseRecord)
        self._begin(report.conformance_header)
        self._records.append(record)
        self._peak = max(self._peak, report.conformance_memory)
        if self._writer is not None:
            self._writer.write(record)

    def _begin(self, line: str) -> None:
        if self._header is None:
            header = parse_record(line)
            assert isinstance(header, Header)
            self._header = header
            if self._writer is not None:
                self._writer.begin(header)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the footer; a run in which every case was skipped is no success."""
        if self._header is not None and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = self._exit_code(exitstatus)
        if self._writer is None:
            return
        with self._writer:
            if self._header is None:
                return
            code = self._exit_code(exitstatus)
            seconds = time.perf_counter() - self._start
            self._writer.write(make_footer(self._records, seconds, self._peak, code, self._stopped(exitstatus)))

    def _exit_code(self, exitstatus: int) -> int:
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            return INTERRUPTED
        return 1 if self._lost else exit_code(self._records)

    def _stopped(self, exitstatus: int) -> str:
        if self._header is None or len(self._records) == self._header.cases:
            return ""
        if self._lost:
            return f"no record of {', '.join(self._lost[:3])}{', ...' if len(self._lost) > 3 else ''}"
        return "interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else "fail-fast"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The verdict, which counts unsupported cases as pytest does not, and annotations where they are read."""
        if self._header is None:
            return
        implementation = self._header.implementation
        sentence = verdict_sentence(
            self._records, self._header.cases, implementation["accumulator"], implementation.get("deviations", ())
        )
        terminalreporter.section(f"conformance of {self._header.target}")
        terminalreporter.write_line(f"lock {self._header.fixtures['lock'][:12]}, reading {self._header.reading}")
        terminalreporter.write_line(sentence)
        if in_actions():
            for line in failure_annotations(self._records):
                terminalreporter.write_line(line)
