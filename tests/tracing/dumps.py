"""Folders of dumped taps, made from a recording: what a port that computes exactly the golden values would dump."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from conformance.cases.traces import Trace
from conformance.fixtures import CALL_TAPS, LAYER_TAPS
from conformance.tensors import Tensor, write_safetensors

Taps = dict[str, Tensor]


def recorded(trace: Trace, call: int) -> Taps:
    found: Taps = {tap: trace.scenario.tap(call, tap) for tap in CALL_TAPS if trace.scenario.has(call, tap)}
    for layer in range(trace.model.config.n_layers):
        found |= {
            f"layer{layer}/{tap}": trace.scenario.tap(call, tap, layer)
            for tap in LAYER_TAPS
            if trace.scenario.has(call, tap, layer)
        }
    return found


def write_dump(folder: Path, trace: Trace, change: Callable[[int, Taps], Mapping[str, Tensor]]) -> Path:
    """A dump of every call, after `change(call, taps)`."""
    (folder / trace.name).mkdir(parents=True)
    for call in range(len(trace.starts)):
        taps = change(call, recorded(trace, call))
        write_safetensors(folder / trace.name / f"{call}.safetensors", taps)
    return folder


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return Tensor.from_values(tensor.values() * factor, tensor.dtype)
