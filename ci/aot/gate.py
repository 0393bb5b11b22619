"""Compile all kernels for all targets, count their memory traffic, and compare with the tables that are checked in.

    python ci/aot/gate.py                      every target of rules.toml, and traffic
    python ci/aot/gate.py sm_90 traffic        these
    python ci/aot/gate.py --update             write the tables

Rules hold always; the comparison of registers only for the Triton version that a table was made with, since another
compiler assigns them differently.  Traffic is counted by `traffic.py` and is the same with every version.
Exit codes: 0 as recorded; 1 a rule is broken or a table differs; 2 nothing could be compiled.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RULES: dict[str, Any] = tomllib.loads((HERE / "rules.toml").read_text(encoding="utf-8"))
TARGETS: tuple[str, ...] = tuple(RULES["shared_memory"])
TRAFFIC = "traffic"
"""In place of a target: what kernels ask of memory."""
TIMEOUT = 1800
"""Seconds for one target: far more than it takes, so that only a compiler that hangs meets it."""
WIDE_ROWS = 64

Line = dict[str, Any]


class GateError(Exception):
    """A target could not be compiled at all, or traffic not be counted; one line."""


def lines_of(target: str) -> list[Line]:
    """A target as `compile.py` reports it, or traffic as `traffic.py` does, in a process and with a cache of its own.

    Raises:
        GateError: the process failed or hung.
    """
    with tempfile.TemporaryDirectory(prefix="aot-") as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        script = ("traffic.py",) if target == TRAFFIC else ("compile.py", target)
        command = [sys.executable, "-W", "ignore", str(HERE / script[0]), *script[1:]]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            raise GateError(f"{target}: no end after {TIMEOUT} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise GateError(f"{target}: {words[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _declared(kind: str, target: str, line: Line) -> Mapping[str, Any] | None:
    """The [[spill]] or [[unsupported]] entry about a line."""
    for entry in RULES.get(kind, ()):
        if (entry["kernel"], entry["plan"]) == (line["kernel"], line["plan"]) and target in entry["targets"]:
            found: Mapping[str, Any] = entry
            return found
    return None


def _instruction(target: str, line: Line) -> str | None:
    """Start of the matrix instruction that a line must hold."""
    for product in RULES["product"]:
        if product["kernel"] == line["kernel"] and not line["constants"].get(product.get("unless")):
            by_width = RULES["instruction"][target]
            wide = line["constants"][product["rows"]] >= WIDE_ROWS
            found: str = by_width.get("wide", by_width["any"]) if wide else by_width["any"]
            return found
    return None


def broken_rules(target: str, line: Line) -> Iterator[str]:
    """What a specialisation does that it must not."""
    unsupported = _declared("unsupported", target, line)
    if "error" in line:
        if unsupported is None:
            yield f"does not compile: {line['error']}"
        return
    if unsupported is not None:
        yield "compiles, but is declared unsupported"
    spill = _declared("spill", target, line)
    if line["stack"] > (spill["bytes"] if spill else 0):
        yield f"{line['stack']} bytes of registers spill"
    if spill and not line["stack"]:
        yield "spills nothing, but a spill is declared"
    if line["shared"] > (limit := RULES["shared_memory"][target]):
        yield f"{line['shared']} bytes of shared memory, of {limit}"
    expected = _instruction(target, line)
    if expected is not None and not any(name.startswith(expected) for name in line["matrix"]):
        yield f"no {expected} instruction, but {', '.join(line['matrix']) or 'none'}"


def _label(line: Line) -> str:
    constants = " ".join(f"{name}={value}" for name, value in line["constants"].items())
    return f"{line['kernel']} {line['plan']} {constants}".rstrip()


def _labelled(lines: Sequence[Line]) -> Iterator[tuple[str, Line]]:
    """Every line under a label of its own: the same constants may come again with other types, or in the same plan."""
    seen: Counter[str] = Counter()
    for line in lines:
        label = _label(line)
        seen[label] += 1
        yield label + (f" #{seen[label]}" if seen[label] > 1 else ""), line


def _text(head: Sequence[str], name: str, rows: Sequence[str]) -> str:
    return "{\n  " + ",\n  ".join(head) + f',\n  "{name}": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


def traffic_table(lines: Sequence[Line]) -> str:
    """The checked-in text: one line a launch."""
    counts = ("read", "written", "once", "ratio", "products")
    rows = [f"    {json.dumps(label)}: {json.dumps({n: line[n] for n in counts})}" for label, line in _labelled(lines)]
    return _text(['"unit": "bytes; multiplications"'], "launches", rows)


def table(target: str, lines: Sequence[Line], version: str) -> str:
    """The checked-in text: one line a specialisation, in the order of the launches."""
    head = [f'"target": {json.dumps(target)}', f'"triton": {json.dumps(version)}']
    head.append(f'"shared_limit": {RULES["shared_memory"][target]}')
    rows = []
    for label, line in _labelled(lines):
        unsupported = _declared("unsupported", target, line)
        measured: Line = {name: line[name] for name in ("registers", "stack", "shared", "matrix") if name in line}
        if unsupported:
            measured = {"unsupported": unsupported["reason"]}
        elif (spill := _declared("spill", target, line)) is not None:
            measured["reason"] = spill["reason"]
        rows.append(f"    {json.dumps(label)}: {json.dumps(measured)}")
    return _text(head, "specialisations", rows)


def _difference(path: Path, made: str) -> list[str]:
    kept = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    name = f"ci/aot/tables/{path.name}"
    return list(difflib.unified_diff(kept, made.splitlines(), f"{name} (checked in)", f"{name} (made)", "", "", 0, ""))


def judge(target: str, lines: Sequence[Line], version: str, update: bool) -> list[str]:
    """What is wrong with a target or with traffic, as lines to print; writes its table on `update`."""
    path = HERE / "tables" / f"{target}.json"
    if target == TRAFFIC:
        wrong, made = [], traffic_table(lines)
    else:
        wrong = [f"{target}: {_label(line)}: {what}" for line in lines for what in broken_rules(target, line)]
        made = table(target, lines, version)
    if update:
        path.write_text(made, encoding="utf-8")
        return wrong
    if target == TRAFFIC:
        return _difference(path, made)
    kept = json.loads(path.read_text(encoding="utf-8"))["triton"] if path.is_file() else version
    if kept != version:
        print(f"{target}: rules only: the table is of triton {kept}, this is {version}")
        return wrong
    return wrong + _difference(path, made)


def main() -> int:
    """Gate the targets of the command line."""
    known = (*TARGETS, TRAFFIC)
    parser = argparse.ArgumentParser(description="Compile every kernel ahead of time and compare with the tables.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--update", action="store_true", help="write the tables instead of comparing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets compiled at a time")
    options = parser.parse_args()
    targets = options.targets or list(known)
    for target in targets:
        if target not in known:
            parser.error(f"unknown target {target!r}: expected {', '.join(known)}")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    try:
        version = importlib.metadata.version("triton")
        with ThreadPoolExecutor(options.jobs) as pool:
            compiled = list(pool.map(lines_of, targets))
    except importlib.metadata.PackageNotFoundError:
        print("gate: triton is not installed", file=sys.stderr)
        return 2
    except GateError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    wrong = []
    for target, lines in zip(targets, compiled, strict=True):
        found = judge(target, lines, version, options.update)
        wrong += found
        what = "launches" if target == TRAFFIC else "specialisations"
        print(f"{target}: {len(lines)} {what}, {'as recorded' if not found else 'NOT as required'}")
    if wrong:
        print("\n".join(wrong))
        print("If the change is meant: make aot UPDATE=--update, and review the difference.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
