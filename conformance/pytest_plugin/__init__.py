"""The pytest plugin: `pytest --conformance TARGET` runs one item a case, without any test file.

It is loaded into every pytest run of an environment that has this package, so this module imports nothing but pytest:
everything else waits until a run asks for it.
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import suppress

import pytest

OPTIONS = ("level", "component", "set", "fixtures", "reading", "shard", "report", "expect", "explain")
MARKER = "conformance(component, level, mode, device): a case of the conformance suite"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `conformance check` that a pytest run needs."""
    group = parser.getgroup("conformance", "conformance of DeepSeek-V4.1-Flash implementations")

    def add(name: str, text: str, **more: object) -> None:
        group.addoption(f"--conformance-{name}", dest=f"conformance_{name}", default=None, help=text, **more)

    group.addoption(
        "--conformance",
        dest="conformance_target",
        default=None,
        metavar="TARGET",
        help="Judge this implementation (package.module:Class, ...): one item a case, conformance::ID.",
    )
    add("level", "How much to run (default: core; full with --conformance-set).", choices=("smoke", "core", "full"))
    add("component", "Only this component; may be repeated.", action="append", metavar="NAME")
    add("set", "Only cases whose inputs come from this golden set.", metavar="NAME")
    add("fixtures", "Golden sets to use instead of the shipped ones.", metavar="DIR")
    add("reading", "Reading of the shared index-key slot.", choices=("intended", "literal"))
    add("shard", "Run part I of N, balanced by time.", metavar="I/N")
    add("report", "Also write the report as JSON lines.", metavar="FILE")
    add("expect", "Known failures of the target, each with its issue.", metavar="FILE")
    group.addoption(
        "--conformance-bench",
        dest="conformance_bench_target",
        default=None,
        metavar="TARGET",
        help="What conformance.bench.test_kernels measures (default: optimized on a GPU, else reference).",
    )
    group.addoption(
        "--conformance-bench-shapes",
        dest="conformance_bench_shapes",
        default=None,
        metavar="SHAPES",
        help="Shapes as for `conformance bench --shapes`.",
    )
    text = "How long each process may look for known mistakes in failures (default: 20; 0: not at all)."
    add("explain", text, metavar="SECONDS", type=_seconds)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 0 or more")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and, where a target is given, everything else.

    Raises:
        pytest.UsageError: options without a target, or a report that cannot be written.
    """
    config.addinivalue_line("markers", MARKER)
    if config.option.conformance_target is None:
        given = next((name for name in OPTIONS if getattr(config.option, f"conformance_{name}") is not None), None)
        if given is not None:
            raise pytest.UsageError(f"--conformance-{given} needs --conformance TARGET")
        return
    # As the command line does, before torch is imported: a pool of threads costs small tensors more than it saves.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from conformance.pytest_plugin import cases, report

    config.pluginmanager.register(cases.Cases(config), "conformance-cases")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(report.Report(config), "conformance-report")
