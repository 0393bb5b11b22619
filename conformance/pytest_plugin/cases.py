"""Cases as items of a pytest run.

The cases belong to the root folder: they run when all of it is collected, or when they are named, as
`conformance::COMPONENT/...`.  With pytest-xdist this happens once in every worker and never in the controller.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.cases.case import Case, Level
from conformance.check import CheckOptions, OpenedRun, open_run, peak_memory, rerun_command
from conformance.errors import ConformanceError, in_one_line
from conformance.pytest_plugin.explanations import Explanations
from conformance.pytest_plugin.gpu import give_worker_its_gpu
from conformance.report.junit import summary_of
from conformance.report.records import CaseRecord, as_line
from conformance.report.terminal import failure_text
from conformance.runner import UNWANTED
from conformance.selection import Selection
from conformance.signatures import DEFAULT_SECONDS

COLLECTOR = "conformance"
PREFIX = f"{COLLECTOR}::"


class Cases:
    """Adds the items; closes the target when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._options = check_options(config)
        self._named = take_named_cases(config)
        self._wanted = self._named is not None or covers_root(config)
        self._stack = ExitStack()
        self._opened: OpenedRun | None = None
        self._header_line = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Before everything that deselects: `-k`, `-m`, `--lf` and `--deselect` apply to cases as to tests."""
        if not self._wanted:
            return
        workerinput: Mapping[str, Any] | None = getattr(config, "workerinput", None)
        if workerinput is not None:
            give_worker_its_gpu(workerinput["workerid"])
        # A port is often a file beside the configuration, and the run may begin in a folder below.
        if str(config.rootpath) not in sys.path:
            sys.path.insert(0, str(config.rootpath))
        try:
            self._opened = open_run(self._options, self._stack)
            chosen = [case for case in self._opened.cases if is_named(case, self._named)]
            for name in self._named or ():
                if not any(is_named(case, [name]) for case in chosen):
                    raise ConformanceError(f"{PREFIX}{name}: selects no case")
        except ConformanceError as error:
            if workerinput is None:
                raise pytest.UsageError(f"conformance: {error}") from error
            # What a worker raises while it collects would not reach the terminal.
            session.shouldfail = f"conformance: {error}"
            return
        parent = CaseCollector.from_parent(session, name=COLLECTOR, nodeid=COLLECTOR)
        explanations = Explanations(self._opened.session, self._options.explain)
        made: list[pytest.Item] = [
            CaseItem.from_parent(
                parent,
                name=case.id,
                case=case,
                opened=self._opened,
                options=self._options,
                explanations=explanations,
            )
            for case in chosen
        ]
        for item in made:
            session.ihook.pytest_itemcollected(item=item)
        # Whoever counts or caches what was collected learns it from here.
        session.ihook.pytest_collectreport(
            report=pytest.CollectReport(COLLECTOR, "passed", longrepr=None, result=[*made])
        )
        items += made

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The number of cases is known when everything is deselected that will be."""
        if self._opened is not None:
            count = sum(isinstance(item, CaseItem) for item in session.items)
            self._header_line = as_line(replace(self._opened.header, cases=count))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Send the record along with the outcome: with pytest-xdist only the report reaches the controller."""
        outcome = yield
        if isinstance(item, CaseItem) and item.record is not None and call.when == "call":
            report = outcome.get_result()
            report.conformance_header = self._header_line
            report.conformance_record = as_line(item.record)
            report.conformance_memory = peak_memory()

    def pytest_sessionfinish(self) -> None:
        """Let go of the target."""
        self._stack.close()


class CaseCollector(pytest.Collector):
    """The parent of all cases; has no file."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        """Nothing: the items are made with the target at hand."""
        return []


class CaseFailed(Exception):
    """Carries the outcome of a case to `repr_failure`."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(
        self, *, case: Case, opened: OpenedRun, options: CheckOptions, explanations: Explanations, **more: Any
    ) -> None:
        super().__init__(**more)
        self.record: CaseRecord | None = None
        self._case = case
        self._opened = opened
        self._options = options
        self._explanations = explanations
        device = re.split(r"[\s:]", str(opened.header.implementation["device"]), maxsplit=1)[0]
        self.add_marker(
            pytest.mark.conformance(component=case.component, level=case.level, mode=case.mode, device=device)
        )

    def runtest(self) -> None:
        """Judge the case.

        Raises:
            CaseFailed: the outcome fails the run.
        """
        record = self._opened.judge(self._case, rerun_command(self._options, self._case))
        try:
            record = self._explanations.of(record, self._case)
        except Exception as error:
            # The item has failed already: what is known of it must not be lost for want of an explanation.
            why = f"the failure could not be compared with known mistakes: {in_one_line(error)}"
            self.add_report_section("call", "conformance", why)
        self.record = record
        self.user_properties += properties_of(record).items()
        if record.status in UNWANTED:
            raise CaseFailed
        if record.status == "XFAIL":
            pytest.xfail(summary_of(record).removeprefix("xfail: "))
        if record.status != "PASS":
            pytest.skip(summary_of(record))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The suite's own explanation; a trace of the suite's calls would explain nothing."""
        if isinstance(excinfo.value, CaseFailed) and self.record is not None:
            return failure_text(self.record)
        if isinstance(excinfo.value, ConformanceError):
            return f"conformance: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Headings name the case."""
        return self.path, None, self.name


def check_options(config: pytest.Config) -> CheckOptions:
    """The options of a run as `conformance check` would have them."""
    option = config.option
    set_name = option.conformance_set
    level: Level = option.conformance_level or ("core" if set_name is None else "full")
    return CheckOptions(
        option.conformance_target,
        Selection(level, None, tuple(option.conformance_component or ()), set_name),
        fixtures=None if option.conformance_fixtures is None else Path(option.conformance_fixtures),
        reading=option.conformance_reading,
        shard=option.conformance_shard,
        expect=None if option.conformance_expect is None else Path(option.conformance_expect),
        explain=DEFAULT_SECONDS if option.conformance_explain is None else option.conformance_explain,
    )


def take_named_cases(config: pytest.Config) -> list[str] | None:
    """Remove `conformance::...` from the arguments, which pytest would take for files; None where there are none."""
    named = [argument for argument in config.args if argument.startswith(PREFIX)]
    config.args[:] = [argument for argument in config.args if argument not in named]
    return [argument.removeprefix(PREFIX).strip("/") for argument in named] or None


def is_named(case: Case, named: list[str] | None) -> bool:
    """Whether a case, its behaviour or its component is among the names; an empty name stands for all."""
    return named is None or any(name in ("", case.id) or case.id.startswith(f"{name}/") for name in named)


def covers_root(config: pytest.Config) -> bool:
    """Whether the run is about the whole root folder.

    A target that stands in the configuration file must not add its cases to `pytest tests/test_one.py`; a target that
    was typed is wanted.
    """
    typed = any(word.split("=")[0] == "--conformance" for word in map(str, config.invocation_params.args))
    if typed or config.args_source is not pytest.Config.ArgsSource.ARGS:
        return True
    here = config.invocation_params.dir
    return any(config.rootpath.is_relative_to(os.path.normpath(here / argument)) for argument in config.args)


def properties_of(record: CaseRecord) -> dict[str, str]:
    """What JUnit files show of a case beside its outcome."""
    properties = {
        "status": record.status,
        "error_over_bound": f"{record.ratio:.6g}" if record.taps else "",
        "judged": str(record.judged),
        "flags": ", ".join(record.flags),
        "spec": record.spec,
        "rerun": record.rerun,
    }
    if record.first_failure is not None:
        properties["where"] = f"{record.first_failure.tap}: {record.first_failure.where}"
    if record.expectation is not None:
        properties["issue"] = record.expectation.url
    return {name: value for name, value in properties.items() if value}
