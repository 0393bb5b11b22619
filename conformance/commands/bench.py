"""`conformance bench`: how fast kernels are."""

from __future__ import annotations

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

    if kernels and kernels[0] == SUITE:
        from conformance.bench import suite

        parts = tuple(kernels[1:])
        options_of_suite = suite.SuiteOptions(parts, suite.parse_lengths(lengths) if lengths else suite.LENGTHS, json)
        return suite.bench(options_of_suite, make_console())
    if lengths is not None:
        raise ConformanceError(f"--lengths is for `bench {SUITE}`")
    if history is not None and html is None:
        raise ConformanceError("--history is drawn in the page of --html")
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
        report.print_counts(console, run.declared(options, device or "cpu"))
        return 0
    return run.bench(options, report.Terminal(console))
