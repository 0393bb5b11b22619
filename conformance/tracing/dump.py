"""Tensors that a port dumped while it ran: `DIR/<scenario>/<call>.safetensors`, any subset of calls, layers and taps.

A file holds the taps of one call under the names of `fixtures/FORMAT.md`: `layer3/attn_out`, `logits`.  Everything in
the folder is untrusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from conformance.cases.traces import GoldenModel, Trace
from conformance.errors import FixtureError, TargetError
from conformance.fixtures import CALL_TAPS, LAYER_TAPS
from conformance.folder.layout import open_regular
from conformance.protocol.results import LARGEST_HEADER, LARGEST_RESULTS
from conformance.tensors import Tensor, one_line, parse_header
from conformance.tracing.run import Run

SUFFIX = ".safetensors"


def read_dump(golden: GoldenModel, folder: Path, target: str) -> list[Run]:
    """What was dumped of each scenario, in the order of the golden set.

    Raises:
        TargetError: no folder, one without a file, a name that is neither scenario, call nor tap, or a damaged file;
            one line that names it.
    """
    if not folder.is_dir():
        raise TargetError(f"target {target!r}: {one_line(str(folder))} is not a directory")
    traces = {trace.name: trace for trace in golden.traces}
    runs = {path.name: _read_scenario(path, traces, target) for path in _entries(folder, target)}
    if not any(run.taps or run.malformed for run in runs.values()):
        raise TargetError(
            f"target {target!r}: no tap in it: expected SCENARIO/CALL{SUFFIX}, such as prefill-16/0{SUFFIX}"
        )
    return [runs[name] for name in traces if name in runs]


def _entries(folder: Path, target: str) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise TargetError(f"target {target!r}: {one_line(str(folder))} cannot be listed: {error.strerror}") from error


def _read_scenario(path: Path, traces: dict[str, Trace], target: str) -> Run:
    shown = f"target {target!r}: {one_line(path.name)}"
    trace = traces.get(path.name)
    if trace is None:
        raise TargetError(f"{shown}: not a scenario: one of {', '.join(traces)}")
    if path.is_symlink() or not path.is_dir():
        raise TargetError(f"{shown}: not a folder of calls")
    run = Run(trace, "tensors in a folder")
    for file in _entries(path, target):
        where = f"{shown}/{one_line(file.name)}"
        number = file.name.removesuffix(SUFFIX)
        calls = {str(call): call for call in range(len(trace.starts))}
        if number == file.name or number not in calls:
            raise TargetError(f"{where}: not a call: 0{SUFFIX} to {len(calls) - 1}{SUFFIX}")
        for layer, tap, tensor in _taps(file, where, trace.model.config.n_layers):
            run.dumped(calls[number], layer, tap, tensor)
    return run


def _taps(path: Path, where: str, layers: int) -> Iterator[tuple[int | None, str, Tensor]]:
    try:
        file = open_regular(path)
        assert file is not None  # it was listed
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_RESULTS:
                raise TargetError(f"{where}: {size} bytes, the limit is {LARGEST_RESULTS}")
            for name, entry in parse_header(file, where, largest=LARGEST_HEADER).entries.items():
                layer, tap = _name(name, where, layers)
                file.seek(entry.begin)
                raw = file.read(entry.end - entry.begin)
                try:
                    yield layer, tap, Tensor.from_bytes(raw, entry.dtype, entry.shape)
                except ValueError as error:
                    raise TargetError(f"{where}: tensor {one_line(name)}: {error}") from error
    except FixtureError as error:
        raise TargetError(str(error)) from error
    except ValueError as error:
        raise TargetError(f"{where}: {error}") from error
    except OSError as error:
        raise TargetError(f"{where}: cannot be read: {error.strerror}") from error


def _name(name: str, where: str, layers: int) -> tuple[int | None, str]:
    """Layer and tap of a tensor's name."""
    first, slash, tap = name.partition("/")
    if not slash and name in CALL_TAPS:
        return None, name
    numbers = {f"layer{layer}": layer for layer in range(layers)}
    if slash and first in numbers and tap in LAYER_TAPS:
        return numbers[first], tap
    raise TargetError(
        f"{where}: tensor {one_line(name)}: neither layer0/TAP to layer{layers - 1}/TAP nor a tap of a call"
    )
