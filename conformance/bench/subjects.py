"""What is benchmarked: an implementation in this process, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from conformance.adapters.in_process import to_numpy, to_torch
from conformance.bench.devices import Device
from conformance.interface import Description, Implementation
from conformance.tensors import Tensor


@dataclass(frozen=True)
class Subject:
    """An implementation in this process, and how its arguments are made."""

    target: str
    implementation: Implementation
    description: Description
    device: Device
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    """In what its calls run, if it relies on torch's defaults."""
    afresh: Callable[[], None] = lambda: None
    """Called before each kernel: forgets what was compiled for another."""

    @property
    def numpy(self) -> bool:
        """Whether it takes numpy arrays."""
        return self.implementation.tensor_type == "numpy"

    def convert(self, tensor: Tensor) -> Any:
        """A tensor in memory of its own, where the implementation wants it."""
        if self.numpy:
            return to_numpy(tensor)
        made = to_torch(tensor)
        return made.to(self.device.kind) if self.device.kind != "cpu" else made


def device_as_default(device: Device) -> Callable[[], AbstractContextManager[Any]]:
    """Surroundings of those who make tensors without saying where."""
    return nullcontext if device.kind == "cpu" else lambda: torch.device(device.kind)
