"""Record the declared sizes from the reference into a private folder, judge the target on them, trace it freely.

Stateless components and attentions are judged by the bounds of the suite's own cases.  Blocks and models are not
bounded by their inputs, and the noise of such a set is not known in advance: there the target runs freely, and the
trace tells layer by layer how far it is, and whether each component is right on the inputs that it was given.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from conformance.adapters.folder import PREFIX as FOLDER
from conformance.adapters.target import open_target
from conformance.against.sizes import Size, Sizes, declared_sizes
from conformance.check import INTERRUPTED, CheckOptions, check
from conformance.errors import COULD_NOT_RUN, ConformanceError, TargetError
from conformance.fixtures import Fixtures
from conformance.report.terminal import make_console
from conformance.tracing.finding import Finding
from conformance.tracing.table import print_trace
from conformance.tracing.trace import NothingToTrace, TraceOptions, trace

SET = "against"
"""The name of the golden set that is made."""


def check_against(options: CheckOptions) -> int:
    """Judge a target on inputs made for this run; exit codes as `check`.

    Raises:
        ConformanceError: the target cannot be used, or an option does not go with inputs that are made for the run.
    """
    _refuse(options)
    sizes = declared_sizes()
    try:
        with closing(open_target(options.target, options.timeout, options.agreed)) as session:
            device = str(session.describe().device)
        with golden_sets(sizes, sizes.of_device(device)) as directory:
            selection = replace(options.selection, set_name=SET)
            code = check(replace(options, fixtures=directory, selection=selection))
            narrowed = options.selection.components or options.selection.expression is not None
            if code in (COULD_NOT_RUN, INTERRUPTED) or narrowed or (code and options.fail_fast):
                return code
            return max(code, trace_layers(options, directory))
    except KeyboardInterrupt:
        print("conformance: interrupted", file=sys.stderr)
        return INTERRUPTED


def _refuse(options: CheckOptions) -> None:
    if options.target.startswith(FOLDER):
        raise TargetError(f"target {options.target!r}: --against asks anew, and a folder has answered already")
    given = {
        "--fixtures": options.fixtures is not None,
        "--checkpoint": options.checkpoint is not None,
        "--set": options.selection.set_name is not None,
        "--world-size": options.world_size != 1,
    }
    for name, there in given.items():
        if there:
            raise ConformanceError(f"{name}: not with --against, which makes its own inputs for one process")


@contextmanager
def golden_sets(sizes: Sizes, size: Size) -> Iterator[Path]:
    """A folder with one golden set, recorded from the reference; it is gone afterwards."""
    # Imported late, with all of the reference.
    from conformance.faults.synthetic import Run, make_golden_sets

    shipped = Fixtures.open(None)
    tiny = next(name for name in shipped.sets if shipped.kind(name) == "model")
    mapping = {**shipped.model(tiny).config, **sizes.config}
    runs = [Run(run.name, run.prefill, run.steps, run.batch) for run in size.runs]
    with tempfile.TemporaryDirectory(prefix="conformance-against-") as folder:
        yield make_golden_sets(Path(folder) / "sets", SET, mapping, runs, seed=sizes.seed)


def trace_layers(options: CheckOptions, directory: Path) -> int:
    """Print how far the target's layers are from the reference's when they run freely; 1 where noise cannot do that."""
    console = make_console()
    console.print()
    asked = TraceOptions(
        options.target,
        set_name=SET,
        fixtures=directory,
        reading=options.reading,
        timeout=options.timeout,
        agreed=options.agreed,
    )
    try:
        traced = trace(asked, lambda what: None)
    except NothingToTrace as error:
        console.print(f"not traced: {error}", soft_wrap=True)
        return 0
    print_trace(console, traced, options.verbose)
    console.print()
    console.print("free-running distance of h_out by layer, the worst position of all calls", style="bold")
    for finding in traced.findings:
        worst = [max(cells, default=None) for cells in _distances(finding)]
        shown = " ".join("-" if distance is None else f"{distance:.2g}" for distance in worst)
        console.print(f"  {finding.run.trace.name:<24} {shown}", soft_wrap=True)
    return traced.exit_code


def _distances(finding: Finding) -> list[list[float]]:
    """Relative distances of the residual behind each layer, call by call."""
    return [
        [cell.distance for cell in finding.cells if (cell.tap, cell.layer) == ("h_out", layer)]
        for layer in range(finding.layer_count)
    ]
