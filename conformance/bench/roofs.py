"""The two roofs that kernels are held against, measured in the run that uses them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from conformance.bench.devices import Device, Kind
from conformance.bench.timers import Timer

COPIED: Mapping[Kind, int] = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Bytes of the source of a copy, at least."""
MATRIX: Mapping[Kind, int] = {"cpu": 512, "cuda": 8192}
"""Tokens, inputs and outputs of the product: x [M, K] times a weight [N, K], as a linear layer has it."""
OPERANDS: Mapping[Kind, Sequence[torch.dtype]] = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
"""On a CPU without bf16 instructions the roof is the fp32 product."""
SAMPLES = 7


@dataclass
class Roofs:
    """Samples of both: bytes a second, read and written, and operations a second by the type of the operands."""

    copy_samples: list[float]
    product_samples: dict[str, list[float]]

    @property
    def copy(self) -> float:
        """Bytes a second of a copy: the most, since a roof is what can be reached."""
        return max(self.copy_samples)

    @property
    def operands(self) -> str:
        """The operands of the faster product."""
        return max(self.product_samples, key=lambda name: max(self.product_samples[name]))

    @property
    def matmul(self) -> float:
        """Operations a second of that product: the most."""
        return max(self.product_samples[self.operands])

    def drift(self) -> float:
        """How far the median of the second half of the samples is from the first's: the larger of both, as a share."""
        shares = []
        for samples in (self.copy_samples, self.product_samples[self.operands]):
            half = len(samples) // 2
            first, second = statistics.median(samples[:half]), statistics.median(samples[half:])
            shares.append(abs(second / first - 1))
        return max(shares)


class RoofMeter:
    """Measures both roofs; asked before the kernels and after them."""

    def __init__(self, device: Device, timer: Timer) -> None:
        self._device, self._timer = device, timer
        self.roofs = Roofs([], {})

    def measure(self) -> None:
        """Add samples of both."""
        self.roofs.copy_samples += self._copy()
        for dtype in OPERANDS[self._device.kind]:
            name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
            self.roofs.product_samples.setdefault(name, []).extend(self._product(dtype))

    def _copy(self) -> list[float]:
        size = max(COPIED[self._device.kind], 4 * self._device.cache)
        source = torch.zeros(size, dtype=torch.uint8, device=self._device.kind)
        target = torch.empty_like(source)

        def work() -> None:
            target.copy_(source)

        work()
        return [2 * size / self._timer(work) for _ in range(SAMPLES)]

    def _product(self, dtype: torch.dtype) -> list[float]:
        n = MATRIX[self._device.kind]
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, n, generator=generator).to(device=self._device.kind, dtype=dtype) for _ in range(2))

        def work() -> None:
            torch.nn.functional.linear(x, weight)

        work()
        return [2.0 * n**3 / self._timer(work) for _ in range(SAMPLES)]
