"""`python -m conformance.ports.run`: install every port in an environment of its own, judge it, print a matrix.

The environments see this one's torch and suite through a .pth file; nothing of a port is installed here.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import conformance
from conformance.errors import COULD_NOT_RUN
from conformance.interface import COMPONENTS
from conformance.ports import PORTS, Port
from conformance.report.reader import StoredReport, read_report
from conformance.report.terminal import make_console

EXPECTATIONS = Path(__file__).parent / "expectations"
ENVIRONMENTS = Path(".venv-ports")
INSTALL_SECONDS, CHECK_SECONDS = 1800, 3600
SHOWN: Mapping[str, str] = {"PASS": "", "FAIL": "fail", "CRASH": "crash", "XFAIL": "xfail", "UNSUPPORTED": "unsup"}
"""How the matrix calls a status; any other by its own name."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Ports; all of them when none is named.")] = None,
    level: Annotated[str, typer.Option(help="Up to this level.")] = "core",
    environments: Annotated[Path, typer.Option(help="Where the environments and reports are kept.")] = ENVIRONMENTS,
) -> None:
    """Install, judge, compare.  Exit code 0 when every port does as its expectations say, else the worst one's."""
    unknown = [name for name in names or () if name not in PORTS]
    if unknown:
        print(f"conformance: no port {unknown[0]!r}; there are {', '.join(PORTS)}", file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN)
    codes, reports = {}, {}
    for name in names or PORTS:
        report = environments / f"{name}.jsonl"
        try:
            python = _environment(environments / name, PORTS[name])
            codes[name] = _check(python, name, level, report)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"conformance: port {name}: {error}", file=sys.stderr)
            codes[name] = COULD_NOT_RUN
        if codes[name] != COULD_NOT_RUN:
            reports[name] = read_report(report)
    make_console().print(matrix(reports))
    raise typer.Exit(max(codes.values()))


def _environment(directory: Path, port: Port) -> Path:
    """The interpreter of an environment that has the port, made where it does not exist."""
    python = directory / "bin" / "python"
    ready = directory / ".ready"
    if ready.is_file():
        return python
    venv.create(directory, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "--quiet", *port.arguments]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    site = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = [str(Path(conformance.__file__).parents[1]), sysconfig.get_path("purelib"), *_torch()]
    (directory / "lib" / site / "site-packages" / "suite.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    ready.touch()
    return python


def _torch() -> list[str]:
    """The folder that holds torch: the suite's environment may itself borrow it."""
    import torch

    return [str(Path(torch.__file__).parents[1])]


def _check(python: Path, name: str, level: str, report: Path) -> int:
    expectations = EXPECTATIONS / f"{name}.toml"
    command = [str(python), "-m", "conformance", "check", name, "--level", level, "--json", str(report)]
    command += ["--expect", str(expectations)] if expectations.is_file() else []
    return subprocess.run(command, timeout=CHECK_SECONDS).returncode


def matrix(reports: Mapping[str, StoredReport]) -> Table:
    """Implementation by component: how many cases passed, and what became of the others."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("component")
    for name, report in reports.items():
        table.add_column(f"{name} {report.header.implementation['version']}")
    for component in COMPONENTS:
        cells = [_cell([r.status for r in report.records if r.component == component]) for report in reports.values()]
        table.add_row(component, *cells)
    return table


def _cell(statuses: Sequence[str]) -> str:
    counts = Counter(statuses)
    if set(counts) <= {"UNSUPPORTED"}:
        return "-"
    others = [f"{counts[s]} {SHOWN.get(s, s.lower())}" for s in sorted(counts) if s != "PASS"]
    return ", ".join([f"{counts['PASS']} pass", *others])


if __name__ == "__main__":
    app()
