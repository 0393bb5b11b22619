"""What a server keeps of its requests, allocated once: rings, cached rows, carries, and what layers publish.

Slot-indexed, not paged: a slot holds everything of one request at fixed places, so that a row's address follows from
(slot, position) by arithmetic on the device.  Pages would save memory where requests are much shorter than `capacity`,
and cost a table look-up for each gathered row and a host that hands out pages.  Rows are few here (890 bytes a token of
context at the released sizes, window apart): what pages save is small, and a decode step without any host decision can
be captured as a graph.

Nothing is cleared when a request begins or tokens are taken back.  What is listed, pooled or looked back to follows
from positions alone, and a request reads only what it has written itself.
"""

from __future__ import annotations

from optimized.device import DEVICE

# ruff: isort: split
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from optimized.config import Config
from optimized.rotary import rotary_tables
from optimized.rows import RowFormat, compressed_format, index_key_format, window_format


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps of each slot; None where its role has no use for it.

    Position p of a request lies at p modulo the length of a ring.  Rings are longer than what is read of them by the
    number of tokens that may be taken back: a rejected token has then overwritten nothing that is read again.
    """

    window: torch.Tensor
    """uint8 [slots, window_size + drafts, bytes]: the ring of window rows."""
    compressed: torch.Tensor | None
    """uint8 [slots, capacity / ratio, bytes] of a KV source: row j stands for the tokens from j · ratio on."""
    index_keys: torch.Tensor | None
    """uint8 [slots, capacity / ratio, bytes] of a KV source."""
    carry_kv: torch.Tensor | None
    """fp32 [slots, ratio + drafts, head_dim] of a KV source with ratio > 1: the ring of projected tokens."""
    carry_score: torch.Tensor | None
    """As `carry_kv`: their gate scores."""
    look_back: torch.Tensor | None
    """int32 [slots, engram_max_ngram_size - 1 + drafts] before an Engram: the ring of token ids, -1 at an image."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: held for name, held in every.items() if held is not None}


@dataclass
class Batch:
    """The requests that one call advances, each by the same number of tokens.

    The tensors live on the device and keep their addresses when the batch advances, so that a step which reads them can
    be captured once and replayed.
    """

    slots: torch.Tensor
    """int64 [B], no slot twice."""
    start: torch.Tensor
    """int64 [B]: position of each request's first token in this call."""
    positions: torch.Tensor
    """int64 [B, length]: positions of this call's tokens."""
    furthest: int
    """On the host: where the request that stands furthest will stand after this call."""

    @property
    def size(self) -> int:
        """Requests."""
        return self.positions.shape[0]

    @property
    def length(self) -> int:
        """Tokens of each request."""
        return self.positions.shape[1]


class Runtime:
    """The state of `slots` requests of up to `capacity` tokens each, for every layer of a model.

    One explicit object: models and layers hold weights only and are handed the runtime they work on.

    - `position` int64 [slots]: tokens that each slot holds, on the device.
    - `layers`: the state of each layer, by its number.
    - `selected` int32 [tokens, index_topk]: compressed positions that the last index source selected for each token of
      this call (row b · length + t), ascending, then -1.
    - `candidates` int32 [tokens, candidate_topk_blocks]: candidate blocks that the candidate source published for each
      token of this call, ascending, then -1.

    Both published tensors are overwritten by their source in each call before any layer reads them (numerics.md 6.1).
    """

    def __init__(
        self,
        config: Config,
        slots: int,
        capacity: int,
        tokens: int,
        drafts: int = 0,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        """Allocate everything.

        `tokens` bounds what one call brings, all requests together; `drafts` how many of a call's last tokens may be
        taken back (numerics.md 10.1); `layer_ids` are the layers of the model, all of them by default.

        Raises:
            ValueError: a size below 1, or `drafts` below 0.
        """
        for name, value, least in (
            ("slots", slots, 1),
            ("capacity", capacity, 1),
            ("tokens", tokens, 1),
            ("drafts", drafts, 0),
        ):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self.config = config
        self.slots, self.capacity, self.tokens, self.drafts = slots, capacity, tokens, drafts
        self.window_format = window_format(config)
        self.compressed_format = compressed_format(config)
        self.index_key_format = index_key_format(config)
        self.position = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        chosen = range(config.n_layers) if layer_ids is None else layer_ids
        self.layers = {layer_id: self._allocate(layer_id) for layer_id in chosen}
        self.selected = torch.full((tokens, config.index_topk), -1, dtype=torch.int32, device=DEVICE)
        self.candidates = torch.full((tokens, config.candidate_topk_blocks), -1, dtype=torch.int32, device=DEVICE)
        every = torch.arange(capacity, device=DEVICE)
        self._tables = {
            compressed: rotary_tables(config, layer_id, every)
            for compressed, layer_id in {config.ratio(layer_id) > 0: layer_id for layer_id in chosen}.items()
        }

    def _allocate(self, layer_id: int) -> LayerState:
        config, ratio = self.config, self.config.ratio(layer_id)

        def bytes_of(rows: int, form: RowFormat) -> torch.Tensor:
            return torch.zeros(self.slots, rows, form.bytes, dtype=torch.uint8, device=DEVICE)

        def carry() -> torch.Tensor:
            return torch.zeros(self.slots, ratio + self.drafts, config.head_dim, device=DEVICE)

        owns = config.compresses(layer_id)
        rows = self.capacity // ratio if owns else 0
        reach = config.engram_max_ngram_size - 1 + self.drafts
        return LayerState(
            window=bytes_of(config.window_size + self.drafts, self.window_format),
            compressed=bytes_of(rows, self.compressed_format) if owns else None,
            index_keys=bytes_of(rows, self.index_key_format) if owns else None,
            carry_kv=carry() if owns and ratio > 1 else None,
            carry_score=carry() if owns and ratio > 1 else None,
            look_back=torch.zeros(self.slots, reach, dtype=torch.int32, device=DEVICE)
            if config.has_engram(layer_id)
            else None,
        )

    def rotary(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a layer at every position: fp32 [capacity, rope_head_dim / 2] each (numerics.md 4)."""
        return self._tables[self.config.ratio(layer_id) > 0]

    def source(self, layer_id: int) -> LayerState:
        """The state that holds the compressed rows and index keys which a layer reads (numerics.md 6.1)."""
        return self.layers[self.config.kv_source(layer_id)]

    def begin(self, slots: Sequence[int], starts: Sequence[int], length: int) -> Batch:
        """A call that brings `length` tokens for each request in `slots`, the first at its position in `starts`.

        A request begins at 0 and goes on where it stands, or up to `drafts` tokens before that: what it has brought
        from there on is taken back.

        Raises:
            ValueError: slots that do not exist or come twice, positions outside 0...capacity, or more than `tokens`.
        """
        if not slots or len(starts) != len(slots):
            raise ValueError(f"starts: expected one position for each of {len(slots)} slots, got {len(starts)}")
        if min(slots) < 0 or max(slots) >= self.slots:
            raise ValueError(f"slots: expected 0...{self.slots - 1}, got {list(slots)}")
        if len(set(slots)) < len(slots):
            raise ValueError(f"slots: one comes twice in {list(slots)}")
        if length < 1 or length * len(slots) > self.tokens:
            raise ValueError(
                f"length: {len(slots)} requests of {length} tokens, of 1...{self.tokens} tokens in all for one call"
            )
        if min(starts) < 0 or max(starts) + length > self.capacity:
            raise ValueError(
                f"starts: {length} tokens from {list(starts)} on do not lie within a capacity of {self.capacity}"
            )
        start = torch.tensor(starts, dtype=torch.int64, device=DEVICE)
        batch = Batch(
            slots=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
            start=start,
            positions=start.unsqueeze(1) + torch.arange(length, device=DEVICE),
            furthest=max(starts) + length,
        )
        self.position[batch.slots] = start + length
        return batch

    def advance(self, batch: Batch) -> None:
        """Move a batch on to its requests' next tokens, as many as before, without asking the device anything.

        Raises:
            ValueError: a request would exceed the capacity.
        """
        if batch.furthest + batch.length > self.capacity:
            raise ValueError(f"batch: {batch.length} more tokens from {batch.furthest} on exceed {self.capacity}")
        batch.furthest += batch.length
        batch.start += batch.length
        batch.positions += batch.length
        self.position[batch.slots] = batch.start + batch.length

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """A copy of all that one slot holds, to resume the request later, here or elsewhere (numerics.md 10.2)."""
        return {name: held[slot].clone() for name, held in self._held().items()}

    def restore(self, slot: int, saved: Mapping[str, torch.Tensor]) -> None:
        """Put what `save` gave, here or in a runtime of the same sizes, into a slot.

        Raises:
            ValueError: it is of a runtime of other sizes.
        """
        held = self._held()
        if {name: part.shape for name, part in saved.items()} != {name: part.shape[1:] for name, part in held.items()}:
            raise ValueError("saved: the state of a request in a runtime of other sizes")
        for name, kept in saved.items():
            held[name][slot] = kept

    def _held(self) -> dict[str, torch.Tensor]:
        parts = {"position": self.position}
        for layer_id, state in self.layers.items():
            parts |= {f"layer{layer_id}/{name}": held for name, held in state.tensors().items()}
        return parts
