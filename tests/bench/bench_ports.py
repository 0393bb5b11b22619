"""Ports of one method, `rms_norm`, that are right, wrong, or cheat while they are timed."""

from __future__ import annotations

import time
from typing import Any

import torch

import conformance
from conformance.adapters.reference import Reference


class Right(conformance.Implementation):
    def describe(self) -> conformance.Description:
        return conformance.Description("made for tests", "1")

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return Reference().rms_norm(x, weight, eps)


class Slow(Right):
    """Right, and late."""

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        time.sleep(0.02)
        return super().rms_norm(x, weight, eps)


class Numpy(Right):
    tensor_type = "numpy"

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return super().rms_norm(torch.from_numpy(x).bfloat16(), torch.from_numpy(weight).bfloat16(), eps).float()


class Wrong(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return super().rms_norm(x, weight * 2, eps)


class Raising(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        raise ZeroDivisionError("on\nto lines")


class Counting(Right):
    def __init__(self) -> None:
        self.calls = 0

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        self.calls += 1
        return self.answer(x, weight, eps) if self.calls > 3 else super().rms_norm(x, weight, eps)

    def answer(self, x: Any, weight: Any, eps: float) -> Any:
        """What comes back once the gate was passed; overridden."""
        raise NotImplementedError


class LazyOnceTimed(Counting):
    """Right while it is judged, then memory as it comes."""

    def answer(self, x: Any, weight: Any, eps: float) -> Any:
        return torch.empty_like(x)


class WrongOnceTimed(Counting):
    def answer(self, x: Any, weight: Any, eps: float) -> Any:
        return x.clone()


class RaisingOnceTimed(Counting):
    def answer(self, x: Any, weight: Any, eps: float) -> Any:
        raise MemoryError("no room")


class UnsupportedOnceTimed(Counting):
    def answer(self, x: Any, weight: Any, eps: float) -> Any:
        raise conformance.Unsupported("not now")


class Nothing(Right):
    """Returns before there is a result."""

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return None


class Sparse(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return super().rms_norm(x, weight, eps).to_sparse()


class Interrupted(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        raise KeyboardInterrupt


class Remembering(Right):
    """Answers from memory what it was asked before: right, without any work."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        if id(x) not in self.known:
            self.known[id(x)] = super().rms_norm(x, weight, eps)
        return self.known[id(x)]


class InPlace(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        out = super().rms_norm(x, weight, eps)
        x[0] = 1
        return out


class InsideItsInput(Right):
    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return x.copy_(super().rms_norm(x, weight, eps))


class Interpreted(Right):
    def describe(self) -> conformance.Description:
        return conformance.Description("kernels", "1", conventions={"architecture": "interpreted"})
