"""Weights of a layer's experts, those of one kind laid one behind the other (numerics.md 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optimized.config import Config


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of several experts of one kind, one behind the other: the packed bytes and their scales."""

    kind: str
    """"fp4" (routed) or "fp8" (shared)."""
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """w1, w2, w3: weights uint8 [E, N, K/2] or [E, N, K], scales uint8 [E, ...]."""
    place: torch.Tensor
    """int32 [all experts]: where an expert stands in the stack, -1 where it is not there."""


def stack_experts(weights: Mapping[str, torch.Tensor], names: Mapping[int, str], experts: int) -> ExpertStack:
    """Lay the experts named `names[number]` one behind the other.

    Raises:
        ValueError: none is named.
    """
    if not names:
        raise ValueError("experts: the weights hold no expert")
    numbers = sorted(names)
    matrices = {}
    for matrix in ("w1", "w2", "w3"):
        parts = [
            [weights[f"{names[n]}.{matrix}.{what}"].view(torch.uint8) for n in numbers] for what in ("weight", "scale")
        ]
        matrices[matrix] = (torch.stack(parts[0]).contiguous(), torch.stack(parts[1]).contiguous())
    first = weights[f"{names[numbers[0]]}.w1.weight"]
    place = torch.full((experts,), -1, dtype=torch.int32, device=first.device)
    place[torch.tensor(numbers, device=first.device)] = torch.arange(
        len(numbers), dtype=torch.int32, device=first.device
    )
    return ExpertStack("fp4" if first.dtype == torch.uint8 else "fp8", matrices, place)


def routed_stack(config: Config, weights: Mapping[str, torch.Tensor]) -> ExpertStack:
    """The routed experts that the weights hold."""
    held = {name.split(".")[1] for name in weights if name.startswith("experts.")}
    return stack_experts(weights, {int(n): f"experts.{n}" for n in held}, config.n_routed_experts)
