"""The `conformance` command.

Exit codes: 0 conforms, 1 does not, 2 could not run (one line on standard error says why), 130 interrupted.
Everything heavy is imported inside the commands, so that `--help` and a mistyped argument answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from conformance.commands import (
    badge,
    bench,
    bundle,
    compare,
    coverage,
    durations,
    expect,
    export,
    matrix,
    merge,
    report,
    trace,
)
from conformance.errors import COULD_NOT_RUN, ConformanceError, FixtureError
from conformance.signatures import DEFAULT_SECONDS

Level = Literal["smoke", "core", "full"]
Reading = Literal["intended", "literal"]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="reference, package.module:Class, a registered name, cmd:PROGRAM or dir:FOLDER."
    ),
]
Expression = Annotated[
    str | None,
    typer.Option("-k", metavar="EXPR", help="Only ids that match, as in pytest: 'rotary and not yarn', or a whole id."),
]
Components = Annotated[
    list[str] | None, typer.Option("--component", metavar="NAME", help="Only this component; may be repeated.")
]
FixturesDirectory = Annotated[
    Path | None, typer.Option("--fixtures", metavar="DIR", help="Golden sets to use instead of the shipped ones.")
]

CheckpointDirectory = Annotated[
    Path | None,
    typer.Option("--checkpoint", metavar="DIR", help="The weights of a set that was recorded from a checkpoint."),
]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Numerical conformance suite for implementations of DeepSeek-V4.1-Flash.",
)


@app.command()
def check(
    target: Target,
    level: Annotated[
        Level | None,
        typer.Option(help="How much to run; each includes the ones before (default: core; full with --set)."),
    ] = None,
    expression: Expression = None,
    components: Components = None,
    set_name: Annotated[
        str | None, typer.Option("--set", metavar="NAME", help="Only cases whose inputs come from this golden set.")
    ] = None,
    fixtures: FixturesDirectory = None,
    checkpoint: CheckpointDirectory = None,
    against: Annotated[
        Literal["reference"] | None,
        typer.Option(help="Instead of fixtures: requests longer and wider than theirs, recorded from it for this run."),
    ] = None,
    reading: Annotated[
        Reading | None,
        typer.Option(help="Reading of the shared index-key slot (default: the one that the target declares)."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report as JSON lines.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report as JUnit XML.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report as one HTML file to look at.")
    ] = None,
    expect: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known failures of the target, each with its issue.")
    ] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Run part I of N, balanced by time.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="For cmd: targets: wait so long for an answer, five times as long in a case [default: 120].",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="For upstream:DIR, execute the checkout's code, whose hashes are shown.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Put cases to the target in this many processes at a time.")] = 1,
    world_size: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=64, help="Run a tensor-parallel target as N ranks, each a process; judge them all."
        ),
    ] = 1,
    explain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long to compare failures with known mistakes and deviations; 0 for not at all.",
        ),
    ] = DEFAULT_SECONDS,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", "-x", help="Stop at the first failure.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every case, every tap of failures.")] = (
        False
    ),
) -> int:
    """Judge an implementation: exit code 0 if it conforms, 1 if not, 2 if the run was not possible."""
    from conformance import check as run
    from conformance.selection import Selection

    # Whoever names a set means all of it; a folder asks what it was exported for.
    everything = set_name is not None or target.startswith("dir:")
    chosen_level: Level = level or ("full" if everything else "core")
    selection = Selection(chosen_level, expression, tuple(components or ()), set_name)
    judge = run.check
    if against is not None:
        from conformance.against.command import check_against as judge
    return judge(
        run.CheckOptions(
            target,
            selection,
            fixtures=fixtures,
            checkpoint=checkpoint,
            against=against,
            reading=reading,
            shard=shard,
            timeout=timeout,
            agreed=yes,
            jobs=jobs,
            world_size=world_size,
            expect=expect,
            json=json,
            junit=junit,
            html=html,
            explain=explain,
            fail_fast=fail_fast,
            verbose=verbose,
        )
    )


@app.command()
def smoke(target: Target, fixtures: FixturesDirectory = None) -> int:
    """Run the smoke level with a short report."""
    from conformance import check as run
    from conformance.selection import Selection

    return run.check(
        run.CheckOptions(target, Selection("smoke"), fixtures=fixtures, explain=DEFAULT_SECONDS, compact=True)
    )


@app.command("list")
def list_cases(
    components: Components = None,
    level: Annotated[Level, typer.Option(help="Up to this level.")] = "full",
    expression: Expression = None,
    fixtures: FixturesDirectory = None,
    checkpoint: CheckpointDirectory = None,
) -> int:
    """List the cases: id, level, mode, and the mistake each one catches."""
    from conformance.cases import catalogue
    from conformance.fixtures import Fixtures
    from conformance.report.listing import print_list
    from conformance.report.terminal import make_console
    from conformance.selection import Selection, select

    opened = Fixtures.open(fixtures, checkpoint=checkpoint)
    cases = select(catalogue.catalogue(opened), Selection(level, expression, tuple(components or ())))
    print_list(make_console(), cases)
    return 0


@app.command()
def show(
    case_id: Annotated[str, typer.Argument(metavar="CASE", help="The id of a case.")],
    fixtures: FixturesDirectory = None,
    checkpoint: CheckpointDirectory = None,
) -> int:
    """Show everything about one case, without running an implementation."""
    from conformance.cases import catalogue
    from conformance.check import CheckOptions, rerun_command
    from conformance.fixtures import Fixtures
    from conformance.report.listing import print_details
    from conformance.report.terminal import make_console
    from conformance.selection import Selection, find_case

    case = find_case(catalogue.catalogue(Fixtures.open(fixtures, checkpoint=checkpoint)), case_id)
    options = CheckOptions("TARGET", Selection(case.level), fixtures=fixtures, checkpoint=checkpoint)
    rerun = rerun_command(options, case)
    print_details(make_console(), case, rerun)
    return 0


@app.command()
def lock(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of golden sets with a manifest.json.")],
) -> int:
    """Write lock.json: the size and hash of every file of a directory of golden sets."""
    from conformance.fixtures import write_lock
    from conformance.tensors import one_line

    if not directory.is_dir():
        raise FixtureError(f"{one_line(str(directory))}: not a directory")
    print(f"wrote {write_lock(directory)}")
    return 0


@app.command()
def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of safetensors shards and their index.")],
    partial: Annotated[bool, typer.Option("--partial", help="Shards may be absent: check those that are there.")] = (
        False
    ),
) -> int:
    """Check names, shapes, types and counts of a checkpoint; reads headers only, never weights."""
    from conformance.checkpoint import check_checkpoint
    from conformance.report.checkpoint import print_checkpoint
    from conformance.report.terminal import make_console

    result = check_checkpoint(directory, partial)
    print_checkpoint(make_console(), result)
    return result.exit_code


@app.command()
def record(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the sets go; must not exist.")],
    upstream: Annotated[
        Path | None, typer.Option("--upstream", metavar="DIR", help="The inference/ folder of a checkout of the model.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="DIR", help="Instead: a checkpoint, whose layers the reference runs."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N-M", help="With --checkpoint: which layers, such as 24-27.")
    ] = None,
    kernels: Annotated[
        Literal["upstream", "reference"],
        typer.Option(help="The checkout's kernels on a GPU, or this suite's own on a CPU."),
    ] = "reference",
    scenarios: Annotated[
        Path | None, typer.Option("--scenarios", metavar="FILE", help="Declarations instead of the shipped ones.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="TEXT", help="The checkout's revision, for the provenance.")
    ] = None,
    agreed: Annotated[bool, typer.Option("--yes", help="Execute the checkout's code; without, only show it.")] = False,
) -> int:
    """Record golden sets: the published code on seeded weights, shown before it runs, or the reference on real ones."""
    from conformance.recording.record import RecordOptions, print_progress, record as run

    if (upstream is None) == (checkpoint is None) or (checkpoint is None) != (layers is None):
        raise ConformanceError("record takes --upstream DIR, or --checkpoint DIR with --layers N-M")
    if checkpoint is not None and layers is not None:
        from conformance.recording.checkpoint_layers import parse_layers, record_layers

        return record_layers(checkpoint, parse_layers(layers), out, print_progress)
    assert upstream is not None
    return run(RecordOptions(upstream, out, kernels, agreed, scenarios, revision), print_progress)


@app.command()
def tokenizer(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A tokenizer.json, or a directory or installed package with one.")
    ],
    fixtures: FixturesDirectory = None,
) -> int:
    """Check that a tokenizer is the one whose ids Engram's tables were trained with: exit code 0 if so, 1 if not."""
    from conformance.fixtures import Fixtures
    from conformance.tokenizer import find_tokenizer, mistaken, read_tokens

    path = find_tokenizer(source)
    recorded = Fixtures.open(fixtures).recipe("released").parts["engram"]["token_map"].data
    problem = mistaken(read_tokens(path), recorded)
    print(f"{path}: {problem or f'{recorded.size:,} tokens, {int(recorded.max()) + 1:,} compressed ids, as recorded'}")
    return 1 if problem else 0


@app.command("noise-floor")
def noise_floor(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of golden sets with a manifest.json.")],
    missing: Annotated[bool, typer.Option("--missing", help="Keep what is stored; measure only other cases.")] = False,
    checkpoint: CheckpointDirectory = None,
) -> int:
    """Write noise_floor.json: how far honest variants of the reference land from each recorded trace."""
    from conformance.cases.noise_floors import store
    from conformance.fixtures import Fixtures

    opened = Fixtures.open(directory, checkpoint=checkpoint)
    path = store(opened, lambda case_id: print(case_id, file=sys.stderr), missing)
    print(f"wrote {path}")
    return 0


@app.command()
def faults(
    components: Components = None,
    fault: Annotated[str | None, typer.Option("--fault", metavar="NAME", help="Only this fault.")] = None,
    expression: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Only faults, variants or mutants whose ids match, as in pytest."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One fault for every flag, and only smoke cases' power.")] = (
        False
    ),
    honest: Annotated[bool, typer.Option("--honest", help="Run the honest variants instead: all must pass.")] = False,
    headroom: Annotated[
        bool, typer.Option("--headroom", help="Run the honest variants and show how near they come to each bound.")
    ] = False,
    seeds: Annotated[
        int, typer.Option("--seeds", min=0, help="With --honest: also this many small synthetic golden sets.")
    ] = 0,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Instead: small changes of the reference; show what no case notices.")
    ] = False,
    share: Annotated[
        float | None, typer.Option("--share", metavar="SHARE", help="With --mutants: only this share, such as 0.1.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --share: which ones; drawn and shown unless given.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="SECONDS", help="With --mutants: time for each [default: 5].")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 2,
    fixtures: FixturesDirectory = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write what was found as JSON.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every fault or mutant.")] = False,
) -> int:
    """Check the suite itself: every injected fault must be rejected, every honest variant accepted."""
    from conformance.faults import command, honest_command, mutants_command

    form = "--mutants" if mutants else "--honest" if honest or headroom else ""
    given = {
        "--fault": fault is not None,
        "--quick": quick,
        "--verbose": verbose,
        "--honest": honest,
        "--headroom": headroom,
        "--seeds": seeds > 0,
        "--share": share is not None,
        "--seed": seed is not None,
        "--limit": limit is not None,
    }
    command.refuse_foreign(form, given)
    if mutants:
        return mutants_command.mutants(
            mutants_command.MutantOptions(
                tuple(components or ()), expression, share, seed, limit, fixtures, json, jobs, verbose
            )
        )
    if honest or headroom:
        return honest_command.honest(
            honest_command.HonestOptions(
                tuple(components or ()), fault, expression, headroom, seeds, fixtures, json, jobs
            )
        )
    return command.faults(
        command.FaultOptions(tuple(components or ()), fault, expression, quick, fixtures, json, jobs, verbose)
    )


app.command()(coverage.coverage)
app.command()(durations.durations)
app.command()(export.export)
app.command()(merge.merge)
app.command()(report.report)
app.command()(compare.compare)
app.command()(matrix.matrix)
app.command()(trace.trace)
app.command()(badge.badge)
app.command()(bench.bench)
app.command()(bundle.bundle)
app.command("verify-bundle")(bundle.verify_bundle)
app.add_typer(expect.app, name="expect")


def main() -> None:
    """Run the command line; every error becomes one line on standard error and exit code 2."""
    # The suite works on small tensors, where a pool of threads costs more than it saves; results then do not depend on
    # the number of cores either.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Who is asked to end still closes what was opened: processes, temporary folders, the report.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without, say, "−" must not end a run.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="conformance", standalone_mode=False)
        sys.stdout.flush()
    except ConformanceError as error:
        code = _fail(str(error))
    except OSError as error:
        code = _fail(f"{error.filename or 'standard output'}: {error.strerror}")
    except Exception as error:
        code = _fail(_in_one_line(error))
    sys.exit(code)


def _in_one_line(error: Exception) -> str:
    # Some versions of typer bring their own click, so that usage errors have no base class to import; all of them
    # can format themselves.
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return " ".join(format_message().split())
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    return f"internal error, please report: {type(error).__name__}: {' '.join(str(error).split())}{place}"


def _fail(message: str) -> int:
    print(f"conformance: {message}", file=sys.stderr)
    return COULD_NOT_RUN
