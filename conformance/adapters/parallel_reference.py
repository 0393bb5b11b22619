"""The reference with its weights split over ranks, as `reference-parallel`: for `conformance check --world-size n`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed

import reference.parallel
from conformance.adapters.reference import Reference, ReferenceStateful
from conformance.interface import Array, Config, Stateful, Weights


class ParallelReference(Reference):
    """One rank of the reference; ranks talk over gloo, by the variables that torch.distributed reads."""

    parallel: ClassVar[bool] = True

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        super().__init__(compute)
        if not torch.distributed.is_initialized():
            # Without ranks around it, it is the only one.
            if "RANK" in os.environ:
                torch.distributed.init_process_group("gloo")
            else:
                store = torch.distributed.HashStore()  # type: ignore[attr-defined]
                torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def linear_fp8(self, x: Array, weight: Array, scale: Array) -> Array:
        """Split by inputs: a sum over ranks."""
        return reference.parallel.row_linear_fp8(x, weight, scale, compute=self.compute)

    def embed(self, weight: Array, input_ids: Array) -> Array:
        """Split by vocabulary."""
        return reference.parallel.embed(weight, input_ids)

    def head(self, config: Config, weights: Weights, h: Array, pre: Array) -> tuple[Array, Array]:
        """Split by vocabulary."""
        return reference.parallel.head(self._read(config), weights, h, pre, compute=self.compute)

    def attention_queries(
        self, config: Config, layer_id: int, weights: Weights, q_latent: Array, positions: Array
    ) -> Array:
        """Split by heads."""
        return reference.parallel.attention_queries(
            self._read(config), layer_id, weights, q_latent, positions, compute=self.compute
        )

    def attention_output(self, config: Config, layer_id: int, weights: Weights, o: Array, positions: Array) -> Array:
        """Split by heads, then by inputs."""
        return reference.parallel.attention_output(
            self._read(config), layer_id, weights, o, positions, compute=self.compute
        )

    def experts(
        self, config: Config, weights: Weights, x: Array, routing_weights: Array, expert_indices: Array
    ) -> Array:
        """Split by expert."""
        return reference.parallel.experts(
            self._read(config), weights, x, routing_weights, expert_indices, compute=self.compute
        )

    def moe(self, config: Config, weights: Weights, x: Array, image_mask: Array | None) -> Array:
        """Split by expert."""
        return reference.parallel.moe(self._read(config), weights, x, image_mask, compute=self.compute)["ffn_out"]

    def engram_write(
        self, config: Config, layer_id: int, weights: Weights, h: Array, rows: Array, image_mask: Array | None
    ) -> Array:
        """Split by rows of the table."""
        return reference.parallel.parallel_engram_write(
            self._read(config), layer_id, weights, h, rows, image_mask, compute=self.compute
        )

    def attention(self, config: Config, layer_id: int, weights: Weights, runtime: Any, batch_size: int) -> Stateful:
        """Split by heads."""
        made = reference.parallel.ParallelAttention(
            self._read(config), layer_id, weights, runtime, batch_size, compute=self.compute
        )
        return ReferenceStateful(made)

    def block(
        self, config: Config, layer_id: int, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """A split layer."""
        made = reference.parallel.ParallelBlock(
            self._read(config), layer_id, weights, runtime, token_map, batch_size, compute=self.compute
        )
        return ReferenceStateful(made)

    def stack(
        self,
        config: Config,
        layer_ids: Sequence[int],
        weights: Weights,
        runtime: Any,
        token_map: Array | None,
        batch_size: int,
    ) -> Stateful:
        """Split layers."""
        made = reference.parallel.ParallelStack(
            self._read(config), layer_ids, weights, runtime, token_map, batch_size, compute=self.compute
        )
        return ReferenceStateful(made)

    def model(
        self, config: Config, weights: Weights, runtime: Any, token_map: Array | None, batch_size: int
    ) -> Stateful:
        """A model of split layers."""
        made = reference.parallel.ParallelModel(
            self._read(config), weights, runtime, token_map, batch_size, compute=self.compute
        )
        return ReferenceStateful(made)
