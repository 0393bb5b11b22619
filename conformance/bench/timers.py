"""Timers: of work on a device, and one for pytest-benchmark (`--benchmark-timer`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from conformance.bench.devices import Device


class Timer(Protocol):
    """Times work on a device."""

    def __call__(self, work: Callable[[], None]) -> float:
        """Seconds that the work took."""


def on_cpu(work: Callable[[], None]) -> float:
    """By the clock of this machine."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class OnDevice:
    """By two events of the GPU's stream; its last cache is overwritten before, and gives the launches a start."""

    def __init__(self, device: Device) -> None:
        self._flushed = torch.empty(2 * device.cache, dtype=torch.uint8, device="cuda")
        event: Any = torch.cuda.Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)

    def __call__(self, work: Callable[[], None]) -> float:
        """Seconds between the events."""
        self._flushed.zero_()
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3


def timer_for(device: Device) -> Timer:
    """The way to time work on a device."""
    return OnDevice(device) if device.kind == "cuda" else on_cpu


class _DeviceTime:
    """Seconds by events of the GPU's stream, added up from one event to the next: each difference is exact enough."""

    def __init__(self) -> None:
        self._last: Any = None
        self._seconds = 0.0

    def __call__(self) -> float:
        event: Any = torch.cuda.Event
        now = event(enable_timing=True)
        now.record()
        now.synchronize()
        if self._last is not None:
            self._seconds += float(self._last.elapsed_time(now)) * 1e-3
        self._last = now
        return self._seconds


_on_device = _DeviceTime()


def device_time() -> float:
    """Seconds that only grow: of the GPU, its queue worked off; without one those of `time.perf_counter`."""
    return _on_device() if torch.cuda.is_available() else time.perf_counter()
