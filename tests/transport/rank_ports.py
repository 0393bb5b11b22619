"""Tensor-parallel ports with one mistake each, and one that disagrees with itself."""

from typing import Any
from unittest import mock

import torch
import torch.distributed

import reference.parallel
from conformance import Unsupported
from conformance.adapters.parallel_reference import ParallelReference


class _Patched(ParallelReference):
    """Makes its mistake in its own process only."""

    target = ""

    @staticmethod
    def mistake(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        mock.patch.object(reference.parallel, self.target, self.mistake).start()


class PartialSumsRounded(_Patched):
    """Partial sums are rounded to bf16 before they meet."""

    target = "reduced"

    @staticmethod
    def mistake(partial: torch.Tensor) -> torch.Tensor:
        total = partial.bfloat16().to(partial.dtype)
        torch.distributed.all_reduce(total)
        return total


class PartialSumsNotReduced(_Patched):
    """Every rank keeps its own partial sum."""

    target = "reduced"

    @staticmethod
    def mistake(partial: torch.Tensor) -> torch.Tensor:
        return partial


class ReducedOnRankZeroOnly(_Patched):
    """The sum arrives at rank 0 alone."""

    target = "reduced"

    @staticmethod
    def mistake(partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone()
        torch.distributed.reduce(total, 0)
        return total if torch.distributed.get_rank() == 0 else partial


class VocabularyNotShifted(_Patched):
    """Rows are looked up by their number in the whole table."""

    target = "_own_rows"

    @staticmethod
    def mistake(part: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        found = part[(row % part.shape[0])].float()
        torch.distributed.all_reduce(found)
        return found.to(part.dtype)


class SharedExpertOnEveryRank(ParallelReference):
    """The shared expert is summed over the ranks."""

    def experts(self, config: Any, weights: Any, x: Any, routing_weights: Any, expert_indices: Any) -> Any:
        """Added once too often for every rank."""
        with mock.patch.object(reference.parallel, "to_bf16", lambda total: total):
            total = super().experts(config, weights, x, routing_weights, expert_indices)
        shared = super().expert(config, _Below(weights, "shared_experts."), x, None).float()
        return (total + (torch.distributed.get_world_size() - 1) * shared).bfloat16()


class _Below(dict[str, Any]):
    def __init__(self, weights: Any, prefix: str) -> None:
        super().__init__({n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)})


class RanksDisagree(ParallelReference):
    """Rank 1 chooses another token among equals."""

    def greedy(self, logits: Any) -> Any:
        """The last instead of the first."""
        if torch.distributed.get_rank():
            return (logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)).int()
        return logits.argmax(-1).int()


class RankDies(ParallelReference):
    """Rank 1 raises and leaves the others waiting."""

    def embed(self, weight: Any, input_ids: Any) -> Any:
        """Only rank 0 gets to the exchange."""
        if torch.distributed.get_rank():
            raise RuntimeError("out of memory")
        return super().embed(weight, input_ids)


class RefusesTogether(ParallelReference):
    """All ranks refuse one method and go on."""

    def embed(self, weight: Any, input_ids: Any) -> Any:
        """Not there."""
        raise Unsupported("no embedding")


class NotParallel(ParallelReference):
    """Declares no ranks."""

    parallel = False
