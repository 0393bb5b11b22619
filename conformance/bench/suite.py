"""The suite's own speed: start-up, fixtures, `check reference` by level and component, and how all of it grows.

Everything is measured in processes of their own, so that the peak of memory is theirs and nothing is warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import conformance
from conformance.cases.case import Level
from conformance.errors import ConformanceError
from conformance.report.environment import environment
from conformance.report.output import OutputFile
from conformance.report.reader import read_report
from conformance.tensors import one_line

FORMAT = 1
LEVELS: tuple[Level, ...] = ("smoke", "core")
LENGTHS = (64, 256)
LONGEST = 1 << 17
SHARDS = (8, 4, 2, 1)
"""The smoke level is run in parts of 1/8, 1/4, 1/2 and as a whole, to see what a further case costs."""
UNITS: Mapping[str, str] = {
    "attention": "one attention layer, released widths",
    "model": "the tiny model",
}
CALLS: Mapping[str, str] = {"prefill": "prefill of", "decode": "one step, after a prefill, of"}
STARTS: Sequence[tuple[tuple[str, ...], int]] = (
    (("--help",), 0),
    (("no-such-command",), 2),
    (("check", "no-such-target"), 2),
    (("list", "--level", "smoke"), 0),
    (("show", "no-such-case"), 2),
)
"""What should answer at once, and its exit code."""


@dataclass(frozen=True)
class Measurement:
    """One line of the table.  Times in seconds; of several processes, the peak is that of the largest."""

    part: str
    what: str
    seconds: float
    processor: float | None = None
    """Seconds of processors, of the system's work too; None where several things share a process."""
    peak_bytes: int | None = None
    size: int | None = None
    """Tokens or cases, where something grows with them."""


@dataclass(frozen=True)
class SuiteOptions:
    """What `conformance bench suite` was asked to do."""

    parts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = LENGTHS
    json: Path | None = None


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of `--lengths`, such as "64,1024".

    Raises:
        ConformanceError: not whole numbers between 1 and `LONGEST`.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and len(word) < 9 and 1 <= int(word) <= LONGEST for word in words):
        raise ConformanceError(f"--lengths {one_line(text)}: expected lengths of 1 to {LONGEST}, such as 64,1024")
    return tuple(int(word) for word in words)


@dataclass(frozen=True)
class _Ran:
    output: str
    seconds: float
    processor: float
    peak_bytes: int


def _run(arguments: Sequence[str], expected: int = 0) -> _Ran:
    """Run a module of the suite in a process.

    Raises:
        ConformanceError: it did not end with the expected exit code.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=output, stderr=errors)
        # What a process used is known to whoever waits for it, and only once.
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - start
        process.returncode = code = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if code != expected:
            last = (errors.read().strip().splitlines() or ["nothing on standard error"])[-1]
            raise ConformanceError(f"{' '.join(arguments)}: exit code {code}, expected {expected}: {one_line(last)}")
        peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
        return _Ran(output.read(), seconds, usage.ru_utime + usage.ru_stime, peak)


def _start(options: SuiteOptions) -> Iterator[Measurement]:
    for arguments, code in STARTS:
        ran = _run(("conformance", *arguments), code)
        yield Measurement("start", " ".join(arguments), ran.seconds, ran.processor, ran.peak_bytes)


def _fixtures(options: SuiteOptions) -> Iterator[Measurement]:
    ran = _run(("conformance.bench.suite_probe", "fixtures"))
    for what, times in json.loads(ran.output).items():
        yield Measurement("fixtures", what, times["seconds"], times["processor"], ran.peak_bytes)


def _check(options: SuiteOptions) -> Iterator[Measurement]:
    for level in LEVELS:
        with tempfile.TemporaryDirectory(prefix="conformance-bench-") as folder:
            report = Path(folder) / "report.jsonl"
            ran = _run(("conformance", "check", "reference", "--level", level, "--json", str(report)))
            records = read_report(report).records
        yield Measurement("check", level, ran.seconds, ran.processor, ran.peak_bytes, len(records))
        seconds: dict[str, list[float]] = defaultdict(list)
        for record in records:
            seconds[record.component].append(record.seconds)
        for component, of_cases in seconds.items():
            yield Measurement("check", f"{level}, {component}", sum(of_cases), size=len(of_cases))


def _cases(options: SuiteOptions) -> Iterator[Measurement]:
    for parts in SHARDS:
        with tempfile.TemporaryDirectory(prefix="conformance-bench-") as folder:
            report = Path(folder) / "report.jsonl"
            selection = ("--level", "smoke", "--shard", f"1/{parts}")
            ran = _run(("conformance", "check", "reference", *selection, "--json", str(report)))
            count = len(read_report(report).records)
        yield Measurement("cases", f"smoke, shard 1/{parts}", ran.seconds, ran.processor, ran.peak_bytes, count)


def _length(options: SuiteOptions) -> Iterator[Measurement]:
    for unit, words in UNITS.items():
        for length in options.lengths:
            ran = _run(("conformance.bench.suite_probe", unit, str(length)))
            times = json.loads(ran.output)
            for call, what in CALLS.items():
                yield Measurement(
                    "length",
                    f"{what} {words}",
                    times[call]["seconds"],
                    times[call]["processor"],
                    ran.peak_bytes,
                    length,
                )


PARTS: Mapping[str, Callable[[SuiteOptions], Iterator[Measurement]]] = {
    "start": _start,
    "fixtures": _fixtures,
    "check": _check,
    "cases": _cases,
    "length": _length,
}


def bench(options: SuiteOptions, console: Console) -> int:
    """Measure, print a table, and return exit code 0.

    Raises:
        ConformanceError: no such part, a file that cannot be written, or a run that did not end as it should.
    """
    for part in options.parts:
        if part not in PARTS:
            raise ConformanceError(f"bench suite {one_line(part)}: no such part; there are {', '.join(PARTS)}")
    if options.json is None:
        print_table(console, _measured(options, console))
        return 0
    with OutputFile("--json", options.json) as file:
        measurements = _measured(options, console)
        print_table(console, measurements)
        file.write(as_json(measurements))
    return 0


def _measured(options: SuiteOptions, console: Console) -> list[Measurement]:
    found = []
    for part in options.parts or PARTS:
        with console.status(f"measuring {part}"):
            found += list(PARTS[part](options))
    return found


def as_json(measurements: Sequence[Measurement]) -> str:
    """All measurements, and what they were made on."""
    content = {
        "format": FORMAT,
        "suite": conformance.__version__,
        "environment": {**environment(), "processors": os.cpu_count()},
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def print_table(console: Console, measurements: Sequence[Measurement]) -> None:
    """One line a measurement; what shares a process has neither processor time nor memory of its own."""
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("what")
    for name in ("size", "time", "processor", "peak memory"):
        table.add_column(name, justify="right")
    for one in measurements:
        table.add_row(
            one.part,
            one.what,
            "" if one.size is None else f"{one.size:,}",
            f"{one.seconds:.2f} s",
            "" if one.processor is None else f"{one.processor:.2f} s",
            "" if one.peak_bytes is None else f"{one.peak_bytes >> 20:,} MiB",
        )
    console.print(table)
