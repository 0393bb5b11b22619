"""The page of a run: the roofline, a table, and what the same benchmarks took before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance import __version__
from conformance.bench import charts
from conformance.bench.report import ratio, verdict
from conformance.bench.results import Report
from conformance.bench.store import Stored
from conformance.bench.units import scaled, seconds
from conformance.report.html.page import render


def bench_page(report: Report, past: Mapping[str, Sequence[Stored]]) -> str:
    """The page, as text."""
    return render(
        "bench.html.j2",
        report=report,
        suite=__version__,
        verdict=verdict(report),
        tone="good" if report.exit_code == 0 else "bad",
        roofline=charts.roofline(report),
        histories=charts.histories(report, past),
        seconds_of=seconds,
        scaled=scaled,
        ratio=ratio,
    )
