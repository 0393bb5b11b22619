"""One trace: open the target, run each scenario, compare, and look for the cause where one diverges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.adapters.session import Session, UnsupportedRequest
from conformance.adapters.target import open_target
from conformance.cases.noise_floors import floors_of
from conformance.cases.traces import GoldenModel, Trace
from conformance.errors import ConformanceError, TargetError
from conformance.fixtures import Fixtures
from conformance.interface import Description, Reading
from conformance.judge import accumulators, deviations
from conformance.tracing.compare import Comparison
from conformance.tracing.dump import read_dump
from conformance.tracing.finding import Finding
from conformance.tracing.free_running import free_running
from conformance.tracing.own_inputs import OwnInputs
from conformance.tracing.run import Run
from conformance.tracing.teacher_forced import teacher_forced

FOLDER = "dir:"


class NothingToTrace(TargetError):
    """The target shows nothing that could be traced."""


@dataclass(frozen=True)
class TraceOptions:
    """What `conformance trace` was asked to do."""

    target: str
    scenarios: tuple[str, ...] = ()
    """Empty: all."""
    set_name: str | None = None
    """None: the first model among the golden sets."""
    fixtures: Path | None = None
    reading: Reading | None = None
    timeout: float | None = None
    agreed: bool = False


@dataclass(frozen=True)
class Traced:
    """A trace of all scenarios."""

    target: str
    description: Description
    lock: str
    set_name: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def first(self) -> Finding | None:
        """The scenario to look at first: the shortest that diverges."""
        found = [finding for finding in self.findings if finding.diverges]
        return min(found, key=lambda finding: (finding.run.trace.total, finding.run.trace.name), default=None)

    @property
    def exit_code(self) -> int:
        """0 without a divergence, 1 with one."""
        return 0 if self.first is None else 1


def trace(options: TraceOptions, progress: Callable[[str], None]) -> Traced:
    """Trace a target; `progress` is told what is being done.

    Raises:
        ConformanceError: the target or a file cannot be used, a scenario is not known, or nothing can be traced.
    """
    start = time.perf_counter()
    fixtures = Fixtures.open(options.fixtures)
    golden = GoldenModel(fixtures.model(_set_name(fixtures, options.set_name)))
    with ExitStack() as stack:
        session: Session | None = None
        description = Description(options.target, "dumped", language="unknown", device="unknown")
        if not options.target.startswith(FOLDER):
            session = stack.enter_context(closing(open_target(options.target, options.timeout, options.agreed)))
            description = session.describe()
        elif options.timeout is not None:
            raise TargetError(f"target {options.target!r}: --timeout is for programs: a folder answers at once")
        stack.enter_context(accumulators.judging(description.accumulator))
        stack.enter_context(deviations.judging(description.deviations))
        reading = options.reading or description.reading
        chosen = _scenarios(golden, options, reading)
        runs = _runs(golden, options, chosen, session, progress)
        findings = tuple(_find(fixtures, golden, run, session, description, progress) for run in runs)
        if not findings:
            raise NothingToTrace(f"target {options.target!r}: {_nothing(session)}")
    return Traced(options.target, description, fixtures.lock_hash, golden.name, findings, time.perf_counter() - start)


def _nothing(session: Session | None) -> str:
    if session is None:
        return "no scenario in it is among those chosen"
    return "has no model, block or stack that can run a scenario"


def _set_name(fixtures: Fixtures, name: str | None) -> str:
    models = [known for known in fixtures.sets if fixtures.kind(known) == "model"]
    if name is None and models:
        return models[0]
    if name not in models:
        raise ConformanceError(f"--set {name}: not a recorded model: one of {', '.join(models) or 'none'}")
    return name


def _scenarios(golden: GoldenModel, options: TraceOptions, reading: Reading) -> list[Trace]:
    """The scenarios that were asked for, of the target's reading where the readings differ."""
    names = [scenario.name for scenario in golden.traces]
    for name in options.scenarios:
        if name not in names:
            raise ConformanceError(f"--scenario {name}: not a scenario of {golden.name}: one of {', '.join(names)}")
    chosen = [scenario for scenario in golden.traces if not options.scenarios or scenario.name in options.scenarios]
    return [found for found in chosen if len(found.starts) == 1 or found.scenario.reading == reading]


def _runs(
    golden: GoldenModel,
    options: TraceOptions,
    chosen: list[Trace],
    session: Session | None,
    progress: Callable[[str], None],
) -> Iterator[Run]:
    if session is None:
        folder = Path(options.target.removeprefix(FOLDER))
        yield from (run for run in read_dump(golden, folder, options.target) if run.trace in chosen)
        return
    for scenario in chosen:
        progress(f"{scenario.name}: free-running pass")
        try:
            yield free_running(golden, scenario, session)
        except UnsupportedRequest:
            continue


def _find(
    fixtures: Fixtures,
    golden: GoldenModel,
    run: Run,
    session: Session | None,
    description: Description,
    progress: Callable[[str], None],
) -> Finding:
    progress(f"{run.trace.name}: comparing")
    introduced = list(OwnInputs(golden, run).judged())
    own: dict[tuple[int | None, str], int | None] = {}
    for verdict in introduced:
        key = (verdict.layer, verdict.tap)
        earlier = own.get(key)
        if verdict.verdict.passed:
            own.setdefault(key, None)
        else:
            own[key] = verdict.call if earlier is None else min(earlier, verdict.call)
    cells = list(Comparison(golden, run, own, not description.deviations).cells())
    finding = Finding(run, cells, introduced)
    if session is None or not (finding.diverges or (finding.unclear and not introduced)):
        return finding
    progress(f"{run.trace.name}: component by component on recorded inputs")
    floors = floors_of(fixtures, golden)
    known = finding.wrong
    if known is not None and known.layer is not None:
        near = {known.layer - 1, known.layer}
        if finding.divergence is not None and finding.divergence.layer is not None:
            near |= {finding.divergence.layer - 1, finding.divergence.layer}
        return replace(finding, forced=teacher_forced(golden, run.trace, session, floors, sorted(near - {-1})))
    last = None if finding.divergence is None else finding.divergence.layer
    layers = range(golden.config.n_layers if last is None else last + 1)
    return replace(finding, forced=teacher_forced(golden, run.trace, session, floors, layers))
