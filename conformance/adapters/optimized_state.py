"""Stateful parts of `optimized` behind the suite's interface: requests by row here, slots of a runtime there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import optimized.attention
import optimized.compressor
from conformance.interface import Array, Reading, Stateful, Unsupported, Weights
from optimized.config import Config
from optimized.device import DEVICE
from optimized.rows import RowFormat, unpack_rows
from optimized.runtime import Batch, LayerState, Runtime

CAPACITY = 1024
"""Tokens of a request where the configuration does not say how long one may be."""
DRAFTS = 7
"""Tokens that may be taken back: some calls of the suite fit into a ring that is so much longer, some do not."""


def make_runtime(config: Config, batch_size: int, reading: Reading, capacity: int) -> Runtime:
    """A runtime with a slot for each request of a batch."""
    if reading != "intended":
        raise Unsupported("kernels score against their own source's index keys: the intended reading")
    return Runtime(config, batch_size, capacity, batch_size * capacity, DRAFTS)


def begin(runtime: Runtime, start_pos: torch.Tensor, length: int) -> Batch:
    """A call of every request of a batch, request b in slot b."""
    starts = start_pos.tolist()
    if max(starts) + length > runtime.capacity:
        raise Unsupported(f"{length} tokens from {max(starts)} on exceed the capacity of {runtime.capacity} tokens")
    return runtime.begin(range(len(starts)), starts, length)


def from_ring(ring: torch.Tensor, ends: list[int], size: int) -> torch.Tensor:
    """The last `size` positions before each end, position p at p modulo `size`; zero where a request has none.

    [B,n,d] with position p at p modulo n -> [B,size,d].
    """
    kept = torch.zeros(ring.shape[0], size, ring.shape[2], dtype=ring.dtype, device=ring.device)
    for request, end in enumerate(ends):
        for position in range(max(0, end - size), end):
            kept[request, position % size] = ring[request, position % ring.shape[1]]
    return kept


def rows_of(form: RowFormat, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The first rows of each slot, filled up with zeros to the largest count: packed [B,n,bytes] -> bf16 [B,C,d]."""
    longest = max(counts)
    exists = torch.arange(longest, device=rows.device) < torch.tensor(counts, device=rows.device).unsqueeze(1)
    if not longest:
        return torch.zeros(rows.shape[0], 0, form.width, dtype=torch.bfloat16, device=rows.device)
    return unpack_rows(form, rows[:, :longest].contiguous()) * exists.unsqueeze(-1)


@dataclass(frozen=True)
class SavedLayer:
    """A copy of what a layer keeps of a batch, and where its requests stand."""

    tensors: Mapping[str, torch.Tensor]
    ends: tuple[int, ...]


class LayerStateful(Stateful):
    """A layer's part of a runtime."""

    def __init__(self, runtime: Runtime, layer_id: int) -> None:
        self.runtime, self.layer_id = runtime, layer_id
        self.ends = [0] * runtime.slots

    @property
    def held(self) -> LayerState:
        """What the layer keeps."""
        return self.runtime.layers[self.layer_id]

    def begin(self, start_pos: Array, length: int) -> Batch:
        """The next call."""
        batch = begin(self.runtime, start_pos, length)
        self.ends = (start_pos + length).tolist()
        return batch

    def roll_back(self, end: Array) -> None:
        """Go back: what lies behind a request's end is overwritten before it is read."""
        ends = end.tolist()
        if max(before - after for before, after in zip(self.ends, ends, strict=True)) > DRAFTS:
            raise Unsupported(f"more than {DRAFTS} tokens cannot be taken back")
        self.ends = ends

    def save_state(self) -> SavedLayer:
        """A copy of what the layer keeps."""
        return SavedLayer({name: held.clone() for name, held in self.held.tensors().items()}, tuple(self.ends))

    def restore_state(self, saved: SavedLayer) -> None:
        """Back to what was kept."""
        for name, held in self.held.tensors().items():
            held.copy_(saved.tensors[name])
        self.ends = list(saved.ends)

    def state(self) -> Mapping[str, Array]:
        """`window`, and of sources `compressed`, `index_keys`, `carry_kv`, `carry_score`."""
        runtime, config, held = self.runtime, self.runtime.config, self.held
        rows = unpack_rows(runtime.window_format, held.window)
        state = {"window": from_ring(rows, self.ends, config.window_size)}
        if held.compressed is not None and held.index_keys is not None:
            counts = [end // config.ratio(self.layer_id) for end in self.ends]
            state["compressed"] = rows_of(runtime.compressed_format, held.compressed, counts)
            state["index_keys"] = rows_of(runtime.index_key_format, held.index_keys, counts)
        return state | self.carry()

    def carry(self) -> dict[str, torch.Tensor]:
        """`carry_kv` and `carry_score` [B,r,d] of a source that pools."""
        ratio = self.runtime.config.ratio(self.layer_id)
        kept = {"carry_kv": self.held.carry_kv, "carry_score": self.held.carry_score}
        return {name: from_ring(ring, self.ends, ratio) for name, ring in kept.items() if ring is not None}


class AttentionStateful(LayerStateful):
    """One attention."""

    def __init__(self, config: Config, layer_id: int, weights: Weights, runtime: Runtime) -> None:
        super().__init__(runtime, layer_id)
        self.attention = optimized.attention.Attention(config, layer_id, weights)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`attn_out` of a call."""
        x, start_pos = inputs["x"].to(DEVICE), inputs["start_pos"]
        batch = self.begin(start_pos, x.shape[1])
        return {"attn_out": self.attention.step(self.runtime, batch, x)}


class CompressorStateful(LayerStateful):
    """One compressor."""

    def __init__(self, config: Config, layer_id: int, weights: Weights, runtime: Runtime) -> None:
        super().__init__(runtime, layer_id)
        self.compressor = optimized.compressor.Compressor(config, layer_id, weights)

    def step(self, **inputs: Array) -> Mapping[str, Array]:
        """`latent` of the groups that a call completes."""
        x, start_pos = inputs["x"].to(DEVICE), inputs["start_pos"]
        batch = self.begin(start_pos, x.shape[1])
        latent = self.compressor.step(self.held, batch, x)
        ratio = self.compressor.ratio
        completed = int(((start_pos + x.shape[1]) // ratio - start_pos // ratio).max())
        return {"latent": latent[:, :completed]} if completed else {}

    def state(self) -> Mapping[str, Array]:
        """The carry."""
        return self.carry()


def capacity_of(mapping: Mapping[str, Any]) -> int:
    """Tokens of a request by the configuration, or `CAPACITY`."""
    return int(mapping.get("max_seq_len", CAPACITY))
