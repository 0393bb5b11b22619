"""One call of a recorded run: which taps it must leave, and what follows from the rows put to the attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from conformance.config import ModelConfig
from conformance.recording.upstream import TAPS, has


@dataclass(frozen=True)
class Call:
    """`batch` sequences of `length` tokens, the first at `start`."""

    batch: int
    length: int
    start: int

    def rows(self, config: ModelConfig, layer: int) -> int:
        """Compressed rows that exist after the call."""
        return (self.start + self.length) // config.ratio(layer)

    def first_row(self, config: ModelConfig, layer: int) -> int:
        """The first compressed row that this call may make."""
        return self.start // config.ratio(layer)

    def completes(self, config: ModelConfig, layer: int) -> bool:
        """Whether the call makes compressed rows."""
        return self.rows(config, layer) > self.first_row(config, layer)


def attention_taps(
    config: ModelConfig, layer: int, call: Call, rows: torch.Tensor, listed: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Taps that follow from the rows bf16 [B,N,d] and the list int [B,T,n] of a sparse attention.

    The window's rows come first: this call's in a prefill, the ring's slots in decode; then the compressed rows. The
    list has the window's part first, then the selected positions shifted by the window's rows (numerics.md 6, items 3
    and 4). `compressed` are all compressed rows.
    """
    prefill = call.start == 0
    window_rows = call.length if prefill else config.window_size
    window_part = min(call.length, config.window_size) if prefill else config.window_size
    slot = call.start % config.window_size
    taps = {
        "window_rows": rows[:, :window_rows] if prefill else rows[:, slot : slot + 1],
        "window_slots": listed[..., :window_part],
        "compressed": rows[:, :0],
    }
    if not config.ratio(layer):
        return taps
    if config.indexes(layer):
        shifted = listed[..., window_part:]
        taps["selected"] = torch.where(shifted >= 0, shifted - window_rows, shifted)
    if config.compresses(layer):
        taps["compressed"] = rows[:, window_rows : window_rows + call.rows(config, layer)]
        taps["compressed_rows"] = taps["compressed"][:, call.first_row(config, layer) :]
    return taps


def expected_taps(config: ModelConfig, call: Call) -> Iterator[tuple[str, int | None]]:
    """Tap and layer of everything that the call must leave (fixtures/FORMAT.md: absent means it did not happen)."""
    yield from ((point.tap, None) for point in TAPS if not point.per_layer)
    for layer in range(config.n_layers):
        for point in TAPS:
            if point.per_layer and has(config, layer, point.where) and happens(config, layer, call, point.tap):
                yield point.tap, layer
        yield from (("window_rows", layer), ("window_slots", layer))
        if config.compresses(layer) and call.completes(config, layer):
            yield "compressed_rows", layer
        if config.indexes(layer) and call.rows(config, layer):
            yield "selected", layer


def happens(config: ModelConfig, layer: int, call: Call, tap: str) -> bool:
    """Whether a call leaves a tap of a layer that has it."""
    if tap in ("latent", "index_keys"):
        return call.completes(config, layer)
    if tap.startswith("index_") or tap == "candidates":
        return call.rows(config, layer) > 0
    return True
