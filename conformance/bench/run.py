"""A run of `conformance bench`: kernel by kernel, gated, timed by turns with what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from conformance.bench import compare, declarations, devices, measure, store, timers
from conformance.bench.declarations import Declaration
from conformance.bench.devices import Device, Kind
from conformance.bench.gate import Refused
from conformance.bench.inputs import Inputs, TooLarge
from conformance.bench.measure import Run
from conformance.bench.problem import Problem
from conformance.bench.results import Entry, Measured, Other, Report, Status, Times
from conformance.bench.roofs import RoofMeter
from conformance.bench.store import Stored
from conformance.bench.subjects import Subject
from conformance.bench.targets import open_subject
from conformance.bench.timers import Timer
from conformance.errors import ConformanceError
from conformance.interface import Unsupported
from conformance.report.environment import environment
from conformance.report.output import OutputFile, refuse_same_file
from conformance.tensors import one_line

DEFAULT_TARGETS: Mapping[Kind, str] = {"cpu": "reference", "cuda": "optimized"}
SHAPE_SETS: Mapping[str, Sequence[str]] = {
    "small": ("small",),
    "decode": ("decode",),
    "prefill": ("prefill",),
    "released": declarations.RELEASED,
}
DEFAULT_SHAPES: Mapping[Kind, str] = {"cpu": "small", "cuda": "released"}


@dataclass(frozen=True)
class BenchOptions:
    """What `conformance bench` was asked to do."""

    kernels: tuple[str, ...] = ()
    target: str | None = None
    device: Kind | None = None
    shapes: str | None = None
    against: tuple[str, ...] = ()
    fail_if_slower: str | None = None
    agreed: bool = False
    json: Path | None = None
    html: Path | None = None
    history: Path | None = None


class Show(Protocol):
    """Shows a run as it goes."""

    def begin(self, subject: Measured, device: Device) -> None:
        """Before the first kernel."""

    def entry(self, entry: Entry) -> None:
        """After each kernel."""

    def end(self, report: Report) -> None:
        """After the last one."""


def declared(options: BenchOptions, kind: Kind) -> list[Declaration]:
    """The declarations that are asked for.

    Raises:
        ConformanceError: no such kernel, shapes or file.
    """
    shapes = DEFAULT_SHAPES[kind] if options.shapes is None else options.shapes
    if shapes in SHAPE_SETS:
        return declarations.select(declarations.read(), SHAPE_SETS[shapes], options.kernels)
    if not Path(shapes).is_file():
        raise ConformanceError(f"--shapes {one_line(shapes)}: neither {', '.join(SHAPE_SETS)} nor a file")
    chosen = declarations.select(declarations.read(Path(shapes)), declarations.SETS, options.kernels)
    for declaration in chosen:
        # Sizes that a kernel cannot have are told before anything is measured.
        declaration.problem()
    return chosen


def bench(options: BenchOptions, show: Show) -> int:
    """Measure, show, write; returns the exit code.

    Raises:
        ConformanceError: the run is not possible; one line.
    """
    refuse_same_file({"--json": options.json, "--html": options.html})
    with ExitStack() as stack:
        written = {
            name: stack.enter_context(OutputFile(f"--{name}", path))
            for name, path in (("json", options.json), ("html", options.html))
            if path is not None
        }
        allowed = None if options.fail_if_slower is None else compare.parse_allowed(options.fail_if_slower)
        device = devices.find(options.device)
        wanted = declared(options, device.kind)
        stored = _baselines(options.against, device)
        if allowed is not None and len(stored) != 1:
            raise ConformanceError("--fail-if-slower needs one stored baseline: --against FILE.json")
        if allowed is not None and not any(entry.hash in of for of in stored.values() for entry in wanted):
            raise ConformanceError(
                f"{one_line(next(iter(stored)))}: holds none of these benchmarks as they are declared now"
            )
        past = {} if options.history is None else store.history(options.history, device.name)
        subject = open_subject(
            DEFAULT_TARGETS[device.kind] if options.target is None else options.target, device, options.agreed
        )
        rivals = [open_subject(name, device, options.agreed) for name in options.against if not _is_file(name)]
        report = _measure(subject, rivals, stored, wanted, allowed, show)
        if "json" in written:
            written["json"].write(store.as_json(report))
        if "html" in written:
            from conformance.bench.page import bench_page

            written["html"].write(bench_page(report, past))
    return report.exit_code


def _is_file(name: str) -> bool:
    return name.endswith(".json")


def _baselines(against: Sequence[str], device: Device) -> dict[str, Mapping[str, Stored]]:
    """Stored numbers of this device by file and declaration."""
    paths = [name for name in against if _is_file(name)]
    return {name: store.of_device(Path(name), store.read(Path(name)), device.name) for name in paths}


def _measure(
    subject: Subject,
    rivals: Sequence[Subject],
    stored: Mapping[str, Mapping[str, Stored]],
    wanted: Sequence[Declaration],
    allowed: float | None,
    show: Show,
) -> Report:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    timer = timers.timer_for(subject.device)
    measured = Measured(subject.target, subject.description.name, subject.description.version)
    show.begin(measured, subject.device)
    meter = RoofMeter(subject.device, timer)
    meter.measure()
    entries = []
    for declaration in wanted:
        entry = _with_stored(_kernel(declaration, subject, rivals, timer), stored, allowed)
        entries.append(entry)
        show.entry(entry)
    meter.measure()
    report = Report(measured, subject.device, meter.roofs, entries, started, environment())
    show.end(report)
    return report


def _kernel(declaration: Declaration, subject: Subject, rivals: Sequence[Subject], timer: Timer) -> Entry:
    """One kernel: what passes the gate is timed, by turns, and judged again."""
    problem = declaration.problem()
    inputs: dict[bool, Inputs] = {}

    def run_of(who: Subject) -> Run:
        if who.numpy not in inputs:
            inputs[who.numpy] = Inputs(problem, who)
        run = Run(who, problem, inputs[who.numpy])
        run.check()
        return run

    others: dict[str, Other] = {}
    runs: dict[str, Run] = {}
    try:
        own = run_of(subject)
    except (Refused, Unsupported, TooLarge) as reason:
        return _without_time(declaration, problem, reason)
    for rival in rivals:
        try:
            runs[rival.target] = run_of(rival)
        except (Refused, Unsupported, TooLarge) as reason:
            others[rival.target] = Other(rival.target, None, _why(reason))
    try:
        measure.take_samples([own, *runs.values()], timer)
        own.judge()
    except Refused as reason:
        return _without_time(declaration, problem, reason)
    for target, run in runs.items():
        others[target] = _judged(target, run)
    return Entry(
        declaration,
        "measured",
        counts=problem.counts,
        times=Times(own.samples),
        how=own.how,
        sets=own.sets,
        calls=own.calls,
        cold=own.inputs.cold(own.sets),
        others=[others[rival.target] for rival in rivals],
    )


def _judged(target: str, run: Run) -> Other:
    """A rival's times, if it was right to the end."""
    try:
        run.judge()
    except Refused as reason:
        return Other(target, None, _why(reason))
    return Other(target, Times(run.samples), how=run.how)


def _why(reason: Exception) -> str:
    kinds: Sequence[tuple[type[Exception], str]] = (
        (Refused, "refused"),
        (Unsupported, "unsupported"),
        (TooLarge, "skipped"),
    )
    return f"{next(word for kind, word in kinds if isinstance(reason, kind))}: {reason}"


def _without_time(declaration: Declaration, problem: Problem, reason: Exception) -> Entry:
    if isinstance(reason, Refused):
        return Entry(declaration, "refused", str(reason), problem.counts)
    status: Status = "unsupported" if isinstance(reason, Unsupported) else "skipped"
    return Entry(declaration, status, str(reason) or "not implemented", problem.counts)


def _with_stored(entry: Entry, stored: Mapping[str, Mapping[str, Stored]], allowed: float | None) -> Entry:
    """The entry beside its stored numbers, flagged where it is slower than allowed."""
    for label, by_declaration in stored.items():
        then = by_declaration.get(entry.declaration.hash)
        if then is None:
            other = Other(label, None, "not stored, or declared otherwise then")
            entry = replace(entry, others=[*entry.others, other])
            continue
        entry = replace(entry, others=[*entry.others, Other(label, then.times)])
        if allowed is not None and entry.times is not None:
            found = compare.change(entry.times, then.times, allowed)
            entry = replace(entry, slower=found.slower, remark=found.remark)
    return entry
