"""`conformance bench`: how fast kernels are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

SUITE = "suite"
"""In place of a kernel: the suite's own speed."""


def bench(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KERNEL...",
            help="Kernels or ids, also as patterns: 'linear_*'; default: all. `suite`: the suite's own speed.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET", help="As for check, in this process (default: optimized on a GPU, else reference)."
        ),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where inputs lie (default: a GPU where there is one).")
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPES",
            help="released, decode, prefill, small, or a TOML file (default: released on a GPU, small on a CPU).",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OTHER",
            help="Compare with: a target, torch.compile, sdpa, upstream:DIR, or a file of --json; may be repeated.",
        ),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Exit code 1 if slower than the stored --against by more, as 10%."),
    ] = None,
    counts: Annotated[bool, typer.Option("--counts", help="Only show bytes and operations; nothing is run.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also store the times, in pytest-benchmark's form.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write one HTML file with a roofline.")] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --html: a folder of stored times to draw beside these.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="For upstream:DIR, execute the checkout's code.")] = False,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,...", help="For `bench suite`: numbers of tokens, such as 64,1024.")
    ] = None,
) -> int:
    """Time kernels that pass the gate: exit code 0; 1 if one is wrong or slower than allowed, 2 if it cannot be run."""
    from conformance.bench import report, run
    from conformance.errors import ConformanceError
    from conformance.report.terminal import make_console
    from conformance.tensors import one_line

    if kernels and kernels[0] == SUITE:
        from conformance.bench import suite

        of_kernels = {
            "--target": target,
            "--device": device,
            "--shapes": shapes,
            "--against": against,
            "--fail-if-slower": fail_if_slower,
            "--counts": counts,
            "--html": html,
            "--history": history,
            "--yes": yes,
        }
        for name, given in of_kernels.items():
            if given:
                raise ConformanceError(f"{name} is for kernels, not for `bench {SUITE}`")
        parts = tuple(kernels[1:])
        options_of_suite = suite.SuiteOptions(parts, suite.parse_lengths(lengths) if lengths else suite.LENGTHS, json)
        return _told_if_interrupted(lambda: suite.bench(options_of_suite, make_console()))
    if lengths is not None:
        raise ConformanceError(f"--lengths is for `bench {SUITE}`")
    if history is not None and html is None:
        raise ConformanceError("--history is drawn in the page of --html")
    if json is not None and html is not None and json.resolve() == html.resolve():
        raise ConformanceError(f"--json and --html name the same file: {one_line(str(json))}")
    options = run.BenchOptions(
        tuple(kernels or ()),
        target,
        device,
        shapes,
        tuple(against or ()),
        fail_if_slower,
        yes,
        json,
        html,
        history,
    )
    console = make_console()
    if counts:
        if json is not None or html is not None:
            raise ConformanceError("--counts measures nothing that --json or --html could hold")
        report.print_counts(console, run.declared(options, device or "cpu"))
        return 0
    return _told_if_interrupted(lambda: run.bench(options, report.Terminal(console)))


def _told_if_interrupted(work: Callable[[], int]) -> int:
    from conformance.check import INTERRUPTED

    try:
        return work()
    except KeyboardInterrupt:
        print("conformance: interrupted; files of earlier runs are as they were", file=sys.stderr)
        return INTERRUPTED
